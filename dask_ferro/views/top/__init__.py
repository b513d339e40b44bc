"""`dask ferro top`: the user's settings (`choice`), the drawing (`screen`), and the event loop (`live`)."""
