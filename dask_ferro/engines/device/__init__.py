"""Devices: their interface, their memory, the arrays that stay there, and the lock around them."""
