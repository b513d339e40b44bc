"""Plans of tensor, data and pipeline parallelism: read from YAML, applied to a graph, or proposed for one."""
