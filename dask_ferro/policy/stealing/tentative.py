"""Workers and queues of a snapshot as the moves decided so far in a step will leave them.

A task moves once.  Which move pays is decided by the policy.
"""

from __future__ import annotations

from dask_ferro.policy.facts import Address, TaskFacts, Worker
from dask_ferro.policy.stealing.snapshot import Snapshot


class Tentative:
    """The workers and queues of one step after the moves decided so far."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._changed: dict[Address, Worker] = {}
        self._left: dict[Address, list[TaskFacts]] = {}
        self.links = snapshot.links
        self.hosts = snapshot.hosts

    def worker(self, address: Address) -> Worker:
        return self._changed.get(address) or self._snapshot.workers[address]

    def queue(self, address: Address) -> list[TaskFacts]:
        if address not in self._left:
            self._left[address] = list(self._snapshot.queues.get(address, ()))
        return self._left[address]

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
