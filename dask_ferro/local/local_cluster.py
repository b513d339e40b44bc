"""A LocalCluster set up for tensor work.

It is Dask's own with the scheduler plugin, and without settings that were measured to cost batch inference 5 %
together: Dask's nanny makes malloc return memory at every large free (each large output then faults its pages in
again), and its workers profile their own stacks all the time.  Everything else is as in `distributed.LocalCluster`,
and explicit arguments win.
"""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from typing import Any

import dask
import distributed

from dask_ferro.scheduler.settings import Settings
from dask_ferro.scheduler.upstream_deploy import KeepsRestartedWorkers

# Large outputs come and go with every task: below 256 MB of free memory at the top, malloc keeps its pages.
_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": 256 * 2**20,
    "MALLOC_MMAP_THRESHOLD_": 256 * 2**20,
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
}
_PLUGIN = "dask_ferro.scheduler.preload"
_WORKER_CONFIG = {"distributed.worker.profile.enabled": False}


class Nanny(distributed.Nanny):
    """Dask's nanny with a worker process whose malloc keeps its memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {"distributed.nanny.pre-spawn-environ": _ENVIRONMENT, **_WORKER_CONFIG}
        with dask.config.set(settings):
            super().__init__(*args, **kwargs)

    async def instantiate(self) -> Any:
        """Start the worker process with SIGINT blocked, since Ctrl-C reaches all processes; its nanny stops it."""
        # On Windows a process cannot be started with blocked signals.
        if not hasattr(signal, "pthread_sigmask"):
            return await super().instantiate()
        # Starting the resource tracker later would unblock SIGINT in this thread.
        resource_tracker.ensure_running()
        # Child processes inherit the signal mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return await super().instantiate()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalCluster(KeepsRestartedWorkers, distributed.LocalCluster):
    """A `distributed.LocalCluster` with dask_ferro's scheduler plugin, set up for tensor work.

    It takes the parameters of `distributed.LocalCluster`; ``scheduler_kwargs={"preload": []}`` omits the plugin, and
    `ff.uninstall` removes it.

    Raises
    ------
    InputError
        If a setting of the plugin is invalid; nothing is started then.

    Examples
    --------
    >>> from distributed import Client
    >>> import dask_ferro as ff
    >>> with ff.LocalCluster(n_workers=2) as cluster, Client(cluster) as client:  # doctest: +SKIP
    ...     client.map(len, ["a", "bc"])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("processes", True):
            kwargs.setdefault("worker_class", Nanny)
        configured = dask.config.get("distributed.scheduler.preload") or []
        options = {"preload": [*configured, _PLUGIN], **(kwargs.get("scheduler_kwargs") or {})}
        if _PLUGIN in options["preload"]:
            Settings.configured()
        kwargs["scheduler_kwargs"] = options
        super().__init__(*args, **kwargs)
