"""Inputs of a call that are not plain arrays, and model copies that are sent directly to workers."""
