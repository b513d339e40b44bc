"""Bundles of any Dask graph on a cluster: the scheduler learns what tasks cost, and bundles what clients submit."""
