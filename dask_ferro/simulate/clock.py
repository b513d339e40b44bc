"""Virtual time: what is due, in order; equal times in the order in which they were asked for.

Background events (ticks, alarms) do not keep a simulation alive: where nothing else is due for a while, it is stuck.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

# Of background events alone: stock Dask looks once a second, and nothing learns anything later than that.
_PATIENCE = 30.0


class Clock:
    """The events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, bool, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._pending = 0

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act(*args)` at a time."""
        self._count += 1
        self._pending += 1
        heappush(self._due, (when, self._count, True, act, args))

    def background(self, when: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act(*args)` at a time, if anything is alive by then."""
        self._count += 1
        heappush(self._due, (when, self._count, False, act, args))

    def run(self, is_done: Callable[[], bool]) -> bool:
        """Run until it is done; return whether it is, or stuck."""
        alive = 0.0
        due = self._due
        while not is_done():
            if not due or (not self._pending and due[0][0] > alive + _PATIENCE):
                return False
            self.now, _, foreground, act, args = heappop(due)
            if foreground:
                self._pending -= 1
                alive = self.now
            act(*args)
        return True


class Line:
    """One direction of a stream of messages that leave in batches.

    Parameters
    ----------
    interval : float
        Seconds between two batches; the first after a pause leaves at once (Dask's `BatchedSend`).
    wire : float
        Seconds on the way.
    """

    __slots__ = ("_batch", "_interval", "_wire")

    def __init__(self, interval: float, wire: float) -> None:
        self._interval = interval
        self._wire = wire
        self._batch = -interval

    def arrives(self, now: float) -> float:
        """Return when a message that is sent now arrives."""
        if now > self._batch:
            self._batch = max(now, self._batch + self._interval)
        return self._batch + self._wire
