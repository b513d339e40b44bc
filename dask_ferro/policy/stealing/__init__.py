"""Work stealing: the policies by name, and what one step of them is shown."""
