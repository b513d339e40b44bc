"""The projected state of every worker, updated event by event; snapshots are taken from it.

A scheduler is told of assignments and results, not of starts.  The ledger infers starts: a worker runs its tasks by
priority, one per thread, and starts the next when one is done; a paused worker starts none.  Where the inference is
wrong (a task waits for its data), a steal is refused, and nothing else happens.

A move takes three steps: `request` takes the task out of the victim's queue and counts it as incoming at the thief,
`confirm` assigns it to the thief, `refuse` returns it to the victim.  `finish` ends a move at any of them.
Each event costs a few microseconds, whatever the number of tasks; a worker's queue is a sorted list.  A worker's facts
cost a microsecond or two, a snapshot in proportion to the workers and tasks in it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice, zip_longest
from math import inf
from typing import Any

from dask_ferro.policy.estimates import MAX_AGE, Durations, Estimate, Links
from dask_ferro.policy.facts import Address, Key, TaskFacts, Worker
from dask_ferro.policy.idle_order import SCAN_LIMIT, IdleOrder
from dask_ferro.policy.stealing.snapshot import Facts, Snapshot
from dask_ferro.policy.worker_load import NO_NEEDS, Entry, PendingRequest, StealRecord, WorkerLoad

# The most victims, and tasks of each, in a snapshot: all of 20,000 tasks cost half a second.
VICTIMS = 10
DEPTH = 64
# The most tasks in a snapshot over all victims: describing one takes 2 to 3 us.
TASKS = VICTIMS * DEPTH
# Overdue tasks found at one tick, and from each queue: describing one takes about 10 us.
OVERDUE, _OF_EACH = 16, 8
# Queue entries that are scanned for movable ones: checking one takes 0.1 us.
_MAX_SCANNED = 2048


class Ledger:
    """The loads of all workers, with one method for each event, and the indexes that find the relevant ones.

    Parameters
    ----------
    facts : Facts
        Answers questions about tasks that the ledger does not store.
    durations : Durations
        Updated by `finish`.

    Attributes
    ----------
    ends : mapping of address to float
        When workers with a known end will be gone, on the caller's clock; also of workers that have not joined yet.
    devices : set of str
        Device classes of the cluster.
    hosts : mapping of address to str
        Replaced, never changed in place, when a worker joins or leaves.
    fresh : float
        Seconds that a newly started worker would have left; 0: no worker would be started.
    requests : dict of key to PendingRequest
        The requests without an answer.
    starting : list of Entry
        The tasks started since the caller last reported that it has sent its messages (`listen`).
    """

    def __init__(self, facts: Facts, durations: Durations | None = None) -> None:
        self.facts = facts
        self.rows: dict[Address, WorkerLoad] = {}
        self.ends: dict[Address, float] = {}
        self.devices: set[str] = set()
        self.hosts: Mapping[Address, str] = {}
        self._loads: list[tuple[float, Address]] = []  # ascending, of workers with a queue
        self._order = IdleOrder(self.rows)
        self.durations = durations if durations is not None else Durations()
        self.entries: dict[Key, Entry] = {}
        self.requests: dict[Key, PendingRequest] = {}
        self.fresh = 0.0
        self.waiting = 0  # tasks in the queues of all workers
        self._guessed: dict[tuple[str, str], dict[Entry, None]] = {}
        self._sequence = self._requested = 0
        self.starting: list[Entry] = []
        self._now = 0.0  # of the latest event
        # One counter of events for all rows, so that a worker that comes back never matches its former version.
        self.version = 0
        self.counts_bytes = False  # whether any worker's device bytes are counted
        self.threads: dict[str, int] = {}  # by device class
        self.least = 0  # bytes of the smallest device

    # -- workers -------------------------------------------------------------------------------------------

    def add_worker(
        self,
        address: Address,
        nthreads: int,
        host: str = "",
        device: str = "cpu",
        accepts: bool = True,
        resources: Mapping[str, float] | None = None,
    ) -> WorkerLoad:
        """Add a worker, or update the facts of a known one."""
        # Dask allows workers without threads, which only hold data; one thread avoids divisions by zero.
        now, nthreads = self._now, max(nthreads, 1)
        row = self.rows.get(address)
        if row is None:
            row = self.rows[address] = WorkerLoad(address, nthreads, host, device, accepts)
        row.nthreads, row.host, row.device, row.accepts = nthreads, host, device, accepts
        row.resources = resources or {}
        row.ends_at = self.ends.get(address, inf)
        self._classify()
        if self.hosts.get(address) != host:
            # Snapshots keep a reference to the mapping that they were given, so it is replaced and not changed.
            self.hosts = {**self.hosts, address: host}
        self._fill(row)
        self._touch(row, now)
        return row

    def remove_worker(self, address: Address) -> None:
        """Remove a worker and the tasks that it had."""
        row = self.rows.pop(address, None)
        if address in self.hosts:
            self.hosts = {known: host for known, host in self.hosts.items() if known != address}
        self.ends.pop(address, None)
        if row is None:
            return
        self._classify()
        for key in [entry.key for entry in self.entries.values() if entry.worker is row]:
            self.finish(self._now, key)
        self._unload(row)

    def set_device(self, address: Address, device: str) -> None:
        """Set a worker's device class; tasks already assigned keep their projected seconds."""
        self.rows[address].device = device
        self._classify()
        self._touch(self.rows[address], self._now)

    def _classify(self) -> None:
        """Recompute the device classes of the cluster, their threads, and whether device bytes are counted."""
        self.threads = {}
        for row in self.rows.values():
            self.threads[row.device] = self.threads.get(row.device, 0) + row.nthreads
        self.devices = set(self.threads)
        counted = [row.most for row in self.rows.values() if row.most is not None]
        self.counts_bytes, self.least = bool(counted), min(counted, default=0)

    def set_memory(self, address: Address, most: int | None) -> None:
        """Set the total bytes of a worker's device; None disables byte accounting for it."""
        self.rows[address].most = most
        self._classify()

    def set_resources(self, address: Address, resources: Mapping[str, float]) -> None:
        """Set the amounts of a worker's resources."""
        self.rows[address].resources = resources

    def others(self, entry: Entry) -> dict[str, float]:
        """Return a task's projected seconds on the cluster's other device classes, where they are known."""
        return self.durations.known(entry.prefix, self.devices, entry.device, entry.annotated)

    def set_accepts(self, address: Address, accepts: bool) -> None:
        """Set whether a worker accepts tasks and starts those in its queue."""
        row = self.rows[address]
        row.accepts = accepts
        self._fill(row)
        self._touch(row, self._now)

    def set_end(self, address: Address, at: float | None) -> None:
        """Set when a worker, possibly one that has not joined yet, will be gone; None: unknown."""
        if at is None:
            self.ends.pop(address, None)
        else:
            self.ends[address] = at
        row = self.rows.get(address)
        if row is not None:
            row.ends_at = inf if at is None else at
            self._touch(row, self._now)

    # -- tasks ---------------------------------------------------------------------------------------------

    def assign(
        self,
        now: float,
        key: Key,
        address: Address,
        prefix: str,
        priority: Any,
        annotated: float | Estimate | None = None,
        needs: Mapping[str, float] | None = None,
        nbytes: int = 0,
    ) -> Entry:
        """Record that a task was assigned to a worker.

        Parameters
        ----------
        annotated : float or Estimate, optional
            The task's own estimate of its seconds.
        needs : mapping, optional
            Amounts of the worker's resources that it takes while it runs.
        nbytes : int
            Device bytes of its result and its working memory.
        """
        row = self.rows[address]
        if key in self.entries:
            self.finish(now, key)
        self._sequence += 1
        entry = Entry(key, prefix, priority, annotated, needs or NO_NEEDS, nbytes, self._sequence)
        self.entries[key] = entry
        self._join(now, entry, row)
        return entry

    def finish(self, now: float, key: Key, seconds: float | None = None) -> Entry | None:
        """Record that a task left its worker: done, in error, or taken back.

        Parameters
        ----------
        seconds : float, optional
            Its measured duration, where it ran to its end.
        """
        entry = self.entries.pop(key, None)
        if entry is None:
            return None
        row = entry.worker
        request = self.requests.pop(key, None) if self.requests else None
        if request is not None and not request.withdrawn:
            self._announce(request, -1)
            self._touch(request.thief, now)
        else:
            self._take_off(entry)
        was_provisional = entry.provisional
        if was_provisional:
            self._forget_guess(entry)
        if seconds is not None:
            # A clock that was set back gives negative seconds.
            self._learn(now, entry, row, max(seconds, 0.0), was_provisional)
        if row.queue:
            self._fill(row)
        self._touch(row, now)
        return entry

    def request(
        self, now: float, key: Key, thief: Address, moving: int = 0, gain: float = 0.0, cost: float = 0.0
    ) -> None:
        """Record that a task was requested from its worker for `thief`.

        Parameters
        ----------
        moving : int
            Device bytes of the inputs that the thief lacks.
        gain, cost : float
            As in `Move`.
        """
        entry, row = self.entries[key], self.rows[thief]
        assert entry.state != "requested", f"{key!r} was asked back already"
        self._take_off(entry)
        if entry.state == "running":
            self._fill(entry.worker)
        entry.state, entry.started = "requested", None
        self._requested += 1
        self.requests[key] = PendingRequest(entry, row, self._requested, now, gain, cost, moving)
        self._announce(self.requests[key], +1)
        self._touch(entry.worker, now)
        self._touch(row, now)

    def confirm(self, now: float, key: Key) -> None:
        """Record that the victim gave the task up and that it was sent to the thief.

        If the thief has left meanwhile, the task is dropped until it is assigned again.
        """
        request = self._settle(key)
        entry, thief, victim = request.entry, request.thief, request.entry.worker
        self._forget_guess(entry)
        entry.origins = (*entry.origins, victim.address)
        entry.stolen = StealRecord(victim.address, request.at)
        if self._is_here(thief):
            self._join(now, entry, thief)
        else:
            del self.entries[key]
        # A withdrawn one may have occupied a thread of the victim.
        self._fill(victim)
        self._touch(victim, now)

    def withdraw(self, now: float, key: Key) -> None:
        """Record that a request got no answer for long: the task counts at its victim again, and the thief is free."""
        request = self.requests[key]
        entry, row = request.entry, request.entry.worker
        self._announce(request, -1)
        request.withdrawn = True
        row.promised += entry.nbytes
        self._queue_up(now, entry, row)
        self._touch(request.thief, now)
        self._touch(row, now)

    def refuse(self, now: float, key: Key) -> None:
        """Record that the victim kept the task, because it had started it.

        If more tasks now run than it has threads, one inferred start was wrong; `hear` resolves which one.
        """
        request = self._settle(key)
        entry, row = request.entry, request.entry.worker
        self._run(entry, now)
        row.promised += entry.nbytes
        self._touch(request.thief, now)
        self._touch(row, now)

    # -- the entries' way through the book -----------------------------------------------------------------

    def _join(self, now: float, entry: Entry, row: WorkerLoad) -> None:
        entry.worker, entry.device, entry.since = row, row.device, now
        if entry.sequence > row.turn:
            row.turn = entry.sequence
        row.promised += entry.nbytes
        kind = entry.prefix, row.device, entry.annotated
        entry.seconds, entry.known = self.durations.of(*kind)
        entry.provisional = self.durations.is_provisional(*kind)
        if entry.provisional:
            self._guessed.setdefault((entry.prefix, row.device), {})[entry] = None
        if not row.queue and row.may_start(entry):
            self._start(entry)
        else:
            self._queue_up(now, entry, row)
        self._touch(row, now)

    def _queue_up(self, now: float, entry: Entry, row: WorkerLoad) -> None:
        entry.state, entry.started = "queued", None
        entry.expected = row.starts_in(now, entry.priority)
        insort(row.queue, (entry.priority, entry.sequence, entry))
        self._count(row, entry, +1)
        if len(row.running) < row.nthreads:
            self._fill(row)

    def hear(self, now: float, address: Address, heard: float, running: Collection[Key]) -> None:
        """Replace the inferred set of running tasks by the one that a worker reported.

        Parameters
        ----------
        heard : float
            When the report was made; tasks started shortly before that, or later, may be missing in it.
        running : collection of keys
        """
        row = self.rows[address]
        found = [e for key in running if (e := self.entries.get(key)) is not None and e.worker is row]
        waited = [entry for entry in found if entry.state == "queued"]
        if not waited and len(row.running) <= row.nthreads:
            return
        for entry in waited:
            self._take(row, entry)
            self._run(entry, heard)
        # If more tasks run than there are threads, the last ones that the report lacks still wait.
        doubtful = [e for e in row.running.values() if e.key not in running and _began(e) < heard - MAX_AGE]
        doubtful.sort(key=lambda entry: (entry.priority, entry.sequence))
        while doubtful and len(row.running) > row.nthreads:
            last = doubtful.pop()
            del row.running[last.key]
            self._queue_up(now, last, row)
        self._touch(row, now)

    def _start(self, entry: Entry) -> None:
        """Start a task; its start time is set by `listen`, as its message leaves no earlier."""
        self._run(entry, inf)
        self.starting.append(entry)

    def _run(self, entry: Entry, since: float) -> None:
        entry.state, entry.started = "running", since
        entry.worker.running[entry.key] = entry

    def listen(self, now: float) -> None:
        """Record that the caller has sent its pending messages: the tasks they assign start now.

        A scheduler that works through a graph of 10,000 tasks sends and receives nothing for a second: timed from its
        assignment, the first task would seem to overrun its projection before its message left.
        """
        for entry in self.starting:
            if entry.started == inf:
                entry.started = now
        self.starting.clear()

    def _fill(self, row: WorkerLoad) -> None:
        """Start queued tasks on free threads, unless the worker is paused."""
        while row.queue and row.accepts and len(row.running) < row.nthreads:
            first: Entry = row.queue[0][2]
            if not first.needs:
                del row.queue[0]
                self._count(row, first, -1)
                self._start(first)
                continue
            # A task that waits for a resource does not block those behind it.
            entry = next((e for _, _, e in row.queue[:DEPTH] if row.may_start(e)), None)
            if entry is None:
                return
            self._take(row, entry)
            self._start(entry)

    def _take(self, row: WorkerLoad, entry: Entry) -> None:
        index = bisect_left(row.queue, (entry.priority, entry.sequence))  # type: ignore[arg-type, type-var]
        assert row.queue[index][2] is entry
        del row.queue[index]
        self._count(row, entry, -1)

    def _count(self, row: WorkerLoad, entry: Entry, sign: int) -> None:
        self.waiting += sign
        # What was added and taken again leaves a rest.
        row.waiting_seconds = row.waiting_seconds + sign * entry.seconds if row.queue else 0.0

    def _announce(self, request: PendingRequest, sign: int) -> None:
        entry, thief = request.entry, request.thief
        thief.incoming += sign
        thief.promised += sign * (entry.nbytes + request.moving)
        thief.incoming_seconds = thief.incoming_seconds + sign * entry.seconds if thief.incoming else 0.0

    def _settle(self, key: Key) -> PendingRequest:
        """End the request for a task, wherever the task counts meanwhile."""
        request = self.requests.pop(key)
        # Its thief has not counted it since.
        if request.withdrawn:
            self._take_off(request.entry)
        else:
            self._announce(request, -1)
        return request

    def _take_off(self, entry: Entry) -> None:
        row = entry.worker
        row.promised -= entry.nbytes
        if entry.state == "running":
            del row.running[entry.key]
        else:
            self._take(row, entry)

    def _forget_guess(self, entry: Entry) -> None:
        if entry.provisional:
            del self._guessed[entry.prefix, entry.device][entry]
            entry.provisional = False

    def _learn(
        self, now: float, entry: Entry, row: WorkerLoad, seconds: float, was_provisional: bool
    ) -> None:
        """Learn a measured duration; a projection derived from another class says nothing of this worker's slowness."""
        if entry.known and not was_provisional and entry.device == row.device:
            row.learn(entry.seconds, seconds)
        self.durations.add(entry.prefix, row.device, seconds, entry.annotated)
        if not self._guessed:
            return
        touched: dict[WorkerLoad, None] = {}
        for other in self._guessed.pop((entry.prefix, row.device), ()):
            touched[self._correct(other)] = None
        for changed in touched:
            self._touch(changed, now)

    def _correct(self, entry: Entry) -> WorkerLoad:
        """Project a task's seconds again, where it is counted; return that worker."""
        self._recount(entry, -1)
        entry.seconds, entry.known = self.durations.of(entry.prefix, entry.device, entry.annotated)
        entry.provisional = False
        self._recount(entry, +1)
        return self.requests[entry.key].thief if entry.state == "requested" else entry.worker

    def _recount(self, entry: Entry, sign: int) -> None:
        if entry.state == "requested":
            self._announce(self.requests[entry.key], sign)
        elif entry.state == "queued":
            self._count(entry.worker, entry, sign)

    def _touch(self, row: WorkerLoad, now: float) -> None:
        """Update the order of workers after a change to one; its start time may turn out later, but never earlier."""
        if now > self._now:
            self._now = now
        self.version = row.version = self.version + 1
        self._order.touch(row, now)
        self._load(row)

    def _is_here(self, row: WorkerLoad) -> bool:
        return self.rows.get(row.address) is row

    def _load(self, row: WorkerLoad) -> None:
        load = None
        if row.queue and self._is_here(row):
            load = row.waiting_seconds * row.slowness / row.nthreads, row.address
        # Most events leave a queue as long as it was, or empty.
        if load != row.load:
            self._unload(row)
            if load is not None:
                row.load = load
                insort(self._loads, load)

    def _unload(self, row: WorkerLoad) -> None:
        if row.load is not None:
            del self._loads[bisect_left(self._loads, row.load)]
            row.load = None

    # -- what is known -------------------------------------------------------------------------------------

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

    def queue(self, address: Address, depth: int, now: float) -> tuple[TaskFacts, ...]:
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
        self, now: float, patience: float, turn: int, projected: bool = True
    ) -> list[tuple[Entry, WorkerLoad, TaskFacts | None]]:
        """Return overdue tasks in queues: some of each queue, and different ones for each `turn`.

        The facts of a task are None where it may not be moved.

        Parameters
        ----------
        patience, projected
            As in `WorkerLoad.overdue`.
        """
        found: list[tuple[Entry, WorkerLoad, TaskFacts | None]] = []
        start, left = turn % max(len(self._loads), 1), _MAX_SCANNED
        for _, address in (*self._loads[start:], *self._loads[:start]):
            row = self.rows[address]
            scanned = min(len(row.queue), left) if len(row.queue) > _OF_EACH else 0
            left -= scanned
            for entry in self._some(row.queue, turn, scanned):
                if waited := row.overdue(entry, now, patience, projected):
                    task = self._waiting(entry, row, now)
                    found.append((entry, row, task and task._replace(overdue=waited)))
            if len(found) >= OVERDUE:
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
            at = turn // len(self._loads) * _MAX_SCANNED % len(queue) if scanned < len(queue) else 0
            part = (
                (queue[at:] + queue[:at])[:scanned] if at + scanned > len(queue) else queue[at : at + scanned]
            )
            free = self.facts.unbound([entry for _, _, entry in part])
            first = turn * _OF_EACH % max(len(free), 1)
            some += [entry for entry in free[first : first + _OF_EACH] if entry not in some]
        return some

    def _waiting(self, entry: Entry, row: WorkerLoad, now: float) -> TaskFacts | None:
        task = self.facts.waiting(entry, row)
        if task is None:
            return None
        return task._replace(blocked=row.blocks(entry, now) if entry.needs else 0.0, waited=now - entry.since)

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
        return Snapshot(now, hungry, busiest, workers, queues, (links or Links()).copy(), self.hosts, known)

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
        if lasting and max((row.ends_at for row in self.rows.values()), default=inf) < now + lasting:
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

    def first(self, now: float) -> float:
        """Return a lower bound of the seconds until an accepting worker runs dry, exact where one has no queue."""
        if len(self._loads) == len(self.rows):
            return self._loads[0][0] if self._loads else inf
        if len(self.rows) <= SCAN_LIMIT:
            return min([r.starts_in(now) for r in self.rows.values() if r.accepts], default=inf)
        return min((worker.starts_in for worker in self.soonest(now, 1)), default=inf)


def _began(entry: Entry) -> float:
    assert entry.started is not None
    return entry.started
