"""Copies of results that a preemption without warning would lose."""
