"""Prepared models: loaded and checked, with all results that are computed once for all calls."""
