"""Checkpoints: their manifest, and their files."""
