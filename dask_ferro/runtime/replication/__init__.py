"""Copies of results as insurance against preemption without warning."""
