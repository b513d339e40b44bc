"""Bundling: nodes are merged into tasks as long as the projected makespan gets shorter."""
