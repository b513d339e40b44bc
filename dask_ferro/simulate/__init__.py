"""Task graphs on a virtual cluster, under the same policies as on a real one."""
