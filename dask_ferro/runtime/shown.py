"""What a policy is shown of a task: where its inputs lie, who may run it, and what it takes.

Rows are built from Dask's own state at the moment of a look, for the few tasks that a policy looks at: those at the
end of long queues, and the one that is being placed.  What is decided from them is not known here.  Sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from distributed import Scheduler
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.row import Entry
from dask_ferro.policy.snapshot import Replica, Task
from dask_ferro.runtime import upstream
from dask_ferro.runtime.affinity import wish_of
from dask_ferro.runtime.devices import Devices
from dask_ferro.runtime.upstream import nbytes_of

# Inputs of a task that are shown one by one; more are summed up by who holds them.
_FEW_INPUTS = 8
# Of a task that many wait for, so many are looked at.
_FEW_DEPENDENTS = 16


class Shown:
    """Tasks of a scheduler as rows for a policy.

    Parameters
    ----------
    scheduler : Scheduler
    devices : Devices
        What is known of the workers' devices.
    """

    def __init__(self, scheduler: Scheduler, devices: Devices) -> None:
        self.scheduler = scheduler
        self.devices = devices
        self._thieves: list[str] = []  # of the step that is being taken
        self._coming: Counter[tuple[str, str]] = Counter()  # resources that moves on their way need, by thief

    def begin(self, thieves: list[str], moves: Iterable[tuple[TaskState, str]]) -> None:
        """Begin a step of stealing.

        Parameters
        ----------
        thieves : list of addresses
        moves : iterable of (task, address)
            What is on its way to whom.
        """
        self._thieves = thieves
        self._coming.clear()
        for ts, thief in moves:
            self.sends(ts, thief)

    def sends(self, ts: TaskState, thief: str) -> None:
        """Note that a task is on its way to a thief: its resources will be taken there."""
        for resource, amount in (ts.resource_restrictions or {}).items():
            self._coming[thief, resource] += amount  # type: ignore[assignment]

    def has_resources(self, ts: TaskState, thief: WorkerState) -> bool:
        """Whether the thief has free what the task needs, less what is already on its way there."""
        for resource, amount in (ts.resource_restrictions or {}).items():
            used = thief.used_resources.get(resource, 0) + self._coming[thief.address, resource]
            if amount > thief.resources.get(resource, 0) - used:
                return False
        return True

    def waiting(self, ts: TaskState, entry: Entry, ledger: Ledger) -> Task | None:
        """Return a task that waits in a worker's queue as the thieves may take it, or None: it must not move."""
        if ts.actor or ts.processing_on is None:
            return None
        allowed, preferred = self.restrictions(ts)
        if ts.resource_restrictions:
            workers = self.scheduler.workers
            has = frozenset(a for a in self._thieves if a in workers and self.has_resources(ts, workers[a]))
            allowed = has if allowed is None else has & allowed
        inputs = tuple(self.inputs(ts, self._thieves))
        wish = wish_of(ts.annotations)
        return Task(
            ts.key,
            entry.seconds,
            entry.known,
            inputs,
            allowed,
            preferred,
            entry.origins,
            entry.device,
            ledger.others(entry),
            entry.nbytes,
            self.devices.headroom(ts, ledger),
            wish.must,
            wish.likes,
        )

    def holds(self, address: str) -> int:
        """Return the bytes of the results that a worker holds."""
        ws = self.scheduler.workers.get(address)
        return 0 if ws is None else ws.nbytes

    def restrictions(self, ts: TaskState) -> tuple[frozenset[str] | None, frozenset[str] | None]:
        """Return the workers that a task must run on, and those that it would rather run on; None: any."""
        if not upstream.is_restricted(ts):
            return None, None
        valid = upstream.allowed_workers(self.scheduler, ts)
        addresses = None if valid is None else frozenset(ws.address for ws in valid)
        return (None, addresses) if ts.loose_restrictions else (addresses, None)

    def inputs(self, ts: TaskState, fetching: Collection[str]) -> Iterator[Replica]:
        """Yield a task's inputs; workers of `fetching` that are being sent one count as its holders."""
        if len(ts.dependencies) > _FEW_INPUTS:
            held: Counter[tuple[frozenset[str], str]] = Counter()
            for dts in ts.dependencies:
                where = frozenset(ws.address for ws in dts.who_has or ())
                held[where, self.devices.kind(dts)] += nbytes_of(dts)
            yield from (Replica(nbytes, *where) for where, nbytes in held.items())
            return
        workers = self.scheduler.workers
        for dts in ts.dependencies:
            holders = {ws.address for ws in dts.who_has or ()}
            holders.update(a for a in fetching if a in workers and dts in workers[a].needs_what)
            yield Replica(nbytes_of(dts), frozenset(holders), self.devices.kind(dts), dts.key)


def unbound(entries: list[Entry]) -> list[Entry]:
    """Return those of waiting tasks that are not told to run on one worker alone: of thousands at a time."""
    return [
        entry
        for entry in entries
        if not (ts := entry.payload).actor
        and (not ts.worker_restrictions or len(ts.worker_restrictions) > 1 or ts.loose_restrictions)
    ]


def unlocks(ts: TaskState) -> bool:
    """Whether a task is the last that some other one waits for."""
    return any(len(d.waiting_on) == 1 for d in islice(ts.dependents, _FEW_DEPENDENTS) if d.waiting_on)
