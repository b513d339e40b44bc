"""Whether the rows of a batch depend on each other: if they do, a batch may not be cut into chunks."""
