"""What one sees of a cluster: traces, findings, and the data of pages and of `dask ferro top`."""
