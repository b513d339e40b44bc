"""The record of all jobs of a cluster, and its journal."""
