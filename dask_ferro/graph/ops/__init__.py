"""What is known of each operator: FLOPs, bytes, sharding labels and what it does to the rows of a batch."""
