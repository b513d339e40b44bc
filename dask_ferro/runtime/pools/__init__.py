"""Pools of jobs: their state, and how they close, pause and open again."""
