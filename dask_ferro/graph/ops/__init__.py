"""Facts of each operator: its FLOPs, bytes and sharding labels, and its effect on the rows of a batch."""
