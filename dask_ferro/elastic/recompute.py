"""The cost of losing a result: the seconds of compute that would be spent again.

These are the seconds of a result's own task, and of those of its inputs that are not in memory any more, recursively.
An input of several tasks is shared among them, so that no second is counted twice and a long chain is walked once.
"""

from __future__ import annotations

from math import inf

from distributed import Scheduler
from distributed.scheduler import TaskState

from dask_ferro.scheduler.projected_seconds import Seconds

# The number of released tasks followed back: longer walks would block the scheduler.
_MAX_TASKS = 1000


class Recompute:
    """The cost of losing results, at one moment.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._own = Seconds(scheduler)
        self._known: dict[TaskState, float] = {}

    def seconds(self, ts: TaskState) -> float:
        """Return the seconds to compute a result again; infinite where that is impossible (scattered data)."""
        stack = [ts]
        while stack:
            gone = [dep for dep in stack[-1].dependencies if dep.state != "memory"]
            unknown = [dep for dep in gone if dep not in self._known]
            if unknown and len(stack) <= _MAX_TASKS:
                stack += unknown
                continue
            last = stack.pop()
            inputs = sum(self._known.get(dep, 0.0) / max(len(dep.dependents), 1) for dep in gone)
            self._known[last] = inf if last.run_spec is None else self._own.left(last) + inputs
        return self._known[ts]

    def rank(self, ts: TaskState) -> tuple[float, int]:
        """Return the sort key that puts the results first that are the most expensive to compute again per byte.

        The rule is that of the fractional knapsack: whenever the time is over, no other order would have saved more
        seconds in as many bytes, except for the last result.
        """
        nbytes = max(ts.get_nbytes(), 1)
        return -self.seconds(ts) / nbytes, nbytes
