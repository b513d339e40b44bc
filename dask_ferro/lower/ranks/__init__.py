"""Sharded graphs as Dask collections: one task per segment of each rank, and collectives between them."""
