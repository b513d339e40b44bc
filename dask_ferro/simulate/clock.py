"""Virtual time: what is due, in order; equal times in the order in which they were asked for.

Background events (ticks, alarms) do not keep a simulation alive: where nothing else is due for a while, it is stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import log
from random import Random

# Of background events alone: stock Dask looks once a second, and nothing learns anything later than that.
_PATIENCE = 30.0


class Clock:
    """The events to come."""

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


class Cores:
    """The CPU cores of a machine, which its processes share: who is ready first is first, and keeps a core until idle.

    Parameters
    ----------
    count : int, optional
        None: as many as there are processes, so that nobody waits.
    taken : float
        The share of them that processes take whatever happens, from 0 to less than 1: all lasts so much longer.
    spread : float
        The standard deviation of the logarithm of how long a section takes; its mean stays.
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
        """Return how long a section lasts, once it has a core, that takes so many seconds by itself and on average."""
        if not self.are_counted:
            return seconds
        return seconds * self._random.lognormvariate(self._mean, self._spread)

    def take(self, act: Callable[[], None]) -> None:
        """Call `act()` with a core, now or when one is free; it has to be released."""
        if self._idle:
            self._idle -= 1
            act()
        else:
            self._waiting.append(act)

    def release(self) -> None:
        """Let another process have the core."""
        if self._waiting:
            self._clock.at(self._clock.now, self._waiting.popleft())
        else:
            self._idle += 1


class Process:
    """A process that computes one thing at a time, as a Python interpreter does, on cores that others want too."""

    def __init__(self, clock: Clock, cores: Cores) -> None:
        self._clock = clock
        self._cores = cores
        self._sections: deque[tuple[float, Callable[..., None], tuple[object, ...]]] = deque()

    def run(self, seconds: float, act: Callable[..., None], *args: object) -> None:
        """Compute for so many seconds, after what it was to compute before, and then call `act(*args)`."""
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
    """One direction of a stream of messages that leave in batches.

    Parameters
    ----------
    interval : float
        Seconds between two batches; the first after a pause leaves at once (Dask's `BatchedSend`).
    wire : float
        Seconds on the way.
    """

    __slots__ = ("_next", "_wire", "batch", "interval", "messages")

    def __init__(self, interval: float, wire: float) -> None:
        self.interval = interval
        self.messages: list[tuple[Callable[..., None], tuple[object, ...]]] = []  # of the newest batch
        self._wire = wire
        self.batch = -interval  # when the newest one leaves
        self._next = 0.0

    def arrives(self, now: float) -> float:
        """Return when a message that is sent now arrives."""
        if now > self.batch:
            self.batch = max(now, self._next)
            self._next = self.batch + self.interval
            self.messages = []
        return self.batch + self._wire
