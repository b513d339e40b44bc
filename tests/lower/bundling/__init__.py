"""Tests of bundles of any Dask graph."""
