"""Workers and queues of a snapshot as the moves decided so far in a step will leave them.

A task moves once.  Which move pays is decided by the policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from dask_ferro.policy.facts import Address, Key, TaskFacts, Worker
from dask_ferro.policy.stealing.snapshot import Snapshot


class Tentative:
    """The workers and queues of one step after the moves decided so far."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._changed: dict[Address, Worker] = {}
        self._left: dict[Address, list[TaskFacts]] = {}
        self._readers: dict[Address, Counter[Key]] = {}
        self.links = snapshot.links
        self.hosts = snapshot.hosts

    def worker(self, address: Address) -> Worker:
        return self._changed.get(address) or self._snapshot.workers[address]

    def queue(self, address: Address) -> list[TaskFacts]:
        if address not in self._left:
            self._left[address] = list(self._snapshot.queues.get(address, ()))
        return self._left[address]

    def readers(self, victim: Address) -> Counter[Key]:
        """Return for each input the number of queued tasks that read it."""
        if victim not in self._readers:
            read = chain.from_iterable(task.inputs for task in self._snapshot.queues.get(victim, ()))
            self._readers[victim] = Counter(i.key for i in read if i.key is not None)
        return self._readers[victim]

    def move(self, task: TaskFacts, victim: Worker, thief: Worker, transfer: float) -> None:
        self.queue(victim.address).remove(task)
        there = task.on(thief) or 0.0
        free = thief.nthreads - thief.busy
        work = task.seconds * victim.slowness / victim.nthreads
        self._changed[thief.address] = thief._replace(
            busy=min(thief.busy + 1, thief.nthreads),
            starts_in=0.0 if free > 1 else max(thief.starts_in, transfer) + there / thief.nthreads,
            room=None if thief.room is None else thief.room - task.bytes_on(thief),
        )
        self._changed[victim.address] = victim._replace(
            room=None if victim.room is None else victim.room + task.nbytes,
            starts_in=victim.starts_in - work,
            waiting=victim.waiting - 1,
        )


def may(task: TaskFacts, thief: Worker) -> bool:
    """Whether the task may run on the thief now."""
    return task.admits(thief) and task.fits(thief)


def returns(task: TaskFacts, thief: Worker) -> bool:
    """Whether the task was stolen from the thief and is not overdue since."""
    return thief.address in task.origins and not task.overdue


def outlasts(task: TaskFacts, thief: Worker, spare: float) -> bool:
    """Whether a task of known duration would finish after the thief ends."""
    return task.known and not thief.has_time(thief.starts_in, (task.on(thief) or task.seconds) + spare)


def keeps(task: TaskFacts, thief: Worker) -> bool:
    """Whether the task's affinity is for workers other than the thief."""
    return not task.wants(thief)


def shared(task: TaskFacts, thief: Worker, readers: Mapping[Key, int]) -> int:
    """Return how many tasks of a queue read the largest input that the thief lacks, and so share its transfer."""
    lacking = [i for i in task.inputs if thief.address not in i.holders and i.key is not None]
    return max(readers.get(max(lacking, key=lambda i: i.nbytes).key, 1), 1) if lacking else 1
