"""Clusters of this machine, and one in the foreground."""
