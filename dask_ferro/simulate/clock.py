"""Virtual time: the queue of events, in order of their times and, at equal times, of their scheduling.

Background events (ticks, alarms) do not keep a simulation alive: if nothing else is due for long, it is stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import log
from random import Random

# Seconds of background events alone: stock Dask's stealing runs once a second, and no estimate changes later than
# that.
_PATIENCE = 30.0


class Clock:
    """The queue of future events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, bool, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self._pending = 0

    def at(self, when: float, act: Callable[..., None], *args: object) -> None:
        """Call `act(*args)` at a time."""
        self._count += 1
        self._pending += 1
        heappush(self._due, (when, self._count, True, act, args))

    def background(self, when: float, act: Callable[..., None], *args: object) -> None:
        """Call `act(*args)` at a time, if the simulation still runs by then."""
        self._count += 1
        heappush(self._due, (when, self._count, False, act, args))

    def run(self, is_done: Callable[[], bool]) -> bool:
        """Process events until `is_done()`; return whether it became true, or False if the simulation is stuck."""
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


class Cores:
    """The CPU cores that a machine's processes share: first come, first served, and kept until the process is idle.

    Parameters
    ----------
    count : int, optional
        None: as many as there are processes, so that none waits.
    taken : float
        The share of the cores, from 0 to less than 1, that processes take all the time: sections last longer by it.
    spread : float
        The standard deviation of the logarithm of a section's duration; its mean stays.
    """

    def __init__(
        self, clock: Clock, count: int | None = None, taken: float = 0.0, spread: float = 0.0, seed: int = 0
    ) -> None:
        self.are_counted = count is not None
        self._spread = spread
        self._mean = -log(1.0 - taken) - spread**2 / 2
        self._random = Random(seed)
        self._clock = clock
        self._idle = count or 0
        self._waiting: deque[Callable[[], None]] = deque()

    def lasts(self, seconds: float) -> float:
        """Return the duration of a section on a core, drawn around its mean of `seconds` without other load."""
        if not self.are_counted:
            return seconds
        return seconds * self._random.lognormvariate(self._mean, self._spread)

    def take(self, act: Callable[[], None]) -> None:
        """Call `act()` with a core, now or once one is free; the caller has to release it."""
        if self._idle:
            self._idle -= 1
            act()
        else:
            self._waiting.append(act)

    def release(self) -> None:
        """Pass the core on to the next process that waits."""
        if self._waiting:
            self._clock.at(self._clock.now, self._waiting.popleft())
        else:
            self._idle += 1


class Process:
    """A process that computes one thing at a time, as a Python interpreter does, on shared cores."""

    def __init__(self, clock: Clock, cores: Cores) -> None:
        self._clock = clock
        self._cores = cores
        self._sections: deque[tuple[float, Callable[..., None], tuple[object, ...]]] = deque()

    def run(self, seconds: float, act: Callable[..., None], *args: object) -> None:
        """Compute for that many seconds, after all earlier work, and then call `act(*args)`."""
        self._sections.append((seconds, act, args))
        if len(self._sections) == 1:
            self._cores.take(self._begin)

    def _begin(self) -> None:
        self._clock.at(self._clock.now + self._cores.lasts(self._sections[0][0]), self._end)

    def _end(self) -> None:
        _, act, args = self._sections[0]
        act(*args)
        self._sections.popleft()
        if self._sections:
            self._begin()
        else:
            self._cores.release()


class Line:
    """One direction of a stream of messages, sent in batches.

    Parameters
    ----------
    interval : float
        Seconds between two batches; the first after a pause leaves at once (Dask's `BatchedSend`).
    wire : float
        Seconds on the network.
    """

    __slots__ = ("_next", "_wire", "batch", "interval", "messages")

    def __init__(self, interval: float, wire: float) -> None:
        self.interval = interval
        self.messages: list[tuple[Callable[..., None], tuple[object, ...]]] = []  # of the newest batch
        self._wire = wire
        self.batch = -interval  # when the newest one leaves
        self._next = 0.0

    def arrives(self, now: float) -> float:
        """Return when a message sent now arrives."""
        if now > self.batch:
            self.batch = max(now, self._next)
            self._next = self.batch + self.interval
            self.messages = []
        return self.batch + self._wire
