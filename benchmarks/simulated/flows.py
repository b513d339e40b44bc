"""A flow on virtual workers: the plan, the state machine and the stealing of real flows, on a virtual clock.

What the plan projects and what tasks really take may differ, and workers may be slow.  All members start at once; what
the scheduler and Dask take before and after is not simulated.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, NamedTuple

from dask_ferro.flow.plan import plan_flow
from dask_ferro.flow.run import FlowRun, InnerTask, Share, StolenTask
from dask_ferro.graph.bundling.partition import Dag, FlowCosts, finest
from dask_ferro.policy.stealing.peers import GIVING_S, Thief, gift
from dask_ferro.simulate.graphs.taskgraph import TaskGraph


class FlowResult(NamedTuple):
    """The seconds of a flow, those that the plan projected, and the tasks that ran on another worker than planned."""

    seconds: float
    projected: float
    stolen: int
    ran: tuple[Hashable, ...]


@dataclass(frozen=True)
class _Call:
    dependencies: frozenset[Hashable]

    def __call__(self, values: dict[Any, Any]) -> None:
        raise NotImplementedError("tasks of the simulation have durations alone")


def simulate_flow(
    graph: TaskGraph,
    workers: int,
    *,
    believed: Callable[[float], float] = lambda seconds: seconds,
    slowness: Mapping[int, float] | None = None,
    steals: bool = True,
    costs: FlowCosts | None = None,
) -> FlowResult:
    """Return what a graph takes as one flow on workers of one thread each.

    Parameters
    ----------
    graph : TaskGraph
        With the true seconds of its tasks.
    workers : int
    believed : callable
        Returns the seconds that the plan projects for a task, from the true ones.
    slowness : mapping of int to float, optional
        By worker, how many times as long its tasks take.
    steals : bool
        Whether workers steal from each other.
    costs : FlowCosts, optional
    """
    return _Simulation(graph, workers, believed, slowness or {}, steals, costs or FlowCosts()).run()


class _Simulation:
    def __init__(
        self,
        graph: TaskGraph,
        workers: int,
        believed: Callable[[float], float],
        slowness: Mapping[int, float],
        steals: bool,
        costs: FlowCosts,
    ) -> None:
        self.costs, self.slowness, self.steals = costs, slowness, steals
        self.tasks = {task.key: task for task in graph.tasks}
        number = {task.key: i for i, task in enumerate(graph.tasks)}
        edges = [
            (number[key], i, float(self.tasks[key].nbytes))
            for i, task in enumerate(graph.tasks)
            for key in task.dependencies
        ]
        plan = plan_flow(finest(Dag([believed(t.seconds) for t in graph.tasks], edges)), workers, costs)
        self.projected = plan.seconds
        readers: dict[int, set[int]] = {}
        for u, v, _ in edges:
            if plan.members[u] != plan.members[v]:
                readers.setdefault(u, set()).add(plan.members[v])
        self.workers = [_Worker(self, i, workers) for i in range(workers)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self.ran: list[Hashable] = []
        self.stolen = 0
        for worker in self.workers:
            own = tuple(
                InnerTask(
                    task.key,
                    _Call(frozenset(task.dependencies)),
                    plan.order[i],
                    tuple(sorted(readers.get(i, ()))),
                )
                for i, task in enumerate(graph.tasks)
                if plan.members[i] == worker.number
            )
            worker.state.add(Share("flow", worker.number, workers, own, (), steals), {})

    def at(self, time: float, event: Callable[[float], None]) -> None:
        heappush(self._events, (time, next(self._numbers), event))

    def run(self) -> FlowResult:
        for worker in self.workers:
            self.at(0.0, worker.go_on)
        now = 0.0
        while self._events:
            now, _, event = heappop(self._events)
            event(now)
        if len(self.ran) < len(self.tasks):
            raise RuntimeError(f"the flow stands still with {len(self.tasks) - len(self.ran)} tasks left")
        return FlowResult(
            max(worker.ended for worker in self.workers), self.projected, self.stolen, tuple(self.ran)
        )


class _Worker:
    """A worker with one thread, which runs one task at a time."""

    def __init__(self, simulation: _Simulation, number: int, workers: int) -> None:
        self.simulation, self.costs, self.number = simulation, simulation.costs, number
        self.state = FlowRun([number])
        self.others = [i for i in range(workers) if i != number] if simulation.steals else []
        self.unfinished = set(self.others)
        self.thief = Thief(self.others, number)
        self.has_said_done = False
        # The start of the task that runs, and when an idle worker looks again.
        self.began: float | None = None
        self.wakes = inf
        self.done, self.spent, self.ended = 0, 0.0, 0.0

    def post(self, now: float, to: int, nbytes: float, event: Callable[[_Worker, float], None]) -> None:
        """Send a message."""
        worker = self.simulation.workers[to]

        def arrive(now: float) -> None:
            event(worker, now)
            worker.go_on(now)

        self.simulation.at(now + self.costs.hop_s + nbytes / self.costs.bytes_per_s, arrive)

    def go_on(self, now: float) -> None:
        """Begin a task, say that all have ended, or ask another worker, once it is time."""
        if self.began is not None:
            return
        if self.state.is_ready:
            self.thief.busy()
            self.begin(now)
            return
        if self.state.is_done and not self.has_said_done:
            self.has_said_done, self.ended = True, now
            for other in self.others:
                self.post(now, other, 0.0, lambda worker, now: worker.hear_done(self.number))
        if not self.state.is_done or self.unfinished:
            self.wait(now)

    def begin(self, now: float) -> None:
        task, self.began = self.state.take(), now
        owner = self.state.owner_of(task)
        readers = {*task.readers, *(() if owner is None else (owner,))} - {self.number}
        spec = self.simulation.tasks[task.key]
        seconds = spec.seconds * self.simulation.slowness.get(self.number, 1.0)
        seconds += self.costs.task_s + self.costs.message_s * len(readers)

        def end(now: float) -> None:
            self.began = None
            self.done, self.spent = self.done + 1, self.spent + seconds
            self.simulation.ran.append(task.key)
            self.simulation.stolen += owner is not None
            for reader in readers:
                self.post(
                    now, reader, spec.nbytes, lambda worker, now: worker.state.receive(task.key, spec.nbytes)
                )
            self.state.finish(task, spec.nbytes)
            self.ended = now
            self.go_on(now)

        self.simulation.at(now + seconds, end)

    def wait(self, now: float) -> None:
        self.thief.idle(now)
        victim = self.thief.victim(now)
        if victim is not None:
            self.post(now, victim, 0.0, lambda worker, now: worker.give(now, self.number))
        wakes = now + self.thief.seconds(now)
        if wakes < self.wakes:
            self.wakes = wakes
            self.simulation.at(wakes, self.wake)

    def wake(self, now: float) -> None:
        self.wakes = inf
        self.go_on(now)

    def give(self, now: float, thief: int) -> None:
        """Give tasks away, or none: another thread than that of tasks does."""
        spare = self.state.spare(64)
        sizes = (float(sum(self.state.inputs_of(task).values())) for task in spare)
        running = 0.0 if self.began is None else now - self.began
        mean = self.spent / self.done if self.done else running
        stolen = self.state.give(spare[: gift(sizes, self.state.ready, mean, running, 1)], self.number)
        nbytes = sum(sum(one.inputs.values()) for one in stolen)
        self.post(
            now + GIVING_S * len(stolen),
            thief,
            nbytes,
            lambda worker, now: worker.accept(now, self.number, stolen),
        )

    def accept(self, now: float, victim: int, stolen: list[StolenTask]) -> None:
        self.thief.answered(victim, len(stolen), now)
        for one in stolen:
            self.state.accept(one)

    def hear_done(self, other: int) -> None:
        self.unfinished.discard(other)
        self.thief.ended(other)
