"""Operator domains: the standard's, by both of its names, and one of our own."""

# ONNX reserves the prefix "ai.onnx"; ours holds the project's name, so that nobody else uses it.
OWN_DOMAIN = "ai.dask_ferro"
STANDARD_DOMAINS = frozenset({"", "ai.onnx"})
