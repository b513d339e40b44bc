"""Which tasks wait although some worker has nothing to do, for how long, and why: what a person or a metric is told.

A task is overdue when it has waited at its worker for longer than was projected when it came there, twice over, and
some more.  Stealing has moved it by then if it may; what is left has one of the `REASONS`.  Durations are seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dask_ferro.policy.estimates import Links
from dask_ferro.policy.facts import Address, Key, TaskFacts, Worker, kind_of
from dask_ferro.policy.ledger_view import LedgerView
from dask_ferro.policy.stealing.snapshot import Snapshot
from dask_ferro.policy.worker_load import Entry, WorkerLoad

REASONS = {
    "restricted": "restrictions admit none of the idle workers",
    "class": "no idle worker is of the device class that it requires",
    "resources": "the idle workers do not have the resources that it needs free",
    "room": "no idle worker's device has room for it",
    "ends": "the idle workers end before it would",
    "actor": "an actor stays where it is",
    "asked": "its worker was asked for it, and has not answered yet",
    "silent": "its worker does not answer, and its input lies there alone",
    "costs": "its input takes longer to move than it has waited",
    "soon": "it is looked at, and about to move",
    "fresh": "it is held for a worker that is to come, which would have the time for it",
    "nobody": "no worker of the cluster may have it",
}
# Idle workers that are named in a line.
_NAMED = 3
# Idle workers that are weighed for one task: a look has 32 tasks, and a transfer of each is projected for as many.
_THIEVES = 4


class Wait(NamedTuple):
    """A task that waits while others have nothing to do.

    Attributes
    ----------
    worker : str
        Where it waits; "": at the scheduler.
    seconds : float
        For how long, by now.
    idle : int
        Workers with nothing to do.
    some : tuple of str
        A few of them; those that may run it, where there are any.
    reason : str
        One of `REASONS`.
    """

    key: Key
    worker: Address
    seconds: float
    idle: int
    some: tuple[Address, ...]
    reason: str

    def told(self) -> str:
        """Return it as a line."""
        where = f"at {self.worker}" if self.worker else "at the scheduler"
        who = ", ".join(self.some)
        more = f" and {self.idle - len(self.some)} more" if self.idle > len(self.some) else ""
        return (
            f"{self.key} waits {where} for {self.seconds:.1f} s while {who}{more} had nothing to do:"
            f" {REASONS[self.reason]}"
        )


def wait_of(
    task: TaskFacts, worker: Address, idle: Sequence[Worker], needs: bool = False, transfer: float = 0.0
) -> Wait:
    """Return what there is to tell of an overdue task that may be moved, were there a worker for it.

    Parameters
    ----------
    idle : sequence of Worker
        Workers with nothing to do, at least one.
    needs : bool
        Whether it needs resources; `task.allowed` then has the workers that have them free.
    transfer : float
        Seconds that the cheapest of the idle workers that may have it would wait for its inputs.
    """
    legal, reason = _narrowed(task, idle, needs)
    if legal and reason == "soon" and transfer > task.overdue:
        reason = "costs"
    return _waits(task.key, worker, task.overdue, idle, reason, legal)


def waits_at_scheduler(key: Key, seconds: float, idle: Sequence[Worker], reason: str) -> Wait:
    """Return what there is to tell of a task that was given to no worker."""
    return _waits(key, "", seconds, idle, reason)


def _waits(
    key: Key, at: Address, seconds: float, idle: Sequence[Worker], reason: str, legal: Sequence[Worker] = ()
) -> Wait:
    return Wait(key, at, seconds, len(idle), tuple(w.address for w in (legal or idle)[:_NAMED]), reason)


def _narrowed(task: TaskFacts, idle: Sequence[Worker], needs: bool) -> tuple[list[Worker], str]:
    """Return the idle workers that may run a task, and what excludes the last of the others where none is left."""
    left: list[Worker] = list(idle)
    for reason, may in (
        ("class", lambda w: not task.must or kind_of(w.device) == task.must),
        ("resources" if needs else "restricted", task.admits),
        ("room", task.fits),
        ("ends", lambda w: not task.known or w.has_time(w.starts_in, task.on(w) or task.seconds)),
    ):
        left = [w for w in left if may(w)]
        if not left:
            return [], reason
    return left, "soon"


def by_reason(waits: Iterable[Wait]) -> dict[str, int]:
    """Return how many tasks wait for each reason: all of the `REASONS`, in their order."""
    counted = Counter(wait.reason for wait in waits)
    return {reason: counted[reason] for reason in REASONS}


class OverdueTasks(NamedTuple):
    """One look at what is overdue while somebody has nothing to do.

    Attributes
    ----------
    idle : list of Worker
    overdue : list of (Entry, WorkerLoad, TaskFacts or None)
        As `Book.overdue` has them.
    snapshot : Snapshot
        Of those, for a stealing policy.
    """

    idle: list[Worker]
    overdue: list[tuple[Entry, WorkerLoad, TaskFacts | None]]
    snapshot: Snapshot


def look(
    book: LedgerView,
    now: float,
    idle: list[Worker],
    patience: float,
    turn: int,
    projected: bool = True,
    links: Links | None = None,
) -> OverdueTasks:
    """Return what is overdue, and the facts for a policy to move it: whatever else there is, nothing hides it.

    A step of stealing looks at the ends of the longest queues, for the workers that ran dry first; what may not move
    there, or moves at no gain, can hide one task that could, for ever.  A look takes others at each turn.

    Parameters
    ----------
    projected : bool
        Whether steps look at projected seconds, so that what is projected to wait has been seen by them.
    links : Links, optional
        What moving bytes costs.
    """
    overdue = book.overdue(now, patience, turn, projected=projected) if idle else []
    thieves: dict[Address, None] = {}
    for _, _, task in overdue:
        if task is not None:
            # A few of each: a snapshot is built of all of them, and any of these could take the task.
            legal, _ = _narrowed(task, idle, False)
            thieves.update(dict.fromkeys(w.address for w in legal[:_THIEVES]))
    return OverdueTasks(idle, overdue, book.overdue_snapshot(now, thieves, overdue, links))


def waits_of(found: OverdueTasks) -> list[Wait]:
    """Return what there is to tell of a look, the longest wait first."""
    told, links, hosts = [], found.snapshot.links, found.snapshot.hosts
    for entry, row, task in found.overdue:
        if task is None:
            waited = found.snapshot.now - entry.since
            told.append(_waits(entry.key, row.address, waited, found.idle, "actor"))
        else:
            # The cheapest transfer: if even that costs more than it has waited, cost is the reason.
            moving = min(links.seconds(task.inputs, worker, hosts) for worker in found.idle[:_THIEVES])
            told.append(wait_of(task, row.address, found.idle, bool(entry.needs), moving))
    return sorted(told, key=lambda wait: -wait.seconds)
