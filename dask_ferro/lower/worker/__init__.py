"""What runs in a worker: bundles, actions of pipelines, and segments of ranks."""
