"""Stock Dask's placement and stealing as the simulator has them, beside Dask's own on the same events.

A real `Scheduler`, without a network, and a virtual one get the same events: a drawn graph, which tasks are done, after
how many seconds, which inputs arrived where, when to balance, what victims answer.  After each event the same tasks
stand on the same workers, and the same moves were asked for.  Where Dask walks a set, whose order means nothing, the
real one is given sets that are walked in the baseline's order.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from operator import attrgetter
from typing import Any

from dask._task_spec import Task
from distributed import Scheduler, Status
from distributed.collections import HeapSet
from distributed.scheduler import ClientState, SchedulerState, WorkerState
from distributed.stealing import WorkStealing
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.stock_stealing import StockStealing
from sortedcontainers import SortedDict

from dask_ferro.simulate.clock import Clock
from dask_ferro.simulate.cluster import VirtualCluster, VirtualWorker
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from dask_ferro.simulate.virtual_scheduler import Scheduler as VirtualScheduler
from dask_ferro.simulate.virtual_tasks import VirtualTask, jobs_of, prioritize
from dask_ferro.simulate.virtual_worker import LiveWorker, WorkerTask, World

MB = 1_000_000
# Ticks of the clock that dask's own uses for stimuli: each is another.
STIMULI = count()


class _Tasks(set):
    """Tasks that are walked in the order that the baseline walks them in."""

    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__(), key=lambda ts: (number_of(ts.key) * 0x9E3779B1) & 0xFFFFFFFF))


class _Workers(set):
    """Workers that are walked in the order in which they joined."""

    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__(), key=lambda ws: ws.pid))


class _Comm:
    """Keeps what the scheduler sends a worker."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, *messages: dict[str, Any]) -> None:
        self.sent += messages


def number_of(key: Any) -> int:
    """The place of a task in its graph; keys end with it."""
    return int(key[-1])


class Real:
    """Dask's scheduler and stealing, fed with events."""

    def __init__(self, graph: TaskGraph, threads: list[int]) -> None:
        self.scheduler = s = Scheduler.__new__(Scheduler)  # as state alone: no server, no directory
        empty: Any = {}
        SchedulerState.__init__(
            s, {}, {}, SortedDict(), empty, {}, {}, {}, HeapSet(key=attrgetter("priority")), validate=False
        )
        s.stream_comms, s.client_comms, s.stream_handlers = {}, {}, {}
        s.idle_task_count = _Workers()
        s.digests = None  # type: ignore[assignment]
        s.log_event = lambda *event: None  # type: ignore[assignment, method-assign]
        self.stealing = WorkStealing(self.scheduler)
        for number, nthreads in enumerate(threads):
            self._join(number, nthreads)
        self._submit(graph)

    def _join(self, number: int, nthreads: int) -> None:
        s, address = self.scheduler, f"tcp://127.0.0.1:{1000 + number}"
        ws = WorkerState(
            address=address, status=Status.running, pid=number, name=number, nthreads=nthreads, memory_limit=2**30,
            local_directory="", nanny="", server_id=number, scheduler=s,  # type: ignore[arg-type] # sets go by its hash
        )  # fmt: skip
        s.workers[address] = ws
        s.running.add(ws)
        s.total_nthreads += nthreads
        s.stream_comms[address] = _Comm()  # type: ignore[assignment]
        s.check_idle_saturated(ws)
        self.stealing.add_worker(worker=address)
        self.stealing.stealable[address] = tuple(_Tasks() for _ in self.stealing.stealable[address])

    def _submit(self, graph: TaskGraph) -> None:
        s = self.scheduler
        s.clients["client"] = client = ClientState("client")
        for number, spec in enumerate(graph.tasks):
            ts = s.new_task(spec.key, Task(spec.key, len, ()), "released")
            ts.priority = (0, 1, number)
            for key in spec.dependencies:
                ts.add_dependency(s.tasks[key])
        for spec in graph.tasks:
            ts = s.tasks[spec.key]
            if not ts.dependents:
                ts.who_wants = {client}
                client.wants_what.add(ts)
        ready = [s.tasks[spec.key] for spec in graph.tasks]
        s.transitions({ts.key: "waiting" for ts in reversed(ready)}, _stimulus())

    def finish(self, number: int, key: Any, seconds: float, nbytes: int) -> None:
        """A worker says that it computed a task."""
        ts, address = self.scheduler.tasks[key], f"tcp://127.0.0.1:{1000 + number}"
        spans = [{"action": "compute", "start": 100.0, "stop": 100.0 + seconds, "source": ""}]
        self.scheduler.handle_task_finished(
            key=key, worker=address, stimulus_id=_stimulus(), run_id=ts.run_id, nbytes=nbytes, startstops=spans,
            metadata={}, thread=1, type=b"", typename="int",
        )  # fmt: skip

    def arrive(self, number: int, key: Any) -> None:
        """A worker says that it fetched a result."""
        self.scheduler.add_keys(worker=f"tcp://127.0.0.1:{1000 + number}", keys=[key])

    def balance(self) -> None:
        """The second is over."""
        self.stealing.balance()

    def answer(self, key: Any, state: str) -> None:
        """A victim answers."""
        info = self.stealing.in_flight[self.scheduler.tasks[key]]
        word = {"ready": "ready", "running": "executing"}[state]
        self.stealing.move_task_confirm(key=key, state=word, stimulus_id=info["stimulus_id"])

    @property
    def where(self) -> dict[Any, int]:
        """The tasks that stand on workers."""
        return {ts.key: ws.pid for ws in self.scheduler.workers.values() for ts in ws.processing}

    @property
    def queued(self) -> set[Any]:
        """The tasks that wait at the scheduler."""
        return {ts.key for ts in self.scheduler.queued}

    @property
    def idle(self) -> set[int]:
        """The workers that may take tasks of others."""
        return {ws.pid for ws in self.scheduler.idle.values()}

    @property
    def moves(self) -> dict[Any, tuple[int, int]]:
        """The tasks that were asked for: victim and thief."""
        return {ts.key: (i["victim"].pid, i["thief"].pid) for ts, i in self.stealing.in_flight.items()}


class Virtual:
    """The simulator's scheduler under the baseline, fed with events; its clock stands still."""

    def __init__(self, graph: TaskGraph, threads: list[int]) -> None:
        workers = tuple(VirtualWorker(f"w{i}", n, f"host-{i}") for i, n in enumerate(threads))
        self.jobs = jobs_of(graph)
        prioritize(self.jobs, {spec.key: i for i, spec in enumerate(graph.tasks)}, sum(threads), None)
        self.world = World(VirtualCluster(workers), Clock(), 0)
        self.scheduler = VirtualScheduler(self.world, self.jobs, graph.stops)
        self.decider = self.scheduler.decider = StockStealing(self.scheduler, 0)
        for worker in workers:
            live = self.world.workers[worker.address] = LiveWorker(worker, self.world, 0.0, 0.0)
            self._do(self.scheduler.joined, live)
        self.scheduler.submissions.append(0.0)
        self._do(self.scheduler._submitted)
        self.by_key = {job.spec.key: job for job in self.jobs}

    def _do(self, act: Any, *args: Any) -> None:
        self.scheduler._do(act, *args)

    def finish(self, number: int, key: Any, seconds: float, nbytes: int) -> None:
        held = WorkerTask(self.by_key[key], 0)
        held.stop = seconds
        self.world.workers[f"w{number}"].has.add(held.job.number)
        self._do(self.scheduler.finished, f"w{number}", held)

    def arrive(self, number: int, key: Any) -> None:
        job = self.by_key[key]
        job.holders[f"w{number}"] = None
        self.decider.arrived(f"w{number}", job, "host", 1.0)

    def balance(self) -> None:
        self._do(self.decider._balance)

    def answer(self, key: Any, state: str) -> None:
        job = self.by_key[key]
        request = self.decider._in_flight[job.number]
        self._do(self.decider.replied, request.victim, job, request.number, state)

    @property
    def where(self) -> dict[Any, int]:
        return {job.spec.key: int(job.on[1:]) for job in self.jobs if job.state == "processing"}

    @property
    def queued(self) -> set[Any]:
        return {job.spec.key for job in self.jobs if job.state == "queued"}

    @property
    def idle(self) -> set[int]:
        return {int(address[1:]) for address in self.decider._idle}

    @property
    def moves(self) -> dict[Any, tuple[int, int]]:
        flying = self.decider._in_flight.items()
        return {self.jobs[n].spec.key: (int(r.victim[1:]), int(r.thief[1:])) for n, r in flying}

    def fetches(self, key: Any) -> list[VirtualTask]:
        """The inputs that a task's worker does not have."""
        job = self.by_key[key]
        return [dependency for dependency in job.inputs if job.on not in dependency.holders]


def _stimulus() -> str:
    return f"test-{next(STIMULI)}"


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Layers of tasks, some of which look like roots and some of which hoard; keys end with their place."""
    tasks: list[TaskSpec] = []
    before: list[Any] = []
    for layer in range(draw(st.integers(1, 4))):
        width = draw(st.integers(1, 14))
        prefix = draw(st.sampled_from(["load", "work", "join"]))
        now = []
        for _ in range(width):
            most = min(len(before), 3)
            read = draw(st.lists(st.sampled_from(before), max_size=most, unique=True)) if before else []
            key = (f"{prefix}-{layer:032x}", len(tasks))
            nbytes = draw(st.sampled_from([8, 1000, MB, 50 * MB]))
            tasks.append(TaskSpec(key, prefix, key[0], 1.0, nbytes, tuple(read)))
            now.append(key)
        before = now
    return TaskGraph("drawn", tuple(tasks))


def same(real: Real, virtual: Virtual) -> None:
    """Hold what the two decided against each other."""
    assert virtual.where == real.where
    assert virtual.queued == real.queued
    assert virtual.moves == real.moves
    assert virtual.idle == real.idle


def step(real: Real, virtual: Virtual, data: st.DataObject) -> None:
    """Tell both of one event more, and hold them against each other."""
    told = data.draw(st.sampled_from(["finish", "finish", "arrive", "balance"]))
    key = data.draw(st.sampled_from(sorted(virtual.where)))
    if told == "balance":
        real.balance(), virtual.balance()
    elif key in virtual.moves:
        state = data.draw(st.sampled_from(["ready", "ready", "running"]))
        real.answer(key, state), virtual.answer(key, state)
    elif told == "arrive" and (missing := virtual.fetches(key)):
        to, job = virtual.where[key], data.draw(st.sampled_from(missing))
        real.arrive(to, job.spec.key), virtual.arrive(to, job.spec.key)
    else:
        seconds = data.draw(st.sampled_from([0.001, 0.05, 1.0, 7.0]))
        at, nbytes = virtual.where[key], virtual.by_key[key].spec.nbytes
        real.finish(at, key, seconds, nbytes), virtual.finish(at, key, seconds, nbytes)
    same(real, virtual)


async def _in_step(graph: TaskGraph, threads: list[int], data: st.DataObject) -> None:
    """Tell both the same until all is done."""
    real, virtual = Real(graph, threads), Virtual(graph, threads)
    same(real, virtual)
    while virtual.where:
        step(real, virtual, data)
    assert not real.where
    assert not real.queued


@settings(deadline=None, max_examples=100)
@given(graph=graphs(), threads=st.lists(st.integers(1, 3), min_size=1, max_size=6), data=st.data())
def test_the_baseline_decides_as_dask_does(graph, threads, data):
    logging.getLogger("distributed").setLevel(logging.ERROR)
    asyncio.run(_in_step(graph, threads, data))


async def _hoard() -> dict[Any, tuple[int, int]]:
    """Tasks of a second that all read what one of three workers made: two steps of stealing."""
    keys = [("root-0", 0), *((f"read-{i % 2}", i) for i in range(1, 12))]
    tasks = [TaskSpec(key, key[0][:4], key[0], 1.0, 1000, tuple(keys[:1][: number_of(key)])) for key in keys]
    graph = TaskGraph("hoard", tuple(tasks))
    real, virtual = Real(graph, [1, 1, 1]), Virtual(graph, [1, 1, 1])
    at = virtual.where[keys[0]]
    real.finish(at, keys[0], 0.1, 1000), virtual.finish(at, keys[0], 0.1, 1000)
    same(real, virtual)
    assert set(virtual.where.values()) == {at}
    real.balance(), virtual.balance()
    same(real, virtual)
    return virtual.moves


def test_what_one_worker_hoards_both_ask_for():
    moves = asyncio.run(_hoard())
    assert len(moves) > 2
    assert {victim for victim, _ in moves.values()} != {thief for _, thief in moves.values()}


async def _ends_in_turn() -> None:
    """The end of one task gives another worker a long one; who ended it is judged by what was there before that."""
    reads = {n: [0] for n in (4, *range(7, 16))} | {16: [1], 18: [4], 22: [17, 18], 23: [17, 18]}
    layers = [("join", 4), ("load", 13), ("join", 2), ("load", 5)]
    keys = [
        (f"{prefix}-{layer:032x}", 0) for layer, (prefix, width) in enumerate(layers) for _ in range(width)
    ]
    keys = [(group, n) for n, (group, _) in enumerate(keys)]
    tasks = [
        TaskSpec(key, key[0][:4], key[0], 1.0, 8, tuple(keys[i] for i in reads.get(number_of(key), ())))
        for key in keys
    ]
    graph = TaskGraph("layers", tuple(tasks))
    real, virtual = Real(graph, [3, 1]), Virtual(graph, [3, 1])
    for number, seconds in ((17, 0.001), (5, 0.001), (6, 1.0), (20, 1.0), (1, 7.0)):
        at = virtual.where[keys[number]]
        for side in (real, virtual):
            side.finish(at, keys[number], seconds, 8)
        same(real, virtual)
    real.balance(), virtual.balance()
    same(real, virtual)


def test_who_ends_a_task_is_judged_before_what_follows_from_its_end():
    asyncio.run(_ends_in_turn())
