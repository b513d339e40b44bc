"""The facts that one step of stealing decides by: a value of bounded size, read off a ledger.

It shows a part of the queues only, so that it costs the same with twenty tasks and with twenty thousand.  Nothing in it
changes with what happens later; a recorded one is a row of a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from dask_ferro.policy.estimates import Links
from dask_ferro.policy.facts import Address, Key, TaskFacts, Worker
from dask_ferro.policy.worker_load import Entry, WorkerLoad


class Snapshot(NamedTuple):
    """The facts of one moment that a stealing policy decides by: a value, of bounded size.

    Attributes
    ----------
    hungry : tuple of addresses
        Workers that something happened to that may make them thieves; the policy judges.
    busiest : tuple of addresses
        The workers with the longest queues, longest first; none where the policy asked for certain ones.
    workers : mapping of address to Worker
        Those that are named here, and no others.
    queues : mapping of address to tuple of TaskFacts
        The end of a worker's queue, the task that would start last first; of those that hold any, and as many as a
        snapshot has room for.
    links : Links
        What moving bytes costs.
    hosts : mapping of address to str
        Of all workers: holders of inputs may be any.
    outlasted : tuple of addresses
        Workers that end before the last of their queue would start, the nearest end first.
    near : tuple of addresses
        Workers with queues on the hosts of hungry devices: what they give up need not leave the host.
    asked : mapping of address to tuple of addresses
        For each of the hungry, whom its policy wants to ask, in order; empty where it asks the busiest.
    """

    now: float
    hungry: tuple[Address, ...]
    busiest: tuple[Address, ...]
    workers: Mapping[Address, Worker]
    queues: Mapping[Address, tuple[TaskFacts, ...]]
    links: Links
    hosts: Mapping[Address, str]
    outlasted: tuple[Address, ...] = ()
    near: tuple[Address, ...] = ()
    asked: Mapping[Address, tuple[Address, ...]] = {}


class Facts(Protocol):
    """What whoever has the tasks says of them while an event is handled, as of that moment."""

    def begin(self, thieves: Sequence[Address]) -> None:
        """Begin a look at tasks, for some thieves."""

    def waiting(self, entry: Entry, row: WorkerLoad) -> TaskFacts | None:
        """Return a task in a worker's queue as the thieves may take it; None: it must not move."""

    def reserve(self, key: Key, victim: Address, thief: Address) -> bool:
        """Return whether a task may be asked for, and note that what it needs will be taken at the thief."""

    def unlocks(self, key: Key) -> bool:
        """Whether a task is the last that some other one waits for."""

    def live(self, address: Address) -> int:
        """Return the device bytes that are taken on a worker or on their way there."""

    def holds(self, address: Address) -> int:
        """Return the bytes of the results that a worker holds."""

    def unbound(self, entries: list[Entry]) -> list[Entry]:
        """Return those of waiting tasks that may run on more than one worker, where that is cheap to tell."""
