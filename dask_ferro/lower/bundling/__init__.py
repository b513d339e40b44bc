"""Bundles of Dask tasks: any graph's tasks run several at a time, as those of a model do."""
