"""A model on its inputs as a Dask collection, from the caller's values to the keys of its outputs."""
