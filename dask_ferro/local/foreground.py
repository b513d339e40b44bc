"""A cluster that runs in the foreground until it is stopped: a scheduler and the elastic controller, without own work.

It reports each change in one line, and ends in order whatever ends it: Ctrl-C, SIGTERM, a closed terminal, an error,
or a client that shut the scheduler down.  Its jobs are cancelled then.  A second signal does not wait for that.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
from distributed import Status

from dask_ferro.elastic.controller import Elastic
from dask_ferro.errors import InputError
from dask_ferro.scheduler.events import ScaleEvent
from dask_ferro.slurm.cluster import SLURMCluster

# Seconds between reads of the controller's decisions; it decides once a second.
_LOOK = 0.25
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
# In the order of a job's life.
_STATES = ("pending", "booting", "running", "leaving")


class SignalRecorder:
    """A context that records the first of the signals that end a cluster, and raises KeyboardInterrupt at the second.

    A handler that raised at once could leave a cluster half started.  Signals that the caller ignores (nohup) stay
    ignored.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalRecorder:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


def run_foreground(
    bounds: Mapping[str, Any],
    started: Callable[[Any], None],
    tell: Callable[[str], None],
    scheduler_file: Path | None = None,
    **keywords: Any,
) -> signal.Signals | None:
    """Run a cluster on SLURM, whose workers follow the work, until a signal or a client ends it; cancel its jobs then.

    Parameters
    ----------
    bounds : mapping of str to number
        The minimum and the maximum of workers.
    started : callable
        Called with the cluster once its scheduler runs.
    tell : callable
        Called with a line for each change.
    scheduler_file : Path, optional
        The file with the scheduler's address while it runs.
    **keywords
        Keywords of `ff.SLURMCluster`, which override Dask's configuration.

    Returns
    -------
    signal.Signals or None
        The signal that ended it; None: a client shut it down.

    Raises
    ------
    InputError
        If the cluster cannot start here, or the site refuses the first jobs permanently, with its message.
    """
    if scheduler_file is not None:
        configured = dask.config.get(f"jobqueue.{keywords['config_name']}.scheduler-options", None) or {}
        keywords["scheduler_options"] = configured | {"scheduler_file": str(scheduler_file)}
    with SignalRecorder() as stop:
        with _explain_errors("the cluster did not start"):
            cluster: Any = SLURMCluster(**keywords)
        try:
            started(cluster)
            adaptive = cluster.adapt(Adaptive=Elastic, **bounds)
            seen, shown = 0.0, ""
            while stop.signal is None and cluster.scheduler.status == Status.running:
                for entry in [e for e in tuple(adaptive.decisions) if e["time"] > seen]:
                    seen = entry["time"]
                    if (text := summary(entry)) != shown:
                        shown = text
                        tell(f"{time.strftime('%H:%M:%S', time.localtime(seen))}  {text}")
                time.sleep(_LOOK)
            tell("the jobs are being cancelled")
        finally:
            # A scheduler that a client has shut down is not asked to close: Dask would try to reach it for 30 s.
            cluster.shutdown_scheduler = cluster.scheduler.status == Status.running
            cluster.close()
    return stop.signal


def scripts(**keywords: Any) -> dict[str, str]:
    """Return the job script of each pool as SLURM would get it, except for the scheduler's address.

    Nothing is started, and no folder is created.

    Raises
    ------
    InputError
        If a job cannot be described with these keywords.
    """

    async def rendered() -> dict[str, str]:
        # On a running event loop, Dask's clusters start when they are awaited; this one never is.
        cluster: Any = SLURMCluster(asynchronous=True, **keywords)
        try:
            return {pool.name: cluster.job_script(pool.name) for pool in cluster.pools}
        finally:
            await cluster.close()

    with _explain_errors("no job can be described so"):
        return asyncio.run(rendered())


@contextmanager
def _explain_errors(what: str) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"{what}: {error}") from error


def summary(decision: ScaleEvent) -> str:
    """Return one line about a decision of the controller: the jobs, the actions, and closed pools.

    >>> summary({"jobs": {"running": 2, "pending": 1}, "actions": []})
    '1 pending, 2 running'
    >>> summary({"jobs": {}, "actions": [], "closed": {"gpu": {"paused": True}}})
    'no jobs; gpu is paused'
    """
    counts = [f"{decision['jobs'][state]} {state}" for state in _STATES if decision["jobs"].get(state)]
    closed = decision.get("closed") or {}
    paused = [f"{pool} is paused" for pool, told in closed.items() if told["paused"]]
    return "; ".join([", ".join(counts) or "no jobs", *decision["actions"], *paused])
