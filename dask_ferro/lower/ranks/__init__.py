"""Sharded graphs as Dask collections: segments of each rank and collectives between them, as one flow."""
