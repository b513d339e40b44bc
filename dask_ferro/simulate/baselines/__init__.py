"""What ours is compared with: stock Dask's placement and stealing, and HEFT's plan."""
