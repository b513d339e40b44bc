"""What Dask's own tests of stealing and of the scheduler promise to users, as tests of this plugin."""
