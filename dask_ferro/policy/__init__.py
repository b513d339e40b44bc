"""Who computes a task, and with how many workers: pure decisions over snapshots of facts.

Standard library only.  Nothing here reads a clock, sends a message or hears of Dask: the scheduler plugin, the
simulator and the property tests run the same objects.
"""
