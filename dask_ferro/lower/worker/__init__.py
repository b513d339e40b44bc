"""Tasks of workers: bundles, actions of pipelines, and segments of ranks."""
