"""Dask's own tests with dask_ferro's scheduler plugin on: `python -m tests.dask_suite`."""
