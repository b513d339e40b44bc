"""What a task costs Dask besides its own seconds on this cluster, from what the scheduler hears of tasks that finish.

    hop         from the end of a task to the start of the only one that reads it, next on the same worker: one clock,
                and nothing between the two but messages, and the scheduler
    dispatch    CPU of the scheduler's event loop over tasks, while these finish fast enough to be most of what it does

The CPU of a task over all processes is not known here, since workers do not tell theirs.  This takes 1 us a task.
Durations are seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from time import perf_counter, thread_time
from typing import Any

from dask.typing import Key
from distributed import Scheduler
from distributed.scheduler import TaskState

from dask_ferro.flow.costs import renewed
from dask_ferro.graph.bundling.partition import DASK, Overheads

# The newest measurements of each, whose median counts; as many say at first what was measured elsewhere.
_NEWEST = 31
# CPU is read after so many tasks, and counts if these took less than so long: the loop's own CPU is 1 % of it.
_TASKS, _SECONDS = 256, 2.0


class DaskCosts:
    """What is measured of one scheduler's tasks."""

    def __init__(self) -> None:
        self._overheads = DASK
        self._hops, self._dispatches = (deque([s] * _NEWEST, _NEWEST) for s in (DASK.hop_s, DASK.dispatch_s))
        # By worker, the only reader of its last task, and the end of that.
        self._last: dict[str, tuple[Key | None, float]] = {}
        self._tasks, self._since, self._cpu = 0, 0.0, 0.0

    def overheads(self) -> Overheads:
        """Return the costs; called from any thread."""
        before = self._overheads
        hop_s = renewed(before.hop_s, tuple(self._hops))
        dispatch_s = renewed(before.dispatch_s, tuple(self._dispatches))
        self._overheads = replace(before, hop_s=hop_s, dispatch_s=dispatch_s)
        return self._overheads

    def task_left(self, ts: TaskState, finish: str, seconds: float | None, message: Any) -> None:
        """Learn from a task that has finished."""
        if seconds is None:
            return
        worker, stop = message["worker"], message["startstops"][-1]["stop"]
        reader, end = self._last.get(worker, (None, 0.0))
        self._last[worker] = next(iter(ts.dependents)).key if len(ts.dependents) == 1 else None, stop
        if len(ts.dependencies) == 1 and ts.key == reader:
            self._hops.append(stop - seconds - end)
        self._tasks += 1
        if self._tasks == _TASKS:
            now, cpu = perf_counter(), thread_time()
            if now - self._since < _SECONDS:
                self._dispatches.append((cpu - self._cpu) / _TASKS)
            self._tasks, self._since, self._cpu = 0, now, cpu

    def remove_worker(self, scheduler: Scheduler, worker: str, **facts: object) -> None:
        """Forget a worker."""
        self._last.pop(worker, None)
