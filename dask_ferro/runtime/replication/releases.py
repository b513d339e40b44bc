"""The projected time until results are released: when the last task that reads one ends.

Only the worker knows the order in which its tasks run; by priority is a good guess.  Durations are seconds.
"""

from __future__ import annotations

from math import inf

from distributed.scheduler import TaskState, WorkerState

from dask_ferro.runtime.plugin.projected_seconds import Seconds

# A result with more readers than this is not released soon.
_MANY = 64


class Releases:
    """The seconds until results are released.

    Parameters
    ----------
    seconds : Seconds
        Projected seconds of tasks.
    """

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds
        self._ends: dict[WorkerState, dict[TaskState, float]] = {}

    def left(self, ts: TaskState) -> float:
        """Return the seconds until a result is released; infinite if a client holds it, or a reader has to wait."""
        waiters = ts.waiters or ()
        if ts.who_wants or len(waiters) > _MANY:
            return inf
        return max(map(self._end, waiters), default=0.0)

    def _end(self, reader: TaskState) -> float:
        ws = reader.processing_on
        if ws is None:
            return inf
        if ws not in self._ends:
            self._ends[ws] = self._queue(ws)
        return self._ends[ws].get(reader, inf)

    def _queue(self, ws: WorkerState) -> dict[TaskState, float]:
        """Return when each task of a worker ends, if they run by priority on all of its threads."""
        before, ends = 0.0, {}
        for ts in sorted(ws.processing, key=lambda ts: ts.priority or ()):
            own = self._seconds.left(ts)
            before += own
            ends[ts] = max(own, before / max(ws.nthreads, 1))
        return ends
