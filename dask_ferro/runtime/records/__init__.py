"""The records of all jobs of a cluster."""
