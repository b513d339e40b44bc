"""Sharded graphs as Dask collections: a task a segment of each rank, and collectives between them."""
