"""A device that holds arrays: its memory, the arrays that stay there, and the lock around it."""
