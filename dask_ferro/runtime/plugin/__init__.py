"""The scheduler plugin: what Dask's scheduler is told, asked and made to do."""
