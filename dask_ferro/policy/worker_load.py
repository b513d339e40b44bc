"""A worker's page in the ledger, and a task on it: when would a task that comes now start there?

Durations are seconds.  A page holds what is believed; the `Ledger` keeps the pages in step with each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import exp, inf, log
from typing import Any

from dask_ferro.policy.estimates import LEARNING, Estimate, Learning, Mean
from dask_ferro.policy.facts import Address, Key

# Of nearly all tasks; one for all of them.
NO_NEEDS: Mapping[str, float] = {}


class Entry:
    """A task on a worker.  `seconds` is projected for the worker's device class.

    `nbytes` are device bytes: of its result, and what it works in; `moving` of the inputs that its thief lacks.
    """

    __slots__ = (
        "annotated", "device", "expected", "is_sure", "key", "known", "moving", "nbytes", "needs", "origins",
        "prefix", "priority", "provisional", "requested", "seconds", "sequence", "since", "started", "thief", "worker",
    )  # fmt: skip

    def __init__(
        self,
        key: Key,
        prefix: str,
        priority: Any,
        annotated: float | Estimate | None,
        sequence: int,
        nbytes: int = 0,
    ) -> None:
        self.key = key
        self.prefix = prefix
        self.priority = priority
        self.annotated = annotated
        self.sequence = sequence
        self.device = ""  # the class that `seconds` is projected for
        self.seconds = 0.0
        self.known = False
        self.provisional = False  # `seconds` goes by no measurement of the device class
        self.nbytes = nbytes
        self.moving = 0
        self.needs = NO_NEEDS
        self.origins: tuple[Address, ...] = ()
        self.since = 0.0  # when it came to its worker
        self.expected = 0.0  # seconds that it was projected to wait there then
        self.is_sure = False  # that it was started: its worker said so
        self.started: float | None = None  # without end: it is next, and its message has not left yet
        self.requested = 0.0
        self.worker: WorkerLoad
        self.thief: WorkerLoad | None = None


class WorkerLoad:
    """A worker's page in the book."""

    __slots__ = (
        "accepts", "address", "device", "ends_at", "guessed_seconds", "host", "incoming", "incoming_seconds",
        "learning", "load", "log_ratio", "measured", "most", "nthreads", "projected", "promised", "queue",
        "queue_since", "resources", "running", "slowness", "turn", "unknown", "version", "waiting_seconds",
    )  # fmt: skip

    def __init__(
        self,
        address: Address,
        nthreads: int,
        host: str,
        device: str,
        accepts: bool,
        learning: Learning = LEARNING,
    ) -> None:
        self.address = address
        self.nthreads = nthreads
        self.host = host
        self.device = device
        self.accepts = accepts
        self.ends_at = inf  # on the caller's clock
        self.most: int | None = None  # bytes of its device, where somebody counts them
        self.promised = 0  # device bytes that its tasks and those on their way are projected to take
        self.queue: list[tuple[Any, int, Entry]] = []  # by priority, the next to start first
        self.queue_since = 0.0  # when the queue was empty last
        self.turn = 0  # of the newest task that it was given
        self.running: dict[Key, Entry] = {}
        self.resources: Mapping[str, float] = {}
        self.waiting_seconds = 0.0
        self.unknown = 0
        self.guessed_seconds = 0.0  # of `waiting_seconds`, those that are a guess
        self.incoming = 0
        self.incoming_seconds = 0.0
        self.learning = learning
        self.measured = Mean(newest=learning.newest)
        self.projected = Mean(newest=learning.newest)
        self.log_ratio = Mean(newest=learning.newest)
        self.slowness = 1.0
        self.load: tuple[float, Address] | None = None
        self.version = 0

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
        for index, level in enumerate(levels[1:], 1):  # the work fills up the threads that end first
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
