"""A device that holds arrays: its memory, what lies in it, and who may use it at a time."""
