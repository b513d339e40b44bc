"""The values that describe tasks and workers to a policy.

A value states a fact; conclusions (whether a worker is starving, whether a move pays) are left to the policy. All are
immutable, can be pickled, and are equal where the facts are equal.  Durations are seconds, sizes bytes, `now` is the
caller's clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import inf
from typing import NamedTuple

Key = Hashable
Address = str


def kind_of(device: str) -> str:
    """Return the kind of a device class: "gpu" for "gpu: T4", a name that tells devices of different models apart."""
    return device.partition(":")[0]


class Replica(NamedTuple):
    """An input of a task: its size, and the workers that hold it."""

    nbytes: int
    holders: frozenset[Address]


class TaskFacts(NamedTuple):
    """A ready task, either to be placed or waiting in a worker's queue.

    Attributes
    ----------
    seconds : float
        Projected duration on the worker's own device class.
    known : bool
        Whether `seconds` rests on a measurement or an annotation; otherwise it is a guess.
    inputs : tuple of Replica
    allowed : frozenset of addresses, or None
        The only workers that restrictions and resources admit; None admits all.
    preferred : frozenset of addresses, or None
        The workers that loose restrictions prefer.
    origins : tuple of addresses
        The workers that it was stolen from, oldest first.
    device : str
        The device class of `seconds`.
    others : mapping of device class to seconds
        Projected durations on other device classes, where measured or derived from a measurement.
    nbytes : int
        Device bytes that it needs beside its inputs: its result and its working memory.
    headroom : int
        Device bytes that must stay free beside those for the tasks that read its result: a device that is full of
        inputs frees none of them.
    must, likes : str
        The device class that it requires, and the one that it prefers; "" means any.
    waited : float
        Seconds since it became ready and was assigned to no worker, or that a stolen one has spent in that queue;
        infinite where that does not matter.
    blocked : float
        Seconds until the resources that it needs are free on its worker.
    overdue : float
        Seconds that it has spent in that queue once they exceed the error that a projection may have; else 0.
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
        """Return the projected seconds on a worker, or None where its device class has no projection."""
        seconds = self.seconds if worker.device == self.device else self.others.get(worker.device)
        return None if seconds is None else seconds * worker.slowness

    def admits(self, worker: Worker) -> bool:
        """Return whether restrictions, resources and the device class let the task run on a worker."""
        if self.must and kind_of(worker.device) != self.must:
            return False
        return self.allowed is None or worker.address in self.allowed

    def wants(self, worker: Worker) -> bool:
        """Return whether a worker is among those that the task prefers."""
        if self.likes and kind_of(worker.device) != self.likes:
            return False
        return self.preferred is None or worker.address in self.preferred

    def bytes_on(self, worker: Worker) -> int:
        """Return the device bytes that the task needs on a worker: its own and those of the inputs missing there."""
        return self.nbytes + sum(i.nbytes for i in self.inputs if worker.address not in i.holders)

    def fits(self, worker: Worker) -> bool:
        """Return whether the worker's device has room for the task now; without byte accounting everything fits."""
        return worker.room is None or self.bytes_on(worker) + self.headroom <= worker.room


class Worker(NamedTuple):
    """A worker as the scheduler sees it.

    Attributes
    ----------
    starts_in : float
        Seconds until a task that joined its queue now would start, pending moves included: at the end of the queue
        or, for facts built for one task, at that task's place by priority.
    runs_dry_in : float
        Seconds until one of its threads has nothing to do.
    busy : int
        Threads that run a task or have one queued for them.
    waiting : int
        Tasks in its queue: assigned, not started, not being moved away.
    slowness : float
        Measured over projected seconds of the tasks it ran; 2 means half as fast as projected.
    accepts : bool
        Whether it may be assigned tasks (neither paused nor retiring).
    unlocks : bool
        Whether it runs a task that is the last missing input of another task.
    ends_in : float
        Seconds until it is gone in any case: its job's walltime or its lifetime.
    room : int or None
        Free bytes of its device, less incoming data and the projected needs of its tasks; negative where those
        projections were wrong.  None: no byte accounting, as for host memory.
    most : int or None
        Total bytes of its device: the limit for one task when the device is otherwise empty and spills its data.
    holds : int
        Bytes of the results that it holds.
    turn : int
        The sequence number of the newest task assigned to it; the lowest belongs to the least recently used worker.
    """

    address: Address
    host: str
    device: str
    nthreads: int
    starts_in: float
    busy: int
    waiting: int
    slowness: float = 1.0
    accepts: bool = True
    unlocks: bool = False
    runs_dry_in: float = 0.0
    ends_in: float = inf
    room: int | None = None
    most: int | None = None
    holds: int = 0
    turn: int = 0

    def has_time(self, begins: float, seconds: float) -> bool:
        """Return whether a task of `seconds` that begins in `begins` seconds ends before the worker does."""
        return begins + seconds <= self.ends_in


class Outcome(NamedTuple):
    """The outcome of an earlier move.

    Attributes
    ----------
    kind : str
        "started" (it ran on the thief), "refused" (the victim had started it), "stale" (it was gone).
    seconds : float
        From the request to the task's start on the thief; 0 where it did not start there.
    """

    kind: str
    victim: Address
    thief: Address
    seconds: float = 0.0


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
