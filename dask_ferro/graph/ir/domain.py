"""Operator domains: the standard's domain with both of its names, and dask_ferro's own."""

# ONNX reserves the prefix "ai.onnx"; this domain contains the project's name, so that no other project uses it.
OWN_DOMAIN = "ai.dask_ferro"
STANDARD_DOMAINS = frozenset({"", "ai.onnx"})
