"""Inputs of a call on their way to its tasks: which are cut into chunks, and which are sent to workers."""
