"""The cost of losing results: the seconds of compute that would be spent again.

These are the seconds of a result's own task, and of those of its inputs that are not in memory any more (or would not
be, if some results are lost together), recursively.  An input of several tasks is shared among them, so that no
second is counted twice and a long chain is walked once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from dask.typing import Key
from distributed import Scheduler
from distributed.scheduler import TaskState

from dask_ferro.runtime.plugin.projected_seconds import Seconds
from dask_ferro.runtime.replication.releases import Releases

# The number of released tasks followed back: longer walks would block the scheduler.
_FAR = 1000


class Recompute:
    """The cost of losing results, at one moment.

    Parameters
    ----------
    scheduler : Scheduler
    is_lost : callable
        Returns whether a result in memory would be lost together with others, and so counts as missing.
    is_saved : callable
        Returns whether such a result, given its seconds, would not be lost after all.
    anchored : mapping of key to seconds
        Inputs held only temporarily: they count as missing, at the given seconds each.

    Attributes
    ----------
    releases : Releases
        Based on the same projections.
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
        """Return the seconds to compute a result again; infinite where that is impossible."""
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
        """Return the inputs of a task that would have to be computed again as well."""
        return [
            dep
            for dep in ts.dependencies
            if dep.state != "memory" or dep.key in self._anchored or self._is_lost(dep)
        ]
