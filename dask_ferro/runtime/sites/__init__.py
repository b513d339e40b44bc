"""Batch systems other than SLURM, under the same controller."""
