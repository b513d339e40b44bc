"""Costs of nodes: FLOPs and bytes, and from them seconds on a device."""
