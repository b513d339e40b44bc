"""The progress of a computation: finished bundles and ops, ops a second, and the remaining seconds.

The scheduler sends counts at intervals, by the connection that Dask's own progress bars use, so that nothing of it is
left when its reader has gone.  The remaining seconds are those of unfinished tasks, by the mean of their prefix,
divided by the seconds of tasks finished per second lately: this accounts for threads that come, go or idle.
Durations are seconds.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from dask.typing import Key
from distributed import Client, Future, Scheduler
from distributed.comm.core import connect
from distributed.core import clean_exception
from distributed.protocol.pickle import dumps
from distributed.scheduler import TaskPrefix, TaskState

# Frequent enough to look alive; with 100,000 unfinished tasks, a look at them takes the scheduler 10 ms.
INTERVAL = 0.25
# Rates are averages over the last seconds: long enough to be steady, short enough to show workers come and go.
_WINDOW = 10.0


class Progress(NamedTuple):
    """The progress of a computation.

    Attributes
    ----------
    status : str
        "waiting" (the scheduler does not have all tasks yet), "running" or "finished".
    elapsed : float
        Seconds since the scheduler was asked.
    tasks, bundles, ops : (int, int)
        Finished and total counts.  A task that is not a bundle has no ops.
    failed : int
        Tasks that failed, were cancelled, or depend on such; they do not count as finished.
    ops_per_s, tasks_per_s : float
        Rates of the last seconds while it runs; over the whole run once it is finished.
    remaining : float or None
        Projected seconds; None: unknown so far.
    """

    status: str
    elapsed: float
    tasks: tuple[int, int] = (0, 0)
    bundles: tuple[int, int] = (0, 0)
    ops: tuple[int, int] = (0, 0)
    failed: int = 0
    ops_per_s: float = 0.0
    tasks_per_s: float = 0.0
    remaining: float | None = None


async def follow(
    client: Client, futures: Iterable[Future], interval: float = INTERVAL
) -> AsyncIterator[Progress]:
    """Yield the progress of futures at intervals until all have ended, or their scheduler is gone.

    Parameters
    ----------
    client : distributed.Client
    futures : iterable of Future
        Held until the end, since keys that are not wanted are forgotten and never finish.
    interval : float
        Seconds between two counts.
    """
    futures, began, pace = list(futures), monotonic(), Pace()
    # What was cancelled may never reach the scheduler.
    keys = [future.key for future in futures if not future.cancelled()]
    scheduler: Any = client.scheduler
    try:
        comm = await connect(scheduler.address, **client.connection_args)
    except OSError:
        return
    # A scheduler that goes ends the connection.
    with suppress(OSError):
        try:
            setup, function = dumps(partial(_Tasks, keys)), dumps(_Tasks.counts)
            await comm.write({"op": "feed", "setup": setup, "function": function, "interval": interval})
            is_over, counts_since = False, 0
            while not is_over:
                # The one that is on its way may be older than that, and tasks that were cancelled may never come.
                counts_since += all(future.done() for future in futures)
                # A scheduler that closes may still reply that its handler has ended.
                if (counts := await comm.read()) is None:
                    return
                if "exception" in counts:
                    raise clean_exception(**counts)[1] or RuntimeError("the scheduler cannot count tasks")
                is_over = counts["status"] == "finished" or counts_since > 1
                yield pace({**counts, "elapsed": monotonic() - began}, is_over)
        finally:
            comm.abort()


# ---- on the scheduler --------------------------------------------------------------------------------------


class _Tasks:
    """The tasks that some keys need, with their ops; those that have ended are only counted."""

    def __init__(self, keys: Collection[Key], scheduler: Scheduler) -> None:
        self._keys = keys
        self._left: list[tuple[TaskState, int]] | None = None
        self._all, self._done = [0, 0, 0], [0, 0, 0]  # tasks, bundles, ops
        self._failed = 0
        self._ended: Counter[TaskPrefix] = Counter()  # since the first count

    @staticmethod
    def counts(scheduler: Scheduler, tasks: _Tasks) -> dict[str, Any]:
        """Return the current counts, in types that msgpack supports."""
        if tasks._left is not None:
            tasks._look(tasks._left, tasks._ended)
        elif all(key in scheduler.tasks for key in tasks._keys):
            needed = [
                (ts, ops_of(ts.run_spec))
                for ts in _collect_dependencies(scheduler.tasks[key] for key in tasks._keys)
            ]
            for _, ops in needed:
                _count(tasks._all, ops)
            tasks._look(needed, Counter())
        left = Counter(ts.prefix for ts, _ in tasks._left or ())
        return {
            "status": "waiting" if tasks._left is None else "running" if tasks._left else "finished",
            "done": list(tasks._done),
            "all": list(tasks._all),
            "failed": tasks._failed,
            "seconds": _seconds(tasks._ended) or 0.0,
            "left_seconds": _seconds(left),
        }

    def _look(self, tasks: Iterable[tuple[TaskState, int]], ended: Counter[TaskPrefix]) -> None:
        """Count those of some tasks that have ended, and keep the others."""
        self._left = []
        for ts, ops in tasks:
            # The size of a result remains known when it is released.
            if ts.state in ("memory", "released", "forgotten") and ts.nbytes >= 0:
                _count(self._done, ops)
                ended[ts.prefix] += 1
            elif ts.state in ("erred", "forgotten"):
                self._failed += 1
            else:
                self._left.append((ts, ops))


def _count(counts: list[int], ops: int) -> None:
    counts[0] += 1
    counts[1] += ops > 0
    counts[2] += ops


def _seconds(tasks: Counter[TaskPrefix]) -> float | None:
    """Return the seconds of tasks; prefixes without measurements count with the mean of the others."""
    # Dask uses -1 for prefixes without measurements.
    known = [prefix.duration_average for prefix in tasks if prefix.duration_average >= 0]
    if not known:
        return None
    mean = sum(known) / len(known)
    averages = ((n, prefix.duration_average) for prefix, n in tasks.items())
    return float(sum(n * (seconds if seconds >= 0 else mean) for n, seconds in averages))


def _collect_dependencies(targets: Iterable[TaskState]) -> set[TaskState]:
    """Return tasks and all that they depend on."""
    seen = set(targets)
    stack = list(seen)
    while stack:
        new = stack.pop().dependencies - seen
        seen |= new
        stack.extend(new)
    return seen


def ops_of(spec: Any) -> int:
    """Return the ops that a task runs, including those of bundles fused into it; 0: it is not a bundle."""
    # If the module is not loaded, there are no bundles.
    bundles = sys.modules.get("dask_ferro.lower.worker.task")
    if bundles is None or not hasattr(spec, "func"):
        return 0
    if spec.func is bundles.run_bundle:
        return sum(count for _, count in spec.args[1].engines)
    return sum(map(ops_of, spec.args[0].values())) if spec.has_subgraph() else 0


# ---- in the client -----------------------------------------------------------------------------------------


class Pace:
    """Rates and remaining seconds, computed from successive counts."""

    def __init__(self) -> None:
        self._first: Mapping[str, Any] | None = None
        self._lately: deque[Mapping[str, Any]] = deque()

    def __call__(self, now: Mapping[str, Any], is_over: bool) -> Progress:
        """Return the progress for the newest counts, with the seconds "elapsed"."""
        if now["status"] == "waiting":
            return Progress("finished" if is_over else "waiting", now["elapsed"])
        since = self._since(now, is_over)
        elapsed = now["elapsed"] - since["elapsed"]
        tasks_per_s, _, ops_per_s = (
            _rate(new - old, elapsed) for new, old in zip(now["done"], since["done"], strict=True)
        )
        threads, left = _rate(now["seconds"] - since["seconds"], elapsed), now["left_seconds"]
        tasks, bundles, ops = zip(now["done"], now["all"], strict=True)
        return Progress(
            "finished" if is_over else "running",
            now["elapsed"],
            tasks,
            bundles,
            ops,
            now["failed"],
            ops_per_s,
            tasks_per_s,
            0.0 if is_over else None if left is None or threads <= 0 else left / threads,
        )

    def _since(self, now: Mapping[str, Any], is_over: bool) -> Mapping[str, Any]:
        """Return the counts to compare with: from some seconds ago, or the first if nothing finished since."""
        self._first = first = self._first or now
        self._lately.append(now)
        while self._lately[0]["elapsed"] < now["elapsed"] - _WINDOW:
            self._lately.popleft()
        oldest = self._lately[0]
        return first if is_over or oldest["done"] == now["done"] else oldest


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
