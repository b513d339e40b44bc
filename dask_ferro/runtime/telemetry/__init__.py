"""Records of what happened on a scheduler, as values for traces, pages, events and metrics."""
