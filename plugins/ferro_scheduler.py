"""dask scheduler --preload plugins/ferro_scheduler.py: dask_ferro's stealing and placement on this scheduler."""

from dask_ferro.scheduler.preload import dask_setup

__all__ = ["dask_setup"]
