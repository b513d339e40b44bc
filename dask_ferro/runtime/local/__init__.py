"""Clusters on this machine and for one command, and runs of models on them."""
