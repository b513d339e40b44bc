"""The baselines of comparisons: stock Dask's placement and stealing, and HEFT's plan."""
