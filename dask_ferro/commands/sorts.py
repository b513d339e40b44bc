"""What `dask ferro top` sorts its rows by."""

from __future__ import annotations

# What rows are sorted by: title of the column, and the entry of a row.
SORTS = {
    "backlog": "backlog",
    "worker": "name",
    "state": "state",
    "running": "running",
    "tasks": "tasks",
    "thresh": "threshold",
    "memory": "memory",
    "in": "in",
    "out": "out",
    "dev": "device",
    "cpu": "cpu",
}
# Those that begin with the first in the alphabet; the others begin with the most.
WORDS = ("worker", "state", "running", "dev")
