"""Pure decisions over snapshots of facts: placement of tasks, work stealing and the number of workers.

Standard library only.  Nothing here reads a clock, sends a message or imports Dask: the scheduler plugin, the
simulator and the property tests run the same objects.
"""
