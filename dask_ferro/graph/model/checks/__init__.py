"""Checks of a model before anything runs: each names what is wrong, where, and what was wanted."""
