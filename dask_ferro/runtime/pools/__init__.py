"""Pools of jobs: how they open, close, and change while a cluster runs."""
