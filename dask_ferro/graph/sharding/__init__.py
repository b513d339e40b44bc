"""Placements of values on a mesh of ranks, and the redistributions between them."""
