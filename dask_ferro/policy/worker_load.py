"""A worker's page in the ledger, and a task on it: when would a task that comes now start there?

Durations are seconds.  A page holds what is believed; the `Ledger` keeps the pages in step with each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Any

from dask_ferro.policy.estimates import LEARNING, Estimate, Learning, Mean
from dask_ferro.policy.facts import Address, Key

# Of nearly all tasks; one for all of them.
NO_NEEDS: Mapping[str, float] = {}


@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """A task on a worker.  `seconds` is projected for the worker's device class.

    `nbytes` are device bytes: of its result, and what it works in; `moving` of the inputs that its thief lacks.
    """

    key: Key
    prefix: str
    priority: Any
    annotated: float | Estimate | None
    needs: Mapping[str, float]
    nbytes: int
    sequence: int
    moving: int = 0
    device: str = ""  # the class that `seconds` is projected for
    seconds: float = 0.0
    known: bool = False
    provisional: bool = False  # `seconds` goes by no measurement of the device class
    origins: tuple[Address, ...] = ()
    since: float = 0.0  # when it came to its worker
    expected: float = 0.0  # seconds that it was projected to wait there then
    is_sure: bool = False  # that it was started: its worker said so
    started: float | None = None  # without end: it is next, and its message has not left yet
    requested: float = 0.0
    worker: WorkerLoad = field(init=False)
    thief: WorkerLoad | None = None


@dataclass(slots=True, eq=False, repr=False)
class WorkerLoad:
    """A worker's page in the book."""

    address: Address
    nthreads: int
    host: str
    device: str
    accepts: bool
    learning: Learning = LEARNING
    ends_at: float = inf  # on the caller's clock
    most: int | None = None  # bytes of its device, where somebody counts them
    promised: int = 0  # device bytes that its tasks and those on their way are projected to take
    queue: list[tuple[Any, int, Entry]] = field(default_factory=list)  # by priority, the next to start first
    queue_since: float = 0.0  # when the queue was empty last
    turn: int = 0  # of the newest task that it was given
    running: dict[Key, Entry] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    waiting_seconds: float = 0.0
    unknown: int = 0
    guessed_seconds: float = 0.0  # of `waiting_seconds`, those that are a guess
    incoming: int = 0
    incoming_seconds: float = 0.0
    measured: Mean = field(init=False)
    projected: Mean = field(init=False)
    log_ratio: Mean = field(init=False)
    slowness: float = 1.0
    load: tuple[float, Address] | None = None
    version: int = 0

    def __post_init__(self) -> None:
        self.measured, self.projected, self.log_ratio = (Mean(newest=self.learning.newest) for _ in range(3))

    @property
    def is_blocked(self) -> bool:
        """Whether all that waits here waits for resources, and a thread has nothing to do."""
        return bool(self.queue) and self.accepts and len(self.running) < self.nthreads

    @property
    def may_take(self) -> bool:
        """Whether it accepts tasks, and a thread would look for one elsewhere once it has nothing to do."""
        return self.accepts and (not self.queue or len(self.running) < self.nthreads)

    def stalled_for(self, now: float) -> float:
        """Return the seconds for which tasks wait here and none of them started."""
        if not self.queue:
            return 0.0
        started = [entry.started for entry in self.running.values() if entry.started is not None]
        return max(now - max([self.queue_since, *started]), 0.0)

    def starts_in(self, now: float, priority: Any = None, surely: bool = False) -> float:
        """Return the seconds until a task that joins the queue now would start: at its end, or by its priority.

        Parameters
        ----------
        surely : bool
            Count no guesses: a task of unknown duration that waits takes no time, and one that runs is projected to
            run for as long again as it has.
        """
        free = self.nthreads - len(self.running) - self.incoming
        if free > 0 and free > (0 if self.is_blocked else len(self.queue)):
            return 0.0
        waits = self.waiting_seconds - (self.guessed_seconds if surely else 0.0)
        if priority is not None and self.queue:
            waits *= bisect_left(self.queue, (priority,)) / len(self.queue)  # type: ignore[arg-type]
        work = (waits + self.incoming_seconds) * self.slowness
        if self.nthreads == 1:
            first = min([self._remaining(entry, now, surely) for entry in self.running.values()], default=0.0)
            return first + work
        remaining = sorted(self._remaining(entry, now, surely) for entry in self.running.values())
        levels = [0.0] * (self.nthreads - len(remaining)) + remaining[: self.nthreads]
        # The work fills up the threads that end first.
        for index, level in enumerate(levels[1:], 1):
            room = (level - levels[index - 1]) * index
            if work <= room:
                return levels[index - 1] + work / index
            work -= room
        return levels[-1] + work / self.nthreads

    def overdue(self, entry: Entry, now: float, patience: float, projected: bool = True) -> float:
        """Return the seconds that a waiting task has been here, where they are too many, or else 0.

        It is given `patience`, and twice as much for each move before.  Then they are too many if they are more than
        twice what was projected when it came, or if what is projected now is as much again; or whatever was and is
        projected, where `projected` says that this is no matter.
        """
        waited, often = now - entry.since, 2.0 ** len(entry.origins)
        if waited < patience * often:
            return 0.0
        if not projected:
            return waited
        is_late = waited >= (2 * entry.expected + patience) * often
        return waited if is_late or self.starts_in(now, entry.priority) >= waited else 0.0

    def blocks(self, entry: Entry, now: float) -> float:
        """Return the seconds until the resources that a waiting task needs are free here; 0: they are."""
        longest = 0.0
        for resource, amount in entry.needs.items():
            users = [e for e in self.running.values() if e.needs.get(resource)]
            free = self.resources.get(resource, 0.0) - sum(e.needs[resource] for e in users)
            if amount > free and users:
                longest = max(longest, min(self._remaining(e, now, True) for e in users))
        return longest

    def _remaining(self, entry: Entry, now: float, surely: bool = False) -> float:
        """A task that has run for longer than projected is projected to run for as long again.

        Of processes' lifetimes: Harchol-Balter and Downey, ACM TOCS 15(3), 1997.
        """
        assert entry.started is not None
        elapsed = max(now - entry.started, 0.0)
        projected = 0.0 if surely and not entry.known else entry.seconds * self.slowness
        return projected - elapsed if elapsed < projected else elapsed

    def may_start(self, entry: Entry) -> bool:
        """Whether a thread and the resources that the task needs are free."""
        if len(self.running) >= self.nthreads or not self.accepts:
            return False
        for resource, amount in entry.needs.items():
            used = sum(other.needs.get(resource, 0.0) for other in self.running.values())
            if used + amount > self.resources.get(resource, 0.0):
                return False
        return True

    def learn(self, projected: float, measured: float) -> None:
        """Take the measured seconds of a task whose projected seconds are known.

        Very short ones tell nothing of how slow a worker is, but that others are an exception.
        """
        p = self.learning
        self.log_ratio.add(log((measured + p.usual_seconds) / (projected + p.usual_seconds)))
        if measured < p.usual_seconds and projected < p.usual_seconds:
            return
        self.projected.add(projected)
        self.measured.add(measured)
        most = 1.0 / p.newest  # tasks that such a mean is made of
        weight = min(self.measured.count, most)
        prior = max(p.usual_tasks * self.projected.value, p.usual_seconds)
        ratio = (weight * self.measured.value + prior) / (weight * self.projected.value + prior)
        # One task that took five times as long is its own matter; a slow worker is slow in most of them.
        many = min(self.log_ratio.count, most)
        typical = exp(self.log_ratio.value * many / (many + p.usual_tasks))
        is_noise = any(1 / p.spread < seen < p.spread for seen in (ratio, typical))
        self.slowness = 1.0 if is_noise else min(max(ratio, 1 / p.slowest), p.slowest)
