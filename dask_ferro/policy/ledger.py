"""The projected state of every worker, updated event by event; snapshots are taken from it.

A scheduler is told of assignments and results, not of starts.  The ledger infers starts: a worker runs its tasks by
priority, one per thread, and starts the next when one is done; a paused worker starts none.  Where the inference is
wrong (a task waits for its data), a steal is refused, and nothing else happens.

A move takes three steps: `request` takes the task out of the victim's queue and counts it as incoming at the thief,
`confirm` assigns it to the thief, `refuse` returns it to the victim.  `finish` ends a move at any of them.
Each event costs a few microseconds, whatever the number of tasks; a worker's queue is a sorted list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping
from math import inf
from typing import Any

from dask_ferro.policy.estimates import REPORTED, Durations, Estimate
from dask_ferro.policy.facts import Address, Key
from dask_ferro.policy.idle_order import FEW
from dask_ferro.policy.ledger_view import DEPTH, LedgerView
from dask_ferro.policy.stealing.snapshot import Facts
from dask_ferro.policy.worker_load import NO_NEEDS, Entry, PendingRequest, Stolen, WorkerLoad


class Ledger(LedgerView):
    """The mutable state behind `LedgerView`, with one method for each event.

    Parameters
    ----------
    facts : Facts
    durations : Durations
        Updated by `finish`.

    Attributes
    ----------
    fresh : float
        Seconds that a newly started worker would have left; 0: no worker would be started.
    requests : dict of key to PendingRequest
        The requests without an answer.
    listens : bool
        Whether the caller reports when it has sent its messages (`listen`).
    starting : list of Entry
        The tasks started since its last report.
    """

    def __init__(self, facts: Facts, durations: Durations | None = None) -> None:
        super().__init__(facts)
        self.durations = durations if durations is not None else Durations()
        self.entries: dict[Key, Entry] = {}
        self.requests: dict[Key, PendingRequest] = {}
        self.fresh = 0.0
        self.listens = False
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
            insort(self._everyone, address)
            if len(self.rows) == FEW + 1:
                self._order.keep(now)
        row.nthreads, row.host, row.device, row.accepts = nthreads, host, device, accepts
        row.resources = resources or {}
        row.ends_at = self.ends.get(address, inf)
        self._last = None
        self._classify()
        if self.hosts.get(address) != host:
            # Snapshots keep a reference to the mapping that they were given, so it is replaced and not changed.
            self.hosts = {**self.hosts, address: host}
        self._fill(now, row)
        self._touch(row, now)
        return row

    def remove_worker(self, address: Address) -> None:
        """Remove a worker and the tasks that it had."""
        row = self.rows.pop(address, None)
        if address in self.hosts:
            self.hosts = {known: host for known, host in self.hosts.items() if known != address}
        self.ends.pop(address, None)
        self._last = None
        if row is None:
            return
        self._everyone.remove(address)
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
        self._fill(self._now, row)
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
            self._last = None
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
            self._fill(now, row)
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
            self._fill(now, entry.worker)
        entry.state, entry.started, entry.stolen = "requested", None, None
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
        entry.stolen = Stolen(victim.address, request.at)
        if self._is_here(thief):
            self._join(now, entry, thief)
        else:
            del self.entries[key]
        # A withdrawn one may have occupied a thread of the victim.
        self._fill(now, victim)
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
        entry.is_sure = True
        self._run(entry, now)
        row.promised += entry.nbytes
        self._touch(request.thief, now)
        self._touch(row, now)

    # -- the entries' way through the book -----------------------------------------------------------------

    def _join(self, now: float, entry: Entry, row: WorkerLoad) -> None:
        entry.worker, entry.device, entry.since, entry.is_sure = row, row.device, now, False
        if entry.sequence > row.turn:
            row.turn = entry.sequence
        row.promised += entry.nbytes
        entry.seconds, entry.known, entry.provisional = self.durations.projected(
            entry.prefix, row.device, entry.annotated
        )
        if entry.provisional:
            self._guessed.setdefault((entry.prefix, row.device), {})[entry] = None
        if not row.queue and row.may_start(entry):
            self._start(now, entry, row)
        else:
            self._queue_up(now, entry, row)
        self._touch(row, now)

    def _queue_up(self, now: float, entry: Entry, row: WorkerLoad) -> None:
        entry.state, entry.started = "queued", None
        entry.expected = row.starts_in(now, entry.priority)
        insort(row.queue, (entry.priority, entry.sequence, entry))
        self._count(row, entry, +1)
        if len(row.running) < row.nthreads:
            self._fill(now, row)

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
        for entry in row.running.values():
            early = entry.started is not None and entry.started < heard - REPORTED
            entry.is_sure = entry.key in running or not early
        while self._doubt(now, row):
            pass
        self._touch(row, now)

    def _doubt(self, now: float, row: WorkerLoad) -> bool:
        """Return the last unconfirmed running task to the queue if more tasks run than there are threads."""
        doubtful = [entry for entry in row.running.values() if not entry.is_sure]
        if len(row.running) <= row.nthreads or not doubtful:
            return False
        last = max(doubtful, key=lambda entry: (entry.priority, entry.sequence))
        del row.running[last.key]
        self._queue_up(now, last, row)
        return True

    def _start(self, now: float, entry: Entry, row: WorkerLoad) -> None:
        """Start a task; with `listens`, its start time is set by `listen`, as its message leaves no earlier."""
        self._run(entry, inf if self.listens else now)
        if self.listens:
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

    def _fill(self, now: float, row: WorkerLoad) -> None:
        """Start queued tasks on free threads, unless the worker is paused."""
        while row.queue and row.accepts and len(row.running) < row.nthreads:
            first: Entry = row.queue[0][2]
            if not first.needs:
                del row.queue[0]
                self._count(row, first, -1)
                self._start(now, first, row)
                continue
            # A task that waits for a resource does not block those behind it.
            entry = next((e for _, _, e in row.queue[:DEPTH] if row.may_start(e)), None)
            if entry is None:
                return
            self._take(row, entry)
            self._start(now, entry, row)

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
        if len(self.rows) > FEW:  # fewer workers are not kept in order
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
