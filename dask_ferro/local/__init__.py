"""Clusters of this machine or for one command, and a model's run."""
