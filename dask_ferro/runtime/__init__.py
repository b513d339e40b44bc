"""Effects: clusters, plugins, whatever observes and enacts."""
