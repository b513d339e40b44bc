"""The functions that tasks run on workers: bundles, and those of ranks beside them."""
