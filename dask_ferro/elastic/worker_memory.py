"""The free memory of a worker as the scheduler knows it.  Sizes are bytes."""

from __future__ import annotations

import dask
from distributed.scheduler import WorkerState

from dask_ferro.scheduler.upstream import metrics_of

# Dask's default for the share of memory from which a worker spills.
_TARGET = 0.6
# For a worker without a memory limit: a petabyte, so that shares of it can still be compared.
_ENDLESS = 2**50


def free_bytes(worker: WorkerState) -> int:
    """Return the bytes that a worker can take before it spills: its limit's `target` share, less its use.

    Its use is the data in memory and other memory that has been in use for a while (Dask's "optimistic" memory).
    """
    if not worker.memory_limit:
        return _ENDLESS
    used = worker.memory.optimistic if "memory" in metrics_of(worker) else worker.nbytes
    target = dask.config.get("distributed.worker.memory.target") or _TARGET
    return max(int(target * worker.memory_limit) - used, 0)


def spilling_bytes(worker: WorkerState) -> int:
    """Return the bytes that a worker can take if it spills: its limit less all its data, including that on disk.

    Sizes on disk are about those in memory.  A worker that does not spill can take no more than `free_bytes`.
    """
    if not worker.memory_limit or not dask.config.get("distributed.worker.memory.target"):
        return free_bytes(worker)
    return max(worker.memory_limit - worker.nbytes, free_bytes(worker))
