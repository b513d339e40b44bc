"""The commands of `dask ferro` and `ff.progress`: functions that need both `runtime` and `views`, one per module."""
