"""What results stand for: the seconds of compute that would be spent again if they were lost.

A result's own task, and those of its inputs that nobody holds any more (or would, when some results are lost
together), as far back as that goes.  An input that several need is shared among them, so that no second is counted
twice and a long chain is walked once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from dask.typing import Key
from distributed import Scheduler
from distributed.scheduler import TaskState

from dask_ferro.runtime.plugin.projected_seconds import Seconds
from dask_ferro.runtime.replication.releases import Releases

# Released tasks are followed back so far: looks at a long graph would hold up the scheduler.
_FAR = 1000


class Recompute:
    """Seconds that results stand for, as of one moment.

    Parameters
    ----------
    scheduler : Scheduler
    is_lost : callable
        Whether a result that is there would be lost together with others: it is an input that is gone.
    is_saved : callable
        Called with one of those and its seconds, whether it would not be lost after all.
    anchored : mapping of key to seconds
        Inputs that are there only as long as it takes: they count as gone, for so many seconds each.

    Attributes
    ----------
    releases : Releases
        By the same projections.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        is_lost: Callable[[TaskState], bool] = lambda ts: False,
        is_saved: Callable[[TaskState, float], bool] = lambda ts, seconds: False,
        anchored: Mapping[Key, float] | None = None,
    ) -> None:
        self._is_lost, self._is_saved = is_lost, is_saved
        self._anchored = anchored or {}
        self._own = Seconds(scheduler)
        self._known: dict[TaskState, float] = {}
        self.releases = Releases(self._own)

    def seconds(self, ts: TaskState) -> float:
        """Return the seconds that a result stands for; infinity where nobody could compute it again."""
        if ts in self._known:
            return self._known[ts]
        if ts.run_spec is None:
            return inf
        stack = [ts]
        while stack:
            needed = self._needed(stack[-1]) if len(stack) <= _FAR else []
            unknown = [dep for dep in needed if dep not in self._known and dep.key not in self._anchored]
            if unknown:
                stack += unknown
            else:
                last = stack.pop()
                self._known[last] = self._of(last)
        return self._known[ts]

    def _of(self, ts: TaskState) -> float:
        if ts.run_spec is None:
            # It was scattered, and is gone.
            return inf
        inputs = sum(self._again(dep) / max(len(dep.dependents), 1) for dep in self._needed(ts))
        return self._own.left(ts) + inputs

    def _again(self, ts: TaskState) -> float:
        if ts.key in self._anchored:
            return self._anchored[ts.key]
        known = self._known.get(ts, 0.0)
        return 0.0 if ts.state == "memory" and self._is_saved(ts, known) else known

    def _needed(self, ts: TaskState) -> list[TaskState]:
        """The inputs of a task that would have to be computed again as well."""
        return [
            dep
            for dep in ts.dependencies
            if dep.state != "memory" or dep.key in self._anchored or self._is_lost(dep)
        ]
