"""A model as the client sees it: opened, checked, with what is worked out once for all its calls."""
