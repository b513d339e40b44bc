"""The facts of Dask's tasks for the scheduling core: where their inputs lie, where they may run, and their cost.

Facts are built from Dask's own state when they are asked for, for the few tasks that a policy considers: those at the
end of long queues, and the one being placed.  Decisions are made elsewhere.  Sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from distributed import Scheduler
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.policy.facts import Key, Replica, TaskFacts
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.worker_load import Entry, WorkerLoad
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.annotations import wish_of
from dask_ferro.scheduler.device_memory import Devices

# The most inputs of a task listed singly; more are summed up by their holders.
_FEW_INPUTS = 8
# The most dependents of a task considered.
_FEW_DEPENDENTS = 16


class DaskTaskFacts:
    """The tasks of a scheduler as facts for a policy: the core's `Facts`.

    Parameters
    ----------
    scheduler : Scheduler
    devices : Devices
        Facts of the workers' devices.

    Attributes
    ----------
    ledger : Ledger
        Set by the owner of both.
    """

    ledger: Ledger

    def __init__(self, scheduler: Scheduler, devices: Devices) -> None:
        self.scheduler = scheduler
        self.devices = devices
        self.live = devices.live
        # Of the current step: the thieves, and those among them that are being sent inputs of earlier moves.
        self._thieves: Sequence[str] = ()
        self._fetching: list[str] = []
        # Resources needed by pending moves, by thief: Dask books them only when a task has moved.
        self._coming: Counter[tuple[str, str]] = Counter()

    def begin(self, thieves: Sequence[str]) -> None:
        """Prepare to describe tasks for some thieves."""
        workers = self.scheduler.workers
        self._thieves = thieves
        self._fetching = [a for a in thieves if a in workers and workers[a].needs_what]
        self._coming.clear()
        for request in self.ledger.requests.values():
            self._sends(request.entry.needs, request.thief.address)

    def reserve(self, key: Key, victim: str, thief: str) -> bool:
        """Return whether a task may be requested, and reserve its resources at the thief."""
        ts, workers = self.task(key), self.scheduler.workers
        if ts is None or thief not in workers or ts.processing_on is None:
            return False
        if ts.processing_on.address != victim or not self._has_resources(ts, workers[thief]):
            return False
        self._sends(ts.resource_restrictions or {}, thief)
        return True

    def task(self, key: Key) -> TaskState | None:
        """Return a task by its key."""
        return self.scheduler.tasks.get(key)  # type: ignore[call-overload, no-any-return]

    def _sends(self, needs: Mapping[str, float], thief: str) -> None:
        for resource, amount in needs.items():
            self._coming[thief, resource] += amount  # type: ignore[assignment]

    def _has_resources(self, ts: TaskState, thief: WorkerState) -> bool:
        """Return whether the thief has the task's resources free, beside those reserved by pending moves."""
        has, used, coming = thief.resources, thief.used_resources, self._coming
        return all(
            amount <= has.get(resource, 0) - (used.get(resource, 0) + coming[thief.address, resource])
            for resource, amount in (ts.resource_restrictions or {}).items()
        )

    def waiting(self, entry: Entry, row: WorkerLoad) -> TaskFacts | None:
        """Return the facts of a queued task for the thieves; None: it must not move."""
        ts = self.task(entry.key)
        if ts is None or ts.actor or ts.processing_on is None or ts.key in self.ledger.requests:
            return None
        allowed, preferred = self.restrictions(ts)
        if ts.resource_restrictions:
            workers = self.scheduler.workers
            # Only thieves with the resources free now: on others the task would wait again.
            has = frozenset(a for a in self._thieves if a in workers and self._has_resources(ts, workers[a]))
            allowed = has if allowed is None else has & allowed
        inputs = tuple(self.inputs(ts, self._fetching))
        others, headroom, wish = self.ledger.others(entry), self.devices.headroom(ts), wish_of(ts.annotations)
        return TaskFacts(
            ts.key, entry.seconds, entry.known, inputs, allowed, preferred, entry.origins, entry.device, others,
            entry.nbytes, headroom, wish.must, wish.likes,
        )  # fmt: skip

    def holds(self, address: str) -> int:
        """Return the bytes of the results that a worker holds."""
        ws = self.scheduler.workers.get(address)
        return 0 if ws is None else ws.nbytes

    def restrictions(self, ts: TaskState) -> tuple[frozenset[str] | None, frozenset[str] | None]:
        """Return the workers that a task must run on, and those that it prefers; None: any."""
        if not upstream.is_restricted(ts):
            return None, None
        valid = self.scheduler.valid_workers(ts)
        addresses = None if valid is None else frozenset(ws.address for ws in valid)
        return (None, addresses) if ts.loose_restrictions else (addresses, None)

    def inputs(self, ts: TaskState, fetching: Collection[str]) -> Iterator[Replica]:
        """Yield a task's inputs; workers in `fetching` that are being sent an input count as its holders."""
        if len(ts.dependencies) > _FEW_INPUTS:
            held: Counter[frozenset[str]] = Counter()
            for dts in ts.dependencies:
                held[frozenset(ws.address for ws in dts.who_has or ())] += dts.get_nbytes()
            yield from (Replica(nbytes, where) for where, nbytes in held.items())
            return
        workers = self.scheduler.workers
        for dts in ts.dependencies:
            holders = {ws.address for ws in dts.who_has or ()}
            holders.update(a for a in fetching if a in workers and dts in workers[a].needs_what)
            yield Replica(dts.get_nbytes(), frozenset(holders))

    def unbound(self, entries: list[Entry]) -> list[Entry]:
        """Return the waiting tasks that are not restricted to a single worker; fast enough for thousands of tasks."""
        tasks = self.scheduler.tasks
        return [
            entry
            for entry in entries
            if (ts := tasks.get(entry.key)) is not None  # type: ignore[call-overload]
            and not ts.actor
            and (not ts.worker_restrictions or len(ts.worker_restrictions) > 1 or ts.loose_restrictions)
        ]

    def unlocks(self, key: Key) -> bool:
        """Return whether a task is the last missing input of another one."""
        ts = self.task(key)
        return ts is not None and any(
            len(d.waiting_on) == 1 for d in islice(ts.dependents, _FEW_DEPENDENTS) if d.waiting_on
        )
