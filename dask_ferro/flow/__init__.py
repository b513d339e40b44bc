"""Flows: tasks that run on several workers at a time and exchange their results directly, without the scheduler."""
