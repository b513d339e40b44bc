"""Operator domains: the standard's, by both of its names, and one of our own."""

# A prefix that ONNX keeps for itself is "ai.onnx"; ours holds the project's name, so that no other has it.
OWN_DOMAIN = "ai.dask_ferro"
STANDARD_DOMAINS = frozenset({"", "ai.onnx"})
