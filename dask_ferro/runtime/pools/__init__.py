"""Pools of jobs: their state, and changes of them while a cluster runs."""
