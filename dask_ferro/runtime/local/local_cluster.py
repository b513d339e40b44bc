"""A LocalCluster set up for tensor work.

Dask's own, with the scheduler plugin on, and without three settings that were measured to cost batch inference 5 %
together: its nanny makes malloc give memory back at every large free (each large output then faults its pages in
again), and its workers sample their own stacks all the time.  Everything else is `distributed.LocalCluster`'s, and
whatever is passed wins.
"""

from __future__ import annotations

import logging
import signal
from multiprocessing import resource_tracker
from typing import Any

import dask
import distributed
from distributed.comm.core import CommClosedError

from dask_ferro.runtime.plugin.settings import Settings

# Large outputs come and go with every task: below 256 MB of free memory at the top, malloc keeps its pages.
_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": 256 * 2**20,
    "MALLOC_MMAP_THRESHOLD_": 256 * 2**20,
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
}
_PLUGIN = "dask_ferro.runtime.preload"
_WORKER_CONFIG = {"distributed.worker.profile.enabled": False}


class Nanny(distributed.Nanny):
    """Dask's nanny, which starts its worker process with malloc keeping its memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {"distributed.nanny.pre-spawn-environ": _ENVIRONMENT, **_WORKER_CONFIG}
        with dask.config.set(settings):
            super().__init__(*args, **kwargs)

    async def instantiate(self) -> Any:
        """Start the worker process deaf to a terminal's Ctrl-C, which reaches all processes: its nanny stops it."""
        # Windows: a process cannot be started deaf.
        if not hasattr(signal, "pthread_sigmask"):
            return await super().instantiate()
        # Its start unblocks SIGINT in this thread.
        resource_tracker.ensure_running()
        # Children inherit it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return await super().instantiate()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_told(record: logging.LogRecord) -> bool:
    """Whether asyncio shall log a record: not that a connection was closed under a call that nobody waits for.

    Ctrl-C during `client.scatter`, which Dask does not cancel in its parts, printed a traceback for each worker.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, CommClosedError) and "never retrieved" in record.getMessage())


class LocalCluster(distributed.LocalCluster):
    """Return a `distributed.LocalCluster` with dask_ferro's scheduler plugin, set up for tensor work.

    The process logs no closed connection any more of which nobody waits to hear: there are some after Ctrl-C.

    Parameters are those of `distributed.LocalCluster`; ``scheduler_kwargs={"preload": []}`` leaves the plugin off,
    `ff.uninstall` takes it off.

    Raises
    ------
    ConfigError
        A setting of the plugin's that is wrong, before anything is started.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("processes", True):
            kwargs.setdefault("worker_class", Nanny)
        configured = dask.config.get("distributed.scheduler.preload") or []
        options = {"preload": [*configured, _PLUGIN], **(kwargs.get("scheduler_kwargs") or {})}
        if _PLUGIN in options["preload"]:
            Settings.configured()
        kwargs["scheduler_kwargs"] = options
        # It is added once, however often.
        logging.getLogger("asyncio").addFilter(is_told)
        super().__init__(*args, **kwargs)
