"""Clusters of this machine and for one command, and models that run on them."""
