"""Elastic scaling: how many jobs, of which pools, and which of them go."""
