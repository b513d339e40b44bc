"""The worker plugin, and what it measures."""
