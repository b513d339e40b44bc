"""The functions that tasks run on workers: bundles, and the tasks of ranks next to them."""
