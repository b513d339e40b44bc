"""The functions that tasks run on workers: bundles, actions of pipelines, and segments of ranks."""
