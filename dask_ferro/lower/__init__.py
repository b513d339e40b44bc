"""Lowering of bundles to a Dask graph.

This is the lowest layer of the package that imports Dask.
"""
