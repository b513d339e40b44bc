"""The facts that a policy is shown.  Durations are seconds, sizes bytes, `now` is the caller's clock.

A row says what is; what follows from it (is this worker starving, is that move worth it) is the policy's to say.
All of it are values: they can be pickled, are equal where the facts are, and stay as they are whatever happens later.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import inf
from typing import NamedTuple

Key = Hashable
Address = str


def kind_of(device: str) -> str:
    """Return what a device class is a kind of: "gpu" of "gpu: T4", as workers of a second model are told apart."""
    return device.partition(":")[0]


class Replica(NamedTuple):
    """An input of a task: its size, who holds it, and in which kind of memory; which one it is, where that is told."""

    nbytes: int
    holders: frozenset[Address]
    device: str = "cpu"
    key: Key = None


class TaskFacts(NamedTuple):
    """A ready task: one to place, or one that waits in a worker's queue.

    Attributes
    ----------
    seconds : float
        Projected duration on the worker's own device class.
    known : bool
        Whether `seconds` rests on a measurement or an annotation; otherwise it is a guess.
    inputs : tuple of Replica
    allowed : frozenset of addresses, or None
        The workers that restrictions and resources admit: a must.  None: all of them.
    preferred : frozenset of addresses, or None
        The workers that it would rather run on: loose restrictions.
    origins : tuple of addresses
        The workers that it was moved away from, oldest first.
    device : str
        The device class of `seconds`.
    others : mapping of device class to seconds
        Projected durations on other device classes, where they were measured or can be told from these.
    nbytes : int
        Device bytes that it takes beside its inputs: its result, and what it works in.
    headroom : int
        Device bytes that have to stay free beside those, so that what reads its result can run: a device that is full
        of inputs frees none of them.
    must, likes : str
        The device class that it has to run on, and the one that it would rather run on; "": any.
    waited : float
        Seconds since it was ready and given to nobody; without end where that is no matter.
    blocked : float
        Seconds until the resources that it needs are free on the worker in whose queue it is.
    overdue : float
        Seconds that it has been in that queue, where they are more than what a policy projected can be right about;
        else 0.
    """

    key: Key
    seconds: float
    known: bool = True
    inputs: tuple[Replica, ...] = ()
    allowed: frozenset[Address] | None = None
    preferred: frozenset[Address] | None = None
    origins: tuple[Address, ...] = ()
    device: str = "cpu"
    others: Mapping[str, float] = {}
    nbytes: int = 0
    headroom: int = 0
    must: str = ""
    likes: str = ""
    waited: float = inf
    blocked: float = 0.0
    overdue: float = 0.0

    def on(self, worker: Worker) -> float | None:
        """Return the projected seconds on a worker; None: nothing is known of its device class."""
        seconds = self.seconds if worker.device == self.device else self.others.get(worker.device)
        return None if seconds is None else seconds * worker.slowness

    def admits(self, worker: Worker) -> bool:
        """Return whether restrictions, resources and its device class let it run on a worker."""
        if self.must and kind_of(worker.device) != self.must:
            return False
        return self.allowed is None or worker.address in self.allowed

    def wants(self, worker: Worker) -> bool:
        """Return whether a worker is one of those that it would rather run on."""
        if self.likes and kind_of(worker.device) != self.likes:
            return False
        return self.preferred is None or worker.address in self.preferred

    def bytes_on(self, worker: Worker) -> int:
        """Return the device bytes that it takes on a worker: its own, and of the inputs that are not there."""
        return self.nbytes + sum(i.nbytes for i in self.inputs if worker.address not in i.holders)

    def fits(self, worker: Worker) -> bool:
        """Return whether the worker's device has room for it now; where nobody counts, anything fits."""
        return worker.room is None or self.bytes_on(worker) + self.headroom <= worker.room


class Worker(NamedTuple):
    """A worker as the scheduler sees it.

    Attributes
    ----------
    starts_in : float
        Seconds until a task that joined its queue now would start, moves on their way included: at the end of the
        queue or, of a row that is built for one task, at its place by priority.
    runs_dry_in : float
        Seconds until a thread has nothing to do.
    busy : int
        Threads that run a task or have one waiting for them.
    waiting : int
        Tasks in its queue: assigned, not started, not being moved away.
    unknown : int
        Those of them whose duration is a guess.
    slowness : float
        Measured over projected seconds of what it ran; 2 is half as fast as projected.
    accepts : bool
        Whether it may be given tasks (not paused, not leaving).
    unlocks : bool
        Whether a task that it runs is the last that some other task waits for.
    stalled_for : float
        Seconds for which tasks wait in its queue and none of them started: what was seen, whatever was projected.
    surely_in : float
        `starts_in` without guesses: tasks of unknown duration count for as long as they have run.
    ends_in : float
        Seconds until it is gone, whatever it does then: its job's walltime, its lifetime.
    room : int or None
        Free bytes of its device, less what is on its way there and what its tasks are projected to take; below zero
        where those were wrong.  None: nobody counts, as of host memory.
    most : int or None
        All bytes of its device: what one task may take when it has nothing else and spills what it holds.
    holds : int
        Bytes of the results that it holds.
    turn : int
        The number of the newest task that it was given: the lowest is the longest ago.
    frees_soon : bool
        Whether one of its results is about to be freed: nobody wants it but tasks that others were given.
    """

    address: Address
    host: str
    device: str
    nthreads: int
    starts_in: float
    busy: int
    waiting: int
    unknown: int = 0
    slowness: float = 1.0
    accepts: bool = True
    unlocks: bool = False
    stalled_for: float = 0.0
    runs_dry_in: float = 0.0
    ends_in: float = inf
    room: int | None = None
    most: int | None = None
    surely_in: float = 0.0
    holds: int = 0
    turn: int = 0
    frees_soon: bool = False

    def has_time(self, begins: float, seconds: float) -> bool:
        """Return whether what begins in so many seconds, and takes so many, is over before the worker is."""
        return begins + seconds <= self.ends_in


class Outcome(NamedTuple):
    """What became of an earlier move.

    Attributes
    ----------
    kind : str
        "started" (it ran on the thief), "refused" (the victim had started it), "stale" (it was gone).
    seconds : float
        From the request to the task's start on the thief; 0 where it did not start.
    dry : bool
        Whether the thief had a thread with nothing to do in between.
    """

    kind: str
    victim: Address
    thief: Address
    seconds: float = 0.0
    dry: bool = False


class Move(NamedTuple):
    """A decision: the task leaves the victim's queue for the thief.

    Attributes
    ----------
    gain : float
        Projected seconds by which the task finishes earlier.
    cost : float
        Projected seconds of moving its inputs.
    nbytes : int
        Device bytes that it will take at the thief.
    """

    key: Key
    victim: Address
    thief: Address
    gain: float
    cost: float
    nbytes: int = 0
