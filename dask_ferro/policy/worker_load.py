"""The projected load of one worker: its queue, its running tasks, and when another task would start there.

Durations are seconds.  A `WorkerLoad` holds projections; the `Ledger` keeps those of all workers consistent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Any, Literal, NamedTuple

from dask_ferro.policy.estimates import NEWEST, Estimate, Mean
from dask_ferro.policy.facts import Address, Key

# A requested task is in no queue: it counts as incoming at its thief.
State = Literal["queued", "running", "requested"]
# A task that takes less measures the clock, and not how slow its worker is.
_USUAL_SECONDS = 0.001
# A worker's slowness is the factor on its tasks' projected seconds in placement and stealing.  A worker begins with
# this many tasks that took just what was projected: what it really took says little until there are more.
USUAL_TASKS = 2.0
# Within this factor of what was projected it is the spread of durations, and not the worker: of ten lognormal ones,
# sigma 1, the mean is off by a third.
SPREAD_FACTOR = 2.0
# How much slower, or faster, than projected a worker is thought to be, at most.
SLOWEST = 32.0
# Shared by nearly all tasks, which need no resources.
NO_NEEDS: Mapping[str, float] = {}


@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """A task on a worker, with its projected `seconds` on that worker's device class.

    `nbytes` are the device bytes of its result and working memory.
    """

    key: Key
    prefix: str
    priority: Any
    annotated: float | Estimate | None
    needs: Mapping[str, float]
    nbytes: int
    sequence: int
    device: str = ""  # the class that `seconds` is projected for
    seconds: float = 0.0
    known: bool = False
    provisional: bool = False  # `seconds` is not based on a measurement of this device class
    origins: tuple[Address, ...] = ()
    since: float = 0.0  # when it was assigned to its worker
    expected: float = 0.0  # seconds that it was projected to wait at that time
    state: State = "queued"
    started: float | None = None  # of a running one; infinite: its message has not left yet
    worker: WorkerLoad = field(init=False)
    stolen: StealRecord | None = None


class StealRecord(NamedTuple):
    """The move that brought a task to its worker."""

    victim: Address
    requested: float


@dataclass(slots=True, eq=False, repr=False)
class PendingRequest:
    """A request for a task that its worker, the victim, has not answered yet.

    `moving` are the device bytes of the inputs that the thief lacks.  A withdrawn one got no answer for long: the task
    counts at its victim again.
    """

    entry: Entry
    thief: WorkerLoad
    number: int
    at: float
    gain: float
    cost: float
    moving: int = 0
    withdrawn: bool = False


@dataclass(slots=True, eq=False, repr=False)
class WorkerLoad:
    """A worker's tasks and facts in the ledger."""

    address: Address
    nthreads: int
    host: str
    device: str
    accepts: bool
    ends_at: float = inf  # on the caller's clock
    most: int | None = None  # total bytes of its device, where they are counted
    promised: int = 0  # device bytes projected for its tasks and for those on their way to it
    queue: list[tuple[Any, int, Entry]] = field(default_factory=list)  # by priority, the next to start first
    turn: int = 0  # sequence number of the newest task assigned to it
    running: dict[Key, Entry] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    waiting_seconds: float = 0.0
    incoming: int = 0
    incoming_seconds: float = 0.0
    ratio: Mean = field(default_factory=Mean)  # logarithms of measured over projected seconds
    slowness: float = 1.0
    soon: bool | None = (
        None  # whether messages to it are sent soon; None: nothing was asked of the caller yet
    )
    load: tuple[float, Address] | None = None
    version: int = 0

    @property
    def is_blocked(self) -> bool:
        """Whether every queued task waits for resources while a thread has nothing to do."""
        return bool(self.queue) and self.accepts and len(self.running) < self.nthreads

    @property
    def may_take(self) -> bool:
        """Whether it accepts tasks and nothing in its own queue can occupy its next free thread."""
        return self.accepts and (not self.queue or len(self.running) < self.nthreads)

    def starts_in(self, now: float, priority: Any = None) -> float:
        """Return the seconds until a task that joined the queue now would start.

        Parameters
        ----------
        priority : optional
            That of the task; default: it would start last.
        """
        running = self.running
        free = self.nthreads - len(running) - self.incoming
        if free > 0 and free > (0 if self.is_blocked else len(self.queue)):
            return 0.0
        waits = self.waiting_seconds
        if priority is not None and self.queue:
            waits *= bisect_left(self.queue, (priority,)) / len(self.queue)  # type: ignore[arg-type]
        work = (waits + self.incoming_seconds) * self.slowness
        # Most workers that an event is about have one thread and one task: no list of them is made.
        if self.nthreads == 1 and len(running) == 1:
            (entry,) = running.values()
            return self._remaining(entry, now) + work
        remaining = sorted(self._remaining(entry, now) for entry in running.values())
        if self.nthreads == 1:
            return (remaining[0] if remaining else 0.0) + work
        levels = [0.0] * (self.nthreads - len(remaining)) + remaining[: self.nthreads]
        # The work fills up the threads that end first.
        for index, level in enumerate(levels[1:], 1):
            room = (level - levels[index - 1]) * index
            if work <= room:
                return levels[index - 1] + work / index
            work -= room
        return levels[-1] + work / self.nthreads

    def overdue(self, entry: Entry, now: float, patience: float, projected: bool = True) -> float:
        """Return the seconds that a task has waited here if that is overdue, or else 0.

        A task may wait for `patience` seconds, doubled by each earlier move.  Beyond that it is overdue if it has
        waited for more than twice the wait projected on arrival (plus `patience`), or if the wait projected from now
        is at least half as long.  With `projected` false, projections are ignored.
        """
        waited, often = now - entry.since, 2.0 ** len(entry.origins)
        if waited < patience * often:
            return 0.0
        if not projected:
            return waited
        is_late = waited >= (2 * entry.expected + patience) * often
        return waited if is_late or 2 * self.starts_in(now, entry.priority) >= waited else 0.0

    def blocks(self, entry: Entry, now: float) -> float:
        """Return the seconds until the resources that a waiting task needs are free here; 0: they are free now."""
        longest = 0.0
        for resource, amount in entry.needs.items():
            users = [e for e in self.running.values() if e.needs.get(resource)]
            free = self.resources.get(resource, 0.0) - sum(e.needs[resource] for e in users)
            if amount > free and users:
                longest = max(longest, min(self._remaining(e, now) for e in users))
        return longest

    def _remaining(self, entry: Entry, now: float) -> float:
        """Return the seconds until a running task ends.

        One that overran its projection is expected to take as long again, the rule for process lifetimes of
        Harchol-Balter and Downey, ACM TOCS 15(3), 1997.
        """
        assert entry.started is not None
        elapsed = now - entry.started
        if elapsed < 0.0:
            elapsed = 0.0
        projected = entry.seconds * self.slowness
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
        """Update the worker's slowness with the measured seconds of a task whose projection was known.

        The mean is that of logarithms: a single task that took ten times as long says little of the worker, and a slow
        worker is slow in most tasks.
        """
        self.ratio.add(log((measured + _USUAL_SECONDS) / (projected + _USUAL_SECONDS)))
        many = min(self.ratio.count, 1.0 / NEWEST)  # tasks in the mean's effective window
        typical = exp(self.ratio.value * many / (many + USUAL_TASKS))
        is_noise = 1 / SPREAD_FACTOR < typical < SPREAD_FACTOR
        self.slowness = 1.0 if is_noise else min(max(typical, 1 / SLOWEST), SLOWEST)
