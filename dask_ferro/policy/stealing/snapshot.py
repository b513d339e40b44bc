"""The input of one stealing step: a value of bounded size, read from a ledger.

It contains only parts of the queues, so that it costs the same for twenty tasks and for twenty thousand.  It never
changes, so that a recorded one can be used as a test case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from dask_ferro.policy.estimates import Links
from dask_ferro.policy.facts import Address, Key, TaskFacts, Worker
from dask_ferro.policy.worker_load import Entry, WorkerLoad


class Snapshot(NamedTuple):
    """The facts of one moment that a stealing policy decides on, bounded in size.

    Attributes
    ----------
    hungry : tuple of addresses
        Workers that may have become thieves; the policy decides whether they are.
    busiest : tuple of addresses
        The workers with the longest queues, longest first; empty where the policy asked for particular ones.
    workers : mapping of address to Worker
        The workers named in this snapshot, and no others.
    queues : mapping of address to tuple of TaskFacts
        The ends of non-empty queues, the task that would start last first, as far as the snapshot has room.
    links : Links
        Costs of transfers.
    hosts : mapping of address to str
        Hosts of all workers, since any of them may hold inputs.
    asked : mapping of address to tuple of addresses
        For each hungry worker, the victims that its policy wants to ask, in order; empty: the busiest.
    """

    now: float
    hungry: tuple[Address, ...]
    busiest: tuple[Address, ...]
    workers: Mapping[Address, Worker]
    queues: Mapping[Address, tuple[TaskFacts, ...]]
    links: Links
    hosts: Mapping[Address, str]
    asked: Mapping[Address, tuple[Address, ...]] = {}


class Facts(Protocol):
    """The facts of tasks and devices that a core asks of its caller while it handles an event."""

    def begin(self, thieves: Sequence[Address]) -> None:
        """Prepare to describe tasks for some thieves."""

    def waiting(self, entry: Entry, row: WorkerLoad) -> TaskFacts | None:
        """Return the facts of a queued task for the thieves; None: it must not move."""

    def reserve(self, key: Key, victim: Address, thief: Address) -> bool:
        """Return whether a task may be requested, and reserve what it needs at the thief."""

    def unlocks(self, key: Key) -> bool:
        """Return whether a task is the last missing input of another one."""

    def live(self, address: Address) -> int:
        """Return the device bytes in use on a worker or on their way to it."""

    def holds(self, address: Address) -> int:
        """Return the bytes of the results that a worker holds."""

    def unbound(self, entries: list[Entry]) -> list[Entry]:
        """Return the waiting tasks that may run on more than one worker, where that is cheap to determine."""
