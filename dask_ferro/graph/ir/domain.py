"""Operator domains: the standard's, by both of its names, and one of our own."""

OWN_DOMAIN = "ai.dask_ferro"
STANDARD_DOMAINS = frozenset({"", "ai.onnx"})
