"""Batch jobs: configuration, script, names, and the code that runs inside them."""
