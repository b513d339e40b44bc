"""The position of a reader in the telemetry: the counts it has read, and the timeline row of each thread.

It is independent of the kind of records and of their drawing.
"""

from __future__ import annotations

from math import inf

_NOBODY = object()


class Mark:
    """The position of a reader: counts of the records it has read, and the rows of present workers."""

    def __init__(self, most: int = 0, runs: int = 0, steals: int = 0) -> None:
        self.most, self.runs, self.steals = most, runs, steals
        self.rows: dict[str, TimelineRows] = {}


class TimelineRows:
    """The rows of one worker on a timeline, one for each of its threads.

    A thread keeps its row.  A worker may have more threads over time, since seceded tasks and actors have threads of
    their own: another thread takes an unused row, or one that is free at its time, or the one that is free first.
    """

    def __init__(self, count: int) -> None:
        self._owners: list[object] = [_NOBODY] * max(count, 1)
        self._until = [-inf] * max(count, 1)
        self._of: dict[object, int] = {}

    def __call__(self, thread: object, start: float, stop: float) -> int:
        """Return the row of a task that ran in a thread at a time."""
        row = self._of.get(thread)
        if row is None:
            row = self._of[thread] = self._free(start)
            # The previous thread of the row gets another one when it runs something again.
            self._of.pop(self._owners[row], None)
            self._owners[row] = thread
        self._until[row] = max(self._until[row], stop)
        return row

    def _free(self, start: float) -> int:
        if _NOBODY in self._owners:
            return self._owners.index(_NOBODY)
        free = (row for row, until in enumerate(self._until) if until <= start)
        return next(free, self._until.index(min(self._until)))
