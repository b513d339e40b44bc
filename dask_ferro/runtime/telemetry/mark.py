"""Where a reader of the telemetry is: how far it has read, and which thread has which row of its worker's.

It knows neither what is recorded nor how it is drawn.
"""

from __future__ import annotations

from math import inf

_NOBODY = object()


class Mark:
    """How far somebody has read: counts of what was recorded by then, and the rows of the workers that are there."""

    def __init__(self, most: int = 0, runs: int = 0, steals: int = 0) -> None:
        self.most, self.runs, self.steals = most, runs, steals
        self.rows: dict[str, TimelineRows] = {}


class TimelineRows:
    """The rows of one worker on a timeline, as many as it has threads.

    A thread keeps its row.  A worker may have more threads than that over time, as tasks that secede and actors have
    some of their own: another one takes a row that nobody had, or is free at its time, or else is so first.
    """

    def __init__(self, count: int) -> None:
        self._owners: list[object] = [_NOBODY] * max(count, 1)
        self._until = [-inf] * max(count, 1)
        self._of: dict[object, int] = {}

    def __call__(self, thread: object, start: float, stop: float) -> int:
        """Return the row of what ran in a thread at a time."""
        row = self._of.get(thread)
        if row is None:
            row = self._of[thread] = self._free(start)
            # Who had the row before has to find another one, should it run something again.
            self._of.pop(self._owners[row], None)
            self._owners[row] = thread
        self._until[row] = max(self._until[row], stop)
        return row

    def _free(self, start: float) -> int:
        if _NOBODY in self._owners:
            return self._owners.index(_NOBODY)
        free = (row for row, until in enumerate(self._until) if until <= start)
        return next(free, self._until.index(min(self._until)))
