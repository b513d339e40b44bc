"""The elastic controller: the number of workers follows the work, and workers retire without losing data."""
