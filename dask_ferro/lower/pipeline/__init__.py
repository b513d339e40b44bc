"""Pipelines as Dask collections: a model over stages of workers, in the order of a schedule."""
