"""The commands of `dask ferro`, a module for each or for two that belong together."""
