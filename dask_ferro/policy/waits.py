"""The tasks that wait although some worker is idle: how long and why, for logs and metrics.

A task is overdue when it has waited at its worker for more than twice what was projected on arrival, and some more.
Stealing has moved it by then if it may; each remaining one has one of the `REASONS`.  Durations are seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from dask_ferro.policy.estimates import Links
from dask_ferro.policy.facts import Address, Key, TaskFacts, Worker, kind_of
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.worker_load import Entry, WorkerLoad
from dask_ferro.words import duration, list_names

# Why a task waits beside idle workers, and what to do.
REASONS = {
    "restricted": (
        "it may not run on the idle workers (workers=)",
        "submit it without workers=, or with allow_other_workers=True",
    ),
    "wrong_device": (
        "it requires a device that the idle workers do not have (ff.require_device)",
        "start a worker with that device, or use ff.prefer_device instead of ff.require_device",
    ),
    "resources": (
        "the idle workers do not have enough of a resource free (resources=)",
        "start workers with more of the resource, or request less",
    ),
    "device_memory_full": (
        "the devices of the idle workers have no memory free for it",
        "release results on the devices, or start workers with more device memory",
    ),
    "worker_ending": (
        "the jobs of the idle workers would end before the task",
        "request jobs with a longer walltime, or make tasks shorter",
    ),
    "actor": ("an actor stays on its worker", "use tasks, or several actors"),
    "steal_pending": (
        "its worker was asked to return it, and has not answered yet",
        "if it stays, look at its worker, which is slow to answer",
    ),
    "worker_unresponsive": (
        "its worker does not answer, and holds the only copy of its input",
        "end the worker if it does not come back; Dask computes its results again",
    ),
    "transfer_too_slow": (
        "its input is so large that moving it takes longer than waiting",
        "no action needed; tasks with smaller inputs would move",
    ),
    "about_to_move": ("it is about to be moved", "no action needed, unless it stays"),
    "reserved_for_new_worker": (
        "it is held for a new worker, which will have enough time for it",
        "no action needed if a job is starting; otherwise request jobs with a longer walltime",
    ),
    "no_eligible_worker": ("no worker of the cluster may run it", "start a worker that may run it"),
}
# Idle workers named in a line of the log.
_MAX_NAMES = 3
# Idle workers weighed for one task: a tick has 16 tasks, and projects a transfer of each to all of these.
_THIEVES = 4


class WaitingTask(NamedTuple):
    """A task that waits while other workers are idle.

    Attributes
    ----------
    worker : str
        The worker at which it waits; "": at the scheduler.
    seconds : float
        Seconds waited so far.
    idle : int
        Number of idle workers.
    some : tuple of str
        A few of them; where there are any that may run it, only those.
    reason : str
        One of `REASONS`.
    """

    key: Key
    worker: Address
    seconds: float
    idle: int
    some: tuple[Address, ...]
    reason: str

    def sentence(self) -> str:
        """Return a sentence for the log."""
        where = f"at {self.worker}" if self.worker else "at the scheduler"
        return (
            f"{self.key} waits {where} for {duration(self.seconds)} while {list_names(self.some, self.idle)}"
            f" had nothing to do: {REASONS[self.reason][0]}"
        )


def wait_of(
    task: TaskFacts, worker: Address, idle: Sequence[Worker], needs: bool = False, transfer: float = 0.0
) -> WaitingTask:
    """Return the diagnosis of an overdue task that is not bound to its worker.

    Parameters
    ----------
    idle : sequence of Worker
        Idle workers, at least one.
    needs : bool
        Whether it needs resources; `task.allowed` then has the workers that have them free.
    transfer : float
        Seconds that the cheapest eligible idle worker would wait for its inputs.
    """
    legal, reason = _narrow(task, idle, needs)
    if legal and reason == "about_to_move" and transfer > task.overdue:
        reason = "transfer_too_slow"
    return _waits(task.key, worker, task.overdue, idle, reason, legal)


def waits_at_scheduler(key: Key, seconds: float, idle: Sequence[Worker], reason: str) -> WaitingTask:
    """Return the diagnosis of a ready task that is assigned to no worker."""
    return _waits(key, "", seconds, idle, reason)


def _waits(
    key: Key, at: Address, seconds: float, idle: Sequence[Worker], reason: str, legal: Sequence[Worker] = ()
) -> WaitingTask:
    return WaitingTask(
        key, at, seconds, len(idle), tuple(w.address for w in (legal or idle)[:_MAX_NAMES]), reason
    )


def _narrow(task: TaskFacts, idle: Sequence[Worker], needs: bool) -> tuple[list[Worker], str]:
    """Return the idle workers that may run a task, and the reason that excludes the last one where none remains."""
    left: list[Worker] = list(idle)
    for reason, may in (
        ("wrong_device", lambda w: not task.must or kind_of(w.device) == task.must),
        ("resources" if needs else "restricted", task.admits),
        ("device_memory_full", task.fits),
        ("worker_ending", lambda w: not task.known or w.has_time(w.starts_in, task.on(w) or task.seconds)),
    ):
        left = [w for w in left if may(w)]
        if not left:
            return [], reason
    return left, "about_to_move"


def by_reason(waits: Iterable[WaitingTask]) -> dict[str, int]:
    """Return the number of tasks that wait for each of the `REASONS`, in their order."""
    counted = Counter(wait.reason for wait in waits)
    return {reason: counted[reason] for reason in REASONS}


class OverdueTasks(NamedTuple):
    """The overdue tasks found at one tick, and the idle workers.

    Attributes
    ----------
    idle : list of Worker
    overdue : list of (Entry, WorkerLoad, TaskFacts or None)
        As returned by `Ledger.overdue`.
    thieves : tuple of addresses
        A few of the idle workers for each task: any of them could take it.
    """

    idle: Sequence[Worker] = ()
    overdue: Sequence[tuple[Entry, WorkerLoad, TaskFacts | None]] = ()
    thieves: tuple[Address, ...] = ()

    @property
    def tasks(self) -> dict[Address, list[TaskFacts]]:
        """The tasks that may be moved, by worker, the last to start first."""
        found: dict[Address, list[TaskFacts]] = {}
        for _, row, task in reversed(self.overdue):
            if task is not None:
                found.setdefault(row.address, []).append(task)
        return found


def look(
    book: Ledger, now: float, idle: list[Worker], patience: float, turn: int, projected: bool = True
) -> OverdueTasks:
    """Return some overdue tasks, other ones at each `turn`.

    A step sees the ends of the longest queues, for the workers that ran dry first; tasks there that may not be moved,
    or gain nothing, could hide a movable one for ever.

    Parameters
    ----------
    projected : bool
        Whether steps use projected seconds, so that tasks projected to wait have been seen by them.
    """
    overdue = book.overdue(now, patience, turn, projected=projected) if idle else []
    thieves: dict[Address, None] = {}
    for _, _, task in overdue:
        if task is not None:
            able = (w.address for w in idle if task.admits(w) and task.fits(w))
            thieves.update(dict.fromkeys(islice(able, _THIEVES)))
    return OverdueTasks(idle, overdue, tuple(thieves))


def waits_of(
    overdue: OverdueTasks, now: float, links: Links, hosts: Mapping[Address, str]
) -> list[WaitingTask]:
    """Return the diagnoses of all overdue tasks of a tick, the longest wait first."""
    waits = []
    for entry, row, task in overdue.overdue:
        if task is None:
            waits.append(_waits(entry.key, row.address, now - entry.since, overdue.idle, "actor"))
        else:
            # If even the cheapest transfer takes longer than the task has waited, cost is the reason.
            moving = min(links.seconds(task.inputs, worker, hosts) for worker in overdue.idle[:_THIEVES])
            waits.append(wait_of(task, row.address, overdue.idle, bool(entry.needs), moving))
    return sorted(waits, key=lambda wait: -wait.seconds)
