"""The records of all jobs of a cluster, and its journal."""
