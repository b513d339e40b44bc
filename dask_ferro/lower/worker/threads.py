"""The number of threads of an ONNX Runtime session in this process, so that each core of the host is used once.

It is the host's cores divided by the task threads that share them: those of all workers on the same host.  The
scheduler is asked for these workers once, when the first session is created.
"""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import Any

import dask
from dask.system import CPU_COUNT

from dask_ferro import config

# Projected seconds of a run above which its session has threads: they cost their start.
WORTH_THREADS_S = 1e-3


def intra_op_threads() -> int:
    """Return the intra-op threads of a session in this process (config ``ferro.onnxruntime.intra-op-threads``)."""
    wanted = config.value("onnxruntime.intra-op-threads")
    return wanted if wanted is not None else share_of(CPU_COUNT, _task_threads())


def share_of(cores: int, task_threads: int) -> int:
    """Return the whole cores that each of `task_threads` may use; at least one.

    >>> share_of(16, 2), share_of(2, 2), share_of(2, 3)
    (8, 1, 1)
    """
    return max(1, cores // max(1, task_threads))


def _task_threads() -> int:
    """Return how many Dask task threads share this host's cores."""
    if (worker := this_worker()) is not None:
        return _host_threads(worker.address)
    # Without a worker: 1 with the synchronous scheduler, else the pool's size.
    if dask.config.get("scheduler", None) in ("sync", "synchronous", "single-threaded"):
        return 1
    if threading.current_thread() is threading.main_thread():
        return 1
    return int(dask.config.get("num_workers", None) or CPU_COUNT)


def this_worker() -> Any:
    """Return the Dask worker that runs the calling task, or None."""
    # Called in each task, and an import statement takes 2 us.
    distributed = sys.modules.get("distributed")
    # Without distributed imported in full, no worker can be running here.
    if distributed is None or not hasattr(distributed, "get_worker"):
        return None
    try:
        return distributed.get_worker()
    except ValueError:
        return None


@cache
def _host_threads(address: str) -> int:
    from distributed.utils import sync

    worker = this_worker()
    identity = sync(worker.loop, worker.scheduler.identity, n_workers=-1)
    host = identity["workers"][address]["host"]
    return sum(w["nthreads"] for w in identity["workers"].values() if w["host"] == host)
