"""A virtual scheduler: Dask's task states and its root-ish queue; a decider makes all other decisions.

It is one serial server: messages caused by another message are sent once the server has processed that one, and
messages that arrive meanwhile wait.  It knows only its messages, never the workers' true states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from dask_ferro.policy.facts import Address
from dask_ferro.simulate.cluster import VirtualWorker
from dask_ferro.simulate.virtual_tasks import Roots, VirtualTask
from dask_ferro.simulate.virtual_worker import LiveWorker, WorkerTask, World

# The request number when a leaving worker's unstarted tasks are asked back; those of steals count from 1.
_RETURN_REQUEST = 0


@dataclass(slots=True, eq=False, repr=False)
class WorkerRecord:
    """A worker's state as the scheduler knows it."""

    live: LiveWorker
    number: int
    slots: int
    accepts: bool = True
    processing: dict[int, VirtualTask] = field(default_factory=dict)
    needs: dict[int, int] = field(default_factory=dict)  # inputs of those tasks: how many need each
    version: int = 0
    spec: VirtualWorker = field(init=False)
    address: Address = field(init=False)
    nthreads: int = field(init=False)

    def __post_init__(self) -> None:
        self.spec = self.live.spec
        self.address, self.nthreads = self.spec.address, self.spec.nthreads


class Decider:
    """The interface of a decider, which places tasks that are not root-ish, and moves tasks."""

    def begin(self) -> None:
        """Start the periodic events."""

    def learn(self, seconds: Mapping[str, float]) -> None:
        """Load durations by prefix that were measured earlier."""

    def joined(self, record: WorkerRecord) -> None:
        """Handle a new worker."""

    def left(self, record: WorkerRecord) -> None:
        """Handle the loss of a worker; its tasks were taken back before."""

    def changed(self, record: WorkerRecord) -> None:
        """Handle that a worker stops accepting tasks, or resumes."""

    def where(self, job: VirtualTask) -> Address | None:
        """Return the worker for a task."""
        raise NotImplementedError

    def busy(self, record: WorkerRecord) -> tuple[float, float]:
        """Return the load of a worker; the least busy one is assigned the next queued task."""
        raise NotImplementedError

    def assigned(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Handle the assignment of a task to a worker."""

    def finished(self, job: VirtualTask, record: WorkerRecord, held: WorkerTask) -> None:
        """Handle the end of a task; it is still in the record's `processing`."""

    def dropped(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Handle that a task was taken back from a worker."""

    def arrived(self, address: Address, job: VirtualTask, kind: str, seconds: float) -> None:
        """Handle that a worker fetched a task's result, over a class of link, in that many seconds."""

    def released(self, job: VirtualTask) -> None:
        """Handle that a result leaves its holders, which the task still lists."""

    def settled(self) -> None:
        """Handle the end of all events that one message caused."""

    def projected(self, job: VirtualTask) -> float:
        """Return the projected seconds of a task, including those that it has run already."""
        raise NotImplementedError

    def set_end(self, address: Address, at: float) -> None:
        """Set the time at which a worker ends."""

    def set_fresh(self, seconds: float) -> None:
        """Set the remaining seconds of a worker that joined now; 0: none would join."""

    def suits(self, job: VirtualTask, record: WorkerRecord) -> bool:
        """Whether to assign a queued task to a worker with a free slot."""
        return True

    def ahead(self, job: VirtualTask, record: WorkerRecord) -> int:
        """Return how many more queued tasks a worker is sent that was just given one; `job` is the next."""
        return 0

    def replied(self, address: Address, job: VirtualTask, request: int, state: str) -> None:
        """Handle a victim's answer: "ready" (given up), "running" or "gone"."""


class Scheduler:
    """The scheduler of one simulation."""

    def __init__(self, world: World, jobs: list[VirtualTask], stops: Sequence[int]) -> None:
        self.world = world
        self.clock = world.clock
        self.jobs = jobs
        self.records: dict[Address, WorkerRecord] = {}
        self.threads = 0
        self._joined_count = 0
        self.remaining = len(jobs)
        self.first_done: dict[int, WorkerTask] = {}
        self.known = 0  # tasks that were submitted
        self.submissions: list[float] = []
        self._stops = (0, *stops)
        self.decider: Decider
        self._cluster = world.cluster
        self._roots = Roots(jobs)
        self._queue: list[tuple[float, int]] = []
        # A heap with the least busy worker first.
        self._open: list[tuple[tuple[float, float], int, int, WorkerRecord]] = []
        self._unplaced: list[VirtualTask] = []
        self._inbox: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self.busy = 0.0  # seconds so far of processing, and of waiting for a core
        self._waits_since = 0.0
        self._free_at = 0.0
        self._has_core = False  # if cores are counted
        self._cost = 0.0
        self._outbox: list[tuple[WorkerRecord, Callable[..., None], tuple[object, ...]]] = []

    # ---- the server ----------------------------------------------------------------------------------------

    def receive(self, act: Callable[..., object], *args: object) -> None:
        """Process a message: now, or once the server has processed the earlier ones."""
        self._inbox.append((act, args))
        if len(self._inbox) == 1 and not self._has_core:
            if self.world.cores.are_counted:
                self._waits_since = self.clock.now
                self.world.cores.take(self._begin)
            else:
                self.clock.at(max(self._free_at, self.clock.now), self._serve)

    def hear(self, name: str, *content: object) -> None:
        """Process a worker's message by the handler of that name."""
        self.receive(getattr(self, name), *content)

    def _begin(self) -> None:
        self._has_core = True
        self.busy += self.clock.now - self._waits_since
        self.clock.at(max(self._free_at, self.clock.now), self._serve)

    def when_idle(self, act: Callable[[], None]) -> None:
        """Call `act()` after the pending messages, without keeping the simulation alive for it."""
        if self._inbox:
            self._inbox.append((act, ()))
        elif self._free_at > self.clock.now:
            self.clock.background(self._free_at, self.when_idle, act)
        else:
            self._do(act)

    def think(self, seconds: float) -> None:
        """Extend the busy time by that many seconds."""
        self._cost += seconds

    def send(self, record: WorkerRecord, act: Callable[..., None], *args: object) -> None:
        """Send a message to a worker once the server is no longer busy."""
        self._outbox.append((record, act, args))

    def _serve(self) -> None:
        if not self._inbox:
            self._has_core = False
            self.world.cores.release()
            return
        act, args = self._inbox[0]
        self._do(act, *args)
        self._inbox.popleft()
        if self._inbox or self._has_core:
            self.clock.at(self._free_at, self._serve)

    def _do(self, act: Callable[..., object], *args: object) -> None:
        self._cost = 0.0
        act(*args)
        self.decider.settled()
        lasts = self.world.cores.lasts(self._cost)
        self.busy += lasts
        self._free_at = self.clock.now + lasts
        for record, message, content in self._outbox:
            record.live.hear(self._free_at, message, *content)
        self._outbox.clear()

    # ---- what it hears -------------------------------------------------------------------------------------

    def submit(self) -> None:
        """Let a client submit the next phase: it is received and read after the cost of submission."""
        self.submissions.append(self.clock.now)
        phase = len(self.submissions)
        tasks = self._stops[phase] - self._stops[phase - 1]
        seconds = self._cluster.per_call + self._cluster.per_submitted * tasks
        self.clock.at(self.clock.now + seconds, self.receive, self._submitted)

    def _submitted(self) -> None:
        """Accept the submitted tasks and place those that are ready."""
        first, self.known = self.known, self._stops[len(self.submissions)]
        self._place(job for job in self.jobs[first : self.known] if not job.missing)

    def _phase_done(self) -> None:
        """Release the results of the phase before, and let the client continue."""
        phase = len(self.submissions)
        if phase > 1:
            for job in self.jobs[self._stops[phase - 2] : self._stops[phase - 1]]:
                job.is_requested = False
                if not job.needed and job.state == "memory":
                    self._release(job)
        if self.known < len(self.jobs):
            self.submit()

    def finished(self, address: Address, held: WorkerTask) -> None:
        """Process a worker's message that a task is done."""
        self.think(self._cluster.per_result)
        job, record = held.job, self.records.get(address)
        if record is None or job.on != address or job.state != "processing":
            # The task was taken back meanwhile.
            return
        self.decider.finished(job, record, held)
        self._unassign(job, record)
        job.state = "memory"
        job.holders[address] = None
        self.remaining -= 1
        self.first_done.setdefault(job.number, held)
        if job.is_requested:
            self._report()
        for dependency in job.inputs:
            dependency.needed -= 1
            if not dependency.needed and not dependency.is_requested:
                self._release(dependency)
        ready = []
        for after in job.after:
            if after.state == "waiting":
                after.missing -= 1
                if not after.missing and after.number < self.known:
                    ready.append(after)
        self._place(ready)
        is_read = self.known == self._stops[len(self.submissions)]
        if is_read and self.remaining == len(self.jobs) - self.known:
            self._phase_done()

    def _report(self) -> None:
        """Send the client a result's message."""
        if self.world.cores.are_counted:
            self.receive(self.think, self._cluster.per_report)

    def batched(self) -> None:
        """Process the reading or writing of one batch of messages."""
        self.world.add("batches")
        self.think(self._cluster.per_batch)

    def noticed(self) -> None:
        """Process the message that a worker has fetched or dropped a replica."""
        self.think(self._cluster.per_notice)

    def joined(self, live: LiveWorker) -> None:
        """Process the connection of a new worker."""
        self._joined_count += 1
        record = WorkerRecord(live, self._joined_count, self._cluster.slots(live.spec.nthreads))
        self.records[live.address] = record
        self.threads += record.nthreads
        self.decider.joined(record)
        self._offer(record)
        self.retry()

    def paused(self, address: Address, paused: bool) -> None:
        """Process the message that a worker was paused, or resumed."""
        record = self.records.get(address)
        if record is not None:
            record.accepts = not paused
            self.decider.changed(record)
            self._offer(record)
            self.retry()

    def died(self, address: Address) -> None:
        """Process the loss of a worker: its tasks, and results without another holder, are computed again."""
        if self.left(address):
            for live in self.world.workers.values():
                live.fetch_elsewhere()

    def left(self, address: Address) -> bool:
        """Remove a worker; return whether it was known.  It still serves workers that fetch from it."""
        record = self.records.pop(address, None)
        if record is None:
            return False
        self.threads -= record.nthreads
        record.accepts = False
        again = list(record.processing.values())
        for job in again:
            self._take_back(job, record, tell=False)
        self.decider.left(record)
        lost = []
        for number in sorted(record.live.has):
            job = self.jobs[number]
            if job.holders.pop(address, self) is None and not job.holders and job.state == "memory":
                lost.append(job)
        self._compute_again(lost, again)
        return True

    def leaving(self, address: Address) -> None:
        """Assign a worker no further tasks, and ask back all that it has not started."""
        record = self.records.get(address)
        if record is None:
            return
        record.accepts = False
        self.decider.changed(record)
        for job in record.processing.values():
            self.send(record, record.live.asked, job, _RETURN_REQUEST)

    def answered(self, address: Address, job: VirtualTask, request: int, state: str) -> None:
        """Process a worker's answer to a request for a task."""
        if request != _RETURN_REQUEST:
            self.decider.replied(address, job, request, state)
        elif state == "ready" and job.on == address:
            self.place_again(job, self.records[address])

    # ---- placing -------------------------------------------------------------------------------------------

    def place_again(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Place a task anew that its worker has already given up."""
        self._take_back(job, record, tell=False)
        self._place([job])

    @property
    def has_unplaced(self) -> bool:
        """Whether a task waits because no worker may have it."""
        return bool(self._unplaced)

    @property
    def queued(self) -> int:
        """The number of root-ish tasks in the queue."""
        return len(self._queue)

    def give(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Assign a task to a worker."""
        job.state, job.on = "processing", record.address
        record.processing[job.number] = job
        for dependency in job.inputs:
            record.needs[dependency.number] = record.needs.get(dependency.number, 0) + 1
        self._offer(record)
        self.think(self._cluster.per_send)
        self.send(record, record.live.compute, job)

    def move(self, job: VirtualTask, victim: WorkerRecord, thief: WorkerRecord) -> None:
        """Assign the thief a task that its victim gave up."""
        self._unassign(job, victim)
        self.give(job, thief)

    def _place(self, ready: Iterable[VirtualTask]) -> None:
        # No worker with a free slot accepts the queued tasks.
        declined = False
        for job in sorted(ready, key=lambda job: job.priority):
            if self._roots.has(job, self.threads):
                declined = self._queue_up(job, declined)
            else:
                self._place_one(job)
        self._fill()

    def _queue_up(self, job: VirtualTask, declined: bool) -> bool:
        """Assign a root-ish task to a free slot, ahead of queued ones, as Dask does; else queue it."""
        job.state = "queued"
        if not declined:
            heappush(self._queue, (-inf, job.number))
            declined = self._fill(job)
            if job.state == "queued":
                heappop(self._queue)
        if job.state == "queued":
            heappush(self._queue, (job.priority, job.number))
        return declined

    def _place_one(self, job: VirtualTask) -> None:
        address = next(iter(self.records), None) if job.pinned else self.decider.where(job)
        if address is None:
            job.state = "unplaced"
            self._unplaced.append(job)
            return
        record = self.records[address]
        self.give(job, record)
        self.decider.assigned(job, record)

    def _fill(self, last: VirtualTask | None = None) -> bool:
        """Assign queued tasks to the least busy workers with a free slot, until one task was assigned.

        Return whether a worker with a free slot declined.
        """
        passed, given = [], {}
        while self._queue and self._open and (last is None or last.state == "queued"):
            item = self._open[0]
            record = item[3]
            if item[2] != record.version or record.address not in self.records:
                heappop(self._open)
                continue
            job = self.jobs[self._queue[0][1]]
            if job.state != "queued":
                heappop(self._queue)
            elif self.decider.suits(job, record):
                heappop(self._queue)
                self._assign(job, record)
                given[record.address] = record
            else:
                passed.append(heappop(self._open))
        for item in passed:
            heappush(self._open, item)
        if last is None:
            for record in given.values():
                self._send_ahead(record)
        return bool(passed)

    def _assign(self, job: VirtualTask, record: WorkerRecord) -> None:
        self.give(job, record)
        self.decider.assigned(job, record)

    def _send_ahead(self, record: WorkerRecord) -> None:
        """Send a worker that was given a queued task as many more of the same prefix as the decider says."""
        first = self._next_queued()
        for _ in range(0 if first is None else self.decider.ahead(first, record)):
            job = self._next_queued()
            if first is None or job is None or job.spec.prefix != first.spec.prefix:
                return
            heappop(self._queue)
            self._assign(job, record)

    def _next_queued(self) -> VirtualTask | None:
        """Return the first task of the queue, without those that have left it."""
        while self._queue and self.jobs[self._queue[0][1]].state != "queued":
            heappop(self._queue)
        return self.jobs[self._queue[0][1]] if self._queue else None

    def retry(self) -> None:
        """Try again to place tasks without a worker."""
        waiting, self._unplaced = self._unplaced, []
        self._place(job for job in waiting if job.state == "unplaced")

    def _offer(self, record: WorkerRecord) -> None:
        """Update how busy a worker is, for the queue."""
        record.version += 1
        if record.accepts and len(record.processing) < record.slots:
            busy = self.decider.busy(record)
            heappush(self._open, (busy, record.number, record.version, record))

    def _unassign(self, job: VirtualTask, record: WorkerRecord) -> None:
        del record.processing[job.number]
        for dependency in job.inputs:
            left = record.needs[dependency.number] = record.needs[dependency.number] - 1
            if not left:
                del record.needs[dependency.number]
        job.on = ""
        self._offer(record)

    # ---- losing --------------------------------------------------------------------------------------------

    def _release(self, job: VirtualTask) -> None:
        self.decider.released(job)
        for address in job.holders:
            live = self.world.workers[address]
            live.has.discard(job.number)
            if self.world.cores.are_counted and address in self.records:
                self.send(self.records[address], live.notice)
        job.holders.clear()
        job.state = "released"

    def _take_back(self, job: VirtualTask, record: WorkerRecord, *, tell: bool) -> None:
        self.decider.dropped(job, record)
        self._unassign(job, record)
        job.state = "waiting"
        if tell:
            self.send(record, record.live.give_up, job)

    def _compute_again(self, lost: list[VirtualTask], again: list[VirtualTask]) -> None:
        """Set lost results and the tasks that need them back to waiting, and place those that are ready."""
        touched = dict.fromkeys(again)
        stack = [job for job in lost if job.needed or job.is_requested]
        for job in lost:
            job.state = "released"
        while stack:
            job = stack.pop()
            if job.state != "released":
                continue
            job.state = "waiting"
            self.remaining += 1
            touched[job] = None
            for dependency in job.inputs:
                dependency.needed += 1
                if dependency.state == "released":
                    stack.append(dependency)
        for job in lost:
            for after in job.after:
                if after.state == "processing":
                    self._take_back(after, self.records[after.on], tell=True)
                if after.state in ("waiting", "queued", "unplaced"):
                    after.state = "waiting"
                    touched[after] = None
        for job in touched:
            job.missing = sum(dependency.state != "memory" for dependency in job.inputs)
        ready = (job for job in touched if job.state == "waiting" and not job.missing)
        self._place(job for job in ready if job.number < self.known)
