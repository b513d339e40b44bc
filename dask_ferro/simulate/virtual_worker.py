"""A virtual worker's true state: the results it holds and fetches, and the tasks it runs.

It starts its tasks by priority once their inputs have arrived, and gives up tasks not started when asked.  Bytes pass
through two pipes in turn, out of the sender and into the receiver: concurrent transfers share the bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from dask_ferro.policy.facts import Address
from dask_ferro.simulate.clock import Clock, Cores, Line, Process
from dask_ferro.simulate.cluster import CPU_AROUND, VirtualCluster, VirtualWorker
from dask_ferro.simulate.virtual_tasks import VirtualTask
from dask_ferro.trace import Span

# The receiver, the result, the class of link, seconds: a worker's report of a transfer to the scheduler.
Sample = Callable[[Address, VirtualTask, str, float], None]


# The largest share of the cores that idle processes may take: even with hundreds of them, tasks progress.
_MOST_TAKEN = 0.9


@dataclass(slots=True, eq=False, repr=False)
class WorkerTask:
    """A task on a worker.  States: fetching, ready, running, gone."""

    job: VirtualTask
    missing: int
    state: str = "fetching"
    lane: int = -1
    start: float = 0.0
    stop: float = 0.0


@dataclass
class World:
    """The state that all parts of one simulation share."""

    cluster: VirtualCluster
    clock: Clock
    seed: int
    workers: dict[Address, LiveWorker] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    running: int = 0  # tasks on all workers
    # To the scheduler: the name of its handler, and a message.
    report: Callable[..., None] = lambda handler, *content: None
    sampled: Sample = lambda address, job, kind, seconds: None

    def __post_init__(self) -> None:
        cluster, processes = self.cluster, 1 + len(self.cluster.workers)
        taken = cluster.background * processes / cluster.cores if cluster.cores else 0.0
        self.cores = Cores(self.clock, cluster.cores, min(taken, _MOST_TAKEN), cluster.spread, self.seed)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        self.counts[name] = self.counts.get(name, 0.0) + amount


class LiveWorker:
    """A worker process of the simulation.

    Parameters
    ----------
    to_worker, to_scheduler : float
        Seconds between two batches of messages.
    """

    def __init__(self, spec: VirtualWorker, world: World, to_worker: float, to_scheduler: float) -> None:
        self.spec = spec
        self.address = spec.address
        self.alive = True
        self.paused = False
        self.process = Process(world.clock, world.cores)
        self.inbox = Line(to_worker, world.cluster.wire)
        self.outbox = Line(to_scheduler, world.cluster.wire)
        self.held: dict[int, WorkerTask] = {}
        self.has: set[int] = set()
        self.short_of = 0  # largest shortage of its device, in bytes
        self._world = world
        self._ready: list[tuple[int, int, int, WorkerTask]] = []
        # A task occurs twice after it was taken back and assigned again.
        self._turn = 0
        self._lanes = list(range(spec.nthreads))
        self._fetching: dict[int, tuple[Address, list[WorkerTask]]] = {}
        self._asked_of: dict[Address, float] = {}  # time of its last request to that worker
        self._sizes: dict[int, int] = {}  # of results that it has or had
        self._in_free = self._out_free = 0.0
        self._before, self._after = world.cluster.before, world.cluster.after
        heapify(self._lanes)

    # ---- messages ------------------------------------------------------------------------------------------

    def hear(self, now: float, act: Callable[..., None], *args: object) -> None:
        """Receive a message from the scheduler, and call `act(*args)` once it has been read."""
        world, arrives = self._world, self.inbox.arrives(now)
        if self._is_first(self.inbox, arrives, act, *args):
            world.clock.at(self.inbox.batch, world.report, "batched")
            cpu = world.cluster.per_batch_read
            world.clock.at(arrives - cpu, self.process.run, cpu, _deliver, self.inbox.messages)

    def tell(self, act: Callable[..., None], *args: object) -> None:
        """Send the scheduler a message: call `act(*args)` when it arrives."""
        world, outbox = self._world, self.outbox
        if self._is_first(outbox, outbox.arrives(world.clock.now), act, *args):
            cpu = world.cluster.per_batch_read
            # The loop writes to a stream in its next turn: after all that the received message causes.
            world.clock.at(outbox.batch, self.process.run, cpu, self._sent, outbox.messages)

    def _is_first(self, line: Line, arrives: float, act: Callable[..., None], *args: object) -> bool:
        """Add a message to its batch; return whether it is the first, for which the batch's CPU cost is charged.

        If cores are not counted, each message arrives by itself.
        """
        if not self._world.cores.are_counted:
            self._world.clock.at(arrives, act, *args)
            return False
        line.messages.append((act, args))
        return len(line.messages) == 1

    def _sent(self, messages: list[tuple[Callable[..., None], tuple[object, ...]]]) -> None:
        cluster, clock = self._world.cluster, self._world.clock
        at = clock.now + max(cluster.wire - cluster.per_batch_read, 0.0)
        clock.at(at, self._world.report, "batched")
        clock.at(at, _deliver, messages)

    # ---- messages of the scheduler -------------------------------------------------------------------------

    def compute(self, job: VirtualTask) -> None:
        """Accept a task; fetch the inputs that it lacks."""
        if not self.alive or job.number in self.held:
            return
        missing = [d for d in job.inputs if d.number not in self.has]
        held = self.held[job.number] = WorkerTask(job, len(missing))
        for dependency in missing:
            self._fetch(dependency, [held])
        if not missing:
            self._is_ready(held)

    def give_up(self, job: VirtualTask) -> None:
        """Drop a task that the scheduler took back; a running one goes on, and its result is ignored."""
        held = self.held.pop(job.number, None)
        if held is not None:
            held.state = "gone"

    def asked(self, job: VirtualTask, request: int) -> None:
        """Answer a steal request: a task not started is given up."""
        if not self.alive:
            return
        held = self.held.get(job.number)
        state = held.state if held is not None else "gone"
        if state in ("fetching", "ready"):
            self.give_up(job)
            state = "ready"
        self.tell(self._world.report, "answered", self.address, job, request, state)

    def notice(self) -> None:
        """Let the scheduler read the message that a replica was added or dropped; its state is updated already."""
        if self.alive:
            self.tell(self._world.report, "noticed")

    def runs(self) -> set[int]:
        """Return the numbers of the running tasks, as a heartbeat reports."""
        return {number for number, held in self.held.items() if held.state == "running"}

    # ---- what happens to it --------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Start no task any more, or again."""
        self.paused = paused
        self._start()

    def kill(self) -> None:
        """Lose all tasks and results."""
        self.alive = False
        for held in self.held.values():
            held.state = "gone"
        self.held.clear()
        self._fetching.clear()

    def fetch_elsewhere(self) -> None:
        """Request results from other holders that were to come from workers that are gone."""
        broken = [number for number, (source, _) in self._fetching.items() if not self._is_alive(source)]
        for number in broken:
            _, waiting = self._fetching.pop(number)
            for held in waiting:
                if held.state == "fetching":
                    self._fetch(next(d for d in held.job.inputs if d.number == number), [held])

    # ---- fetching ------------------------------------------------------------------------------------------

    def replicate(self, job: VirtualTask) -> None:
        """Fetch a result that no task here needs."""
        if self.alive and job.number not in self.has:
            self._fetch(job, [])

    def coming(self) -> Iterable[int]:
        """Return the numbers of the tasks whose results are being fetched."""
        return self._fetching

    def _fetch(self, dependency: VirtualTask, waiting: list[WorkerTask]) -> None:
        known = self._fetching.get(dependency.number)
        if known is not None and self._is_alive(known[0]):
            known[1].extend(waiting)
            return
        waiting = waiting if known is None else known[1] + waiting
        source = self._holder(dependency)
        # All holders are dead; the scheduler will be told.
        if source is None:
            self._fetching[dependency.number] = ("", waiting)
            return
        world, now = self._world, self._world.clock.now
        kind, link = world.cluster.link(source.spec, self.spec)
        seconds = dependency.spec.nbytes / link.bandwidth
        begin = max(now, self._in_free, source._out_free)
        self._in_free = source._out_free = begin + seconds
        entry = self._fetching[dependency.number] = (source.address, waiting)
        if not world.cores.are_counted:
            world.clock.at(begin + seconds + link.latency, self._fetched, dependency, entry, kind, begin)
            return
        # Results requested from one worker at one moment come in one transfer, whose CPU cost both workers share.
        shares = self._asked_of.get(source.address) == now
        self._asked_of[source.address] = now
        half = 0.0 if shares else min(world.cluster.per_fetch, link.latency) / 2
        at = begin + seconds + link.latency - 2 * half
        fetched = (self._fetched, dependency, entry, kind, begin)
        world.clock.at(at, source.process.run, half, self.process.run, half, *fetched)
        if not shares:
            world.clock.at(at, self.notice)

    def _is_alive(self, address: Address) -> bool:
        worker = self._world.workers.get(address)
        return worker is not None and worker.alive

    def _holder(self, dependency: VirtualTask) -> LiveWorker | None:
        workers = self._world.workers
        holders = [workers[a] for a in dependency.holders if workers[a].alive]
        near = [w for w in holders if w.spec.host == self.spec.host] or holders
        if not near:
            return None
        # Spread over the holders, the same in each run; Dask takes a random one.
        return near[(dependency.number * 31 + hash_of(self.address) + self._world.seed) % len(near)]

    def _fetched(
        self, dependency: VirtualTask, entry: tuple[Address, list[WorkerTask]], kind: str, begin: float
    ) -> None:
        number = dependency.number
        if self._fetching.get(number) is not entry or not self._is_alive(entry[0]):
            return
        del self._fetching[number]
        world, spec = self._world, dependency.spec
        if not dependency.holders:
            # The result was released or lost meanwhile.
            return
        now = world.clock.now
        self._keep(dependency)
        dependency.holders[self.address] = None
        world.spans.append(
            Span("transfer", spec.key, spec.prefix, self.address, 0, begin, now, spec.nbytes, entry[0])
        )
        world.add("bytes_moved", spec.nbytes)
        world.sampled(self.address, dependency, kind, now - begin)
        for held in entry[1]:
            held.missing -= 1
            if not held.missing and held.state == "fetching":
                self._is_ready(held)

    # ---- its device's memory -------------------------------------------------------------------------------

    def _keep(self, job: VirtualTask) -> None:
        self.has.add(job.number)
        self._sizes[job.number] = job.spec.nbytes
        self._measure(0)

    def _measure(self, more: int) -> None:
        """Record the device's shortage for its results and `more` bytes; spilling is not simulated."""
        if self.spec.memory is not None:
            taken = sum(self._sizes[number] for number in self.has) + more
            self.short_of = max(self.short_of, taken - self.spec.memory)

    # ---- computing -----------------------------------------------------------------------------------------

    def _is_ready(self, held: WorkerTask) -> None:
        held.state = "ready"
        self._turn += 1
        heappush(self._ready, (held.job.priority, held.job.number, self._turn, held))
        self._start()

    def _start(self) -> None:
        while self._lanes and self._ready and not self.paused and self.alive:
            held = heappop(self._ready)[3]
            if held.state != "ready":
                continue
            now = self._world.clock.now
            held.state, held.lane = "running", heappop(self._lanes)
            self._measure(held.job.spec.nbytes)
            if self._world.cores.are_counted:
                self.process.run(self._before * CPU_AROUND, self._begin, held)
            else:
                self._runs(held, now + self._before)
                self._world.clock.at(held.stop + self._after, self._stopped, held)

    def _runs(self, held: WorkerTask, start: float) -> None:
        self._world.running += 1
        held.start = start
        held.stop = start + held.job.spec.seconds / self.spec.speed

    def _begin(self, held: WorkerTask) -> None:
        """Begin a task when its process has got the CPU for it, if cores are counted."""
        clock = self._world.clock
        self._runs(held, clock.now + self._before * (1 - CPU_AROUND))
        # What does nothing does not sleep, so it cannot wake late.
        if held.job.spec.seconds and self._world.running > (self._world.cluster.cores or inf):
            held.stop += self._world.cores.lasts(self._world.cluster.late)
        cpu = self._after * CPU_AROUND
        clock.at(held.stop + self._after - cpu, self.process.run, cpu, self._stopped, held)

    def _stopped(self, held: WorkerTask) -> None:
        self._world.running -= 1
        if not self.alive:
            return
        heappush(self._lanes, held.lane)
        if held.state == "running":
            world, spec = self._world, held.job.spec
            del self.held[held.job.number]
            self._keep(held.job)
            lane = self.address, held.lane
            world.spans.append(
                Span("compute", spec.key, spec.prefix, *lane, held.start, held.stop, spec.nbytes)
            )
            self.tell(world.report, "finished", self.address, held)
        self._start()


def _deliver(messages: Iterable[tuple[Callable[..., None], tuple[object, ...]]]) -> None:
    for act, args in messages:
        act(*args)


def hash_of(text: str) -> int:
    """Return a hash of a text that is the same in every process."""
    value = 0
    for character in text:
        value = (value * 131 + ord(character)) & 0xFFFFFFFF
    return value
