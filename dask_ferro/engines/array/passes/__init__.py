"""Passes over a program: which of its units become one call, in which order, and on which side."""
