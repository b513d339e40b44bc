"""`dask ferro top`: what its user chose (`choice`), the screen that is drawn of it, and the loop (`live`)."""
