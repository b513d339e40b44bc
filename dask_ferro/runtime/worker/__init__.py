"""The worker plugin and its measurements."""
