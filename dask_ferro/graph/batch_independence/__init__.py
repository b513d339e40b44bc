"""Whether the rows of a batch depend on each other: if so, the batch must not be split into chunks."""
