"""Inputs of a call that are no plain arrays, and what is sent straight to workers."""
