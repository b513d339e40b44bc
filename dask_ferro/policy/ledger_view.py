"""Read-only views of the ledger: facts of single workers, lists of workers in order, and snapshots for policies.

`Ledger` is the subclass that changes state.  A worker's facts cost a microsecond or two, a snapshot in proportion to
the workers and tasks in it.  Durations are seconds, on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, zip_longest
from math import inf
from typing import Any

from dask_ferro.policy.estimates import Links
from dask_ferro.policy.facts import Address, TaskFacts, Worker
from dask_ferro.policy.idle_order import FEW, IdleOrder
from dask_ferro.policy.stealing.snapshot import Facts, Snapshot
from dask_ferro.policy.worker_load import Entry, WorkerLoad

# The most victims, and tasks of each, in a snapshot: all of 20,000 tasks cost half a second.
VICTIMS = 10
DEPTH = 64
# The most tasks in a snapshot over all victims: describing one takes 2 to 3 us.
TASKS = VICTIMS * DEPTH
# Overdue tasks found at one tick, and from each queue: describing one takes about 10 us.
OVERDUE, _OF_EACH = 16, 8
# Queue entries that are scanned for movable ones: checking one takes 0.1 us.
_SCANNED = 2048


class LedgerView:
    """The loads of all workers, and the indexes that find the relevant ones.

    Attributes
    ----------
    facts : Facts
        Answers questions about tasks that the ledger does not store.
    ends : mapping of address to float
        When workers with a known end will be gone, on the caller's clock; also of workers that have not joined yet.
    devices : set of str
        Device classes of the cluster.
    hosts : mapping of address to str
        Replaced, never changed in place, when a worker joins or leaves.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.rows: dict[Address, WorkerLoad] = {}
        self.ends: dict[Address, float] = {}
        self.devices: set[str] = set()
        self.hosts: Mapping[Address, str] = {}
        self._loads: list[tuple[float, Address]] = []  # ascending, of workers with a queue
        self._order = IdleOrder(self.rows)
        self._everyone: list[Address] = []
        self._last: float | None = None  # the latest end of any worker; None: to be computed

    def worker(self, address: Address, now: float, priority: Any = None) -> Worker:
        """Return a worker's facts, with `starts_in` as for a task of the given priority."""
        row = self.rows[address]
        queue = len(row.queue)
        dry = row.starts_in(now)
        return Worker(
            address, row.host, row.device, row.nthreads,
            dry if priority is None or not queue else row.starts_in(now, priority),
            min(len(row.running) + (0 if row.is_blocked else queue) + row.incoming, row.nthreads),
            queue, row.slowness, row.accepts,
            # Positional: keywords would take half as long again.
            False, dry, row.ends_at - now,
            None if row.most is None else row.most - self.facts.live(address) - row.promised, row.most,
            self.facts.holds(address), row.turn,
        )  # fmt: skip

    def _seen(self, address: Address, now: float) -> Worker:
        """Return a worker's facts, with whether one of its running tasks unlocks others."""
        unlocks = any(map(self.facts.unlocks, self.rows[address].running))
        return self.worker(address, now)._replace(unlocks=unlocks)

    def longest(self) -> float:
        """Return the seconds of the longest queue, without running tasks."""
        return self._loads[-1][0] if self._loads else 0.0

    def waits_for(self, now: float, seconds: float) -> bool:
        """Return whether a queued task is projected to wait for at least `seconds`."""
        return any(self.rows[address].starts_in(now) >= seconds for _, address in reversed(self._loads))

    def queue(self, address: Address, depth: int = DEPTH, now: float = 0.0) -> tuple[TaskFacts, ...]:
        """Return the movable tasks in a worker's queue, the last to start first."""
        row = self.rows[address]
        # Read four times as many entries as wanted, since some may not be moved.
        last = (entry for _, _, entry in reversed(row.queue[-4 * depth :]))
        rows = (self._waiting(entry, row, now) for entry in last)
        return tuple(islice((row for row in rows if row is not None), depth))

    def idle(self, now: float) -> list[Worker]:
        """Return the workers that accept tasks and have a thread with neither a running nor an incoming task."""
        rows = (r for r in self.rows.values() if r.may_take and len(r.running) + r.incoming < r.nthreads)
        return [self.worker(row.address, now) for row in rows]

    def overdue(
        self, now: float, patience: float, turn: int, count: int = OVERDUE, projected: bool = True
    ) -> list[tuple[Entry, WorkerLoad, TaskFacts | None]]:
        """Return overdue tasks in queues: some of each queue, and different ones for each `turn`.

        The facts of a task are None where it may not be moved.

        Parameters
        ----------
        patience, projected
            As in `WorkerLoad.overdue`.
        """
        found: list[tuple[Entry, WorkerLoad, TaskFacts | None]] = []
        start, left = turn % max(len(self._loads), 1), _SCANNED
        for _, address in (*self._loads[start:], *self._loads[:start]):
            row = self.rows[address]
            scanned = min(len(row.queue), left) if len(row.queue) > _OF_EACH else 0
            left -= scanned
            for entry in self._some(row.queue, turn, scanned):
                if waited := row.overdue(entry, now, patience, projected):
                    task = self._waiting(entry, row, now)
                    found.append((entry, row, task and task._replace(overdue=waited)))
            if len(found) >= count:
                break
        return found

    def _some(self, queue: list[tuple[Any, int, Entry]], turn: int, scanned: int) -> list[Entry]:
        """Return some entries of a queue: a few in turn, and a few that may be moved.

        The movable ones are sought among `scanned` entries.
        """
        first = turn * _OF_EACH % len(queue)
        some = [entry for _, _, entry in queue[first : first + _OF_EACH]]
        if scanned:
            # The full scan allowance goes to a different queue each turn.
            at = turn // len(self._loads) * _SCANNED % len(queue) if scanned < len(queue) else 0
            part = (
                (queue[at:] + queue[:at])[:scanned] if at + scanned > len(queue) else queue[at : at + scanned]
            )
            free = self.facts.unbound([entry for _, _, entry in part])
            first = turn * _OF_EACH % max(len(free), 1)
            some += [entry for entry in free[first : first + _OF_EACH] if entry not in some]
        return some

    def _waiting(self, entry: Entry, row: WorkerLoad, now: float) -> TaskFacts | None:
        task = self.facts.waiting(entry, row)
        if task is None or not entry.needs:
            return task
        return task._replace(blocked=row.blocks(entry, now))

    @property
    def everyone(self) -> Sequence[Address]:
        """All workers, sorted by address."""
        return self._everyone

    def snapshot(
        self,
        now: float,
        hungry: Iterable[Address],
        links: Links | None = None,
        asked: Mapping[Address, tuple[Address, ...]] | None = None,
        victims: int = VICTIMS,
        skip: int = 0,
        tasks: int = TASKS,
        first: Mapping[Address, Sequence[TaskFacts]] | None = None,
    ) -> Snapshot:
        """Return the facts for one step of a stealing policy.

        Parameters
        ----------
        asked : mapping of address to tuple of addresses, optional
            The victims to show for each thief; default: the longest queues.
        skip : int
            How many of the longest queues to leave out, because nothing in them may be moved.
        tasks : int
            The most tasks shown, beside those of `first`.
        first : mapping of address to tasks, optional
            Tasks to show before those at the ends of queues.
        """
        hungry = tuple(address for address in hungry if address in self.rows)
        busiest = self._busiest(victims, skip) if asked is None else ()
        asked = asked or {}
        known = {a: tuple(filter(self.rows.__contains__, asked[a])) for a in hungry if a in asked}
        # The first choice of every thief comes before any second choice: there may be room for no more.
        in_turn = (victim for turn in zip_longest(*known.values()) for victim in turn if victim is not None)
        shown = dict.fromkeys((*busiest, *in_turn))
        queues = self._ends_of(shown, tasks, now)
        for address, some in (first or {}).items():
            keys = {task.key for task in some}
            queues[address] = (*some, *(task for task in queues.get(address, ()) if task.key not in keys))
        if first:
            busiest = tuple(dict.fromkeys((*busiest, *first)))
            shown.update(dict.fromkeys(first))
        workers = {a: self._seen(a, now) for a in dict.fromkeys((*hungry, *shown))}
        moving = (links or Links()).copy()
        return Snapshot(now, hungry, busiest, workers, queues, moving, self.hosts, known)

    def _ends_of(
        self, addresses: Iterable[Address], tasks: int, now: float
    ) -> dict[Address, tuple[TaskFacts, ...]]:
        """Return the last tasks of queues until `tasks` are collected."""
        found: dict[Address, tuple[TaskFacts, ...]] = {}
        for address in addresses:
            if tasks <= 0:
                break
            if self.rows[address].queue:
                found[address] = self.queue(address, min(DEPTH, tasks), now)
                tasks -= len(found[address])
        return found

    def _busiest(self, count: int, skip: int) -> tuple[Address, ...]:
        stop = len(self._loads)
        if stop > count:
            stop -= skip % stop
        return tuple(address for _, address in reversed(self._loads[max(stop - count, 0) : stop]))

    def soonest(
        self, now: float, count: int, priority: Any = None, lasting: float = 0.0, room: int = 0
    ) -> list[Worker]:
        """Return the accepting workers that run dry first, in each device class.

        Parameters
        ----------
        count : int
            The most workers of one class.
        priority : optional
            That of the task that they are for.
        lasting : float
            Only workers with at least this many seconds left when the task would start; 0: all.
        room : int
            Only workers whose devices have room for this many bytes or are not counted; 0: all.
        """
        if lasting and self._last_end() < now + lasting:
            return []

        def suits(worker: Worker) -> bool:
            has_time = not lasting or worker.has_time(worker.starts_in, lasting)
            return has_time and (not room or worker.room is None or worker.room >= room)

        found: list[Worker] = []
        for device in sorted(self.devices):
            order = self._order.soonest(device, now)
            rows = (self.worker(row.address, now, priority) for row in order)
            found += islice(filter(suits, rows), count)
            order.close()
        return sorted(found, key=lambda worker: (worker.runs_dry_in, worker.turn, worker.address))

    def _last_end(self) -> float:
        if self._last is None:
            self._last = max((row.ends_at for row in self.rows.values()), default=inf)
        return self._last

    def first(self, now: float) -> float:
        """Return a lower bound of the seconds until an accepting worker runs dry, exact where one has no queue."""
        if len(self._loads) == len(self.rows):
            return self._loads[0][0] if self._loads else inf
        if len(self.rows) <= FEW:
            return min([r.starts_in(now) for r in self.rows.values() if r.accepts], default=inf)
        return min((worker.starts_in for worker in self.soonest(now, 1)), default=inf)
