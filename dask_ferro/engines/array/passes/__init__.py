"""Passes over a program: fusion and batching of its units, their order, and their placement on host or device."""
