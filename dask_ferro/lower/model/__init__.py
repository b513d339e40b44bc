"""A model on its inputs as a Dask collection, from what the caller gives to the keys of its outputs."""
