"""The overview of a cluster: whether it is healthy, what it does, what is stuck and why, what the plugin moved."""
