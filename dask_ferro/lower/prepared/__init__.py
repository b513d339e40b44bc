"""Prepared models: loaded and checked, with everything that is computed once for all calls."""
