"""Work stealing: the policies by name, and the snapshot that one step of them sees."""
