"""The tasks of one simulation: the scheduler's state of each, and their priorities.

Tasks are numbered in their graph's order; such numbers are cheaper to hash than Dask's keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from dask_ferro.policy.estimates import GUESS
from dask_ferro.policy.facts import Address
from dask_ferro.policy.ranking import is_narrow, order_by_rank, upward_ranks
from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph, TaskSpec

# Dask's criterion for root-ish groups: more than this many tasks per thread, and fewer dependencies than that.
_ROOTISH_PER_THREAD = 2
_ROOTISH_FEWER = 5
# The plugin keeps Dask's order for larger graphs: ranking them would block the scheduler's loop for over 0.1 s.
_MAX_RANKED = 20_000


@dataclass(slots=True, eq=False, repr=False)
class VirtualTask:
    """A task in the scheduler.  States: waiting, ready, queued, processing, memory, released, unplaced."""

    number: int
    spec: TaskSpec
    priority: int = 0
    inputs: tuple[VirtualTask, ...] = ()
    after: list[VirtualTask] = field(default_factory=list)
    state: str = "waiting"
    missing: int = 0  # inputs that are not in memory
    needed: int = 0  # dependents that are not done
    is_requested: bool = False  # a client asked for its result
    pinned: bool = False
    on: Address = ""
    holders: dict[Address, None] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether the result is in memory, or no longer needed."""
        return self.state == "memory" or self.state == "released"


def jobs_of(graph: TaskGraph) -> list[VirtualTask]:
    """Return the graph's tasks, linked to their inputs and dependents.

    Raises
    ------
    ValueError
        For a duplicate key, a task listed before one of its dependencies, or phases that do not add up to all tasks.
    """
    if graph.stops[-1] != len(graph.tasks):
        raise ValueError(
            f"task graph {graph.name!r}: phases of {graph.stops[-1]} tasks, it has {len(graph.tasks)}"
        )
    known: dict[Key, VirtualTask] = {}
    for number, spec in enumerate(graph.tasks):
        if spec.key in known:
            raise ValueError(f"task graph {graph.name!r}: key {spec.key!r} occurs twice")
        job = VirtualTask(number, spec)
        try:
            job.inputs = tuple(known[key] for key in dict.fromkeys(spec.dependencies))
        except KeyError as missing:
            raise ValueError(
                f"task graph {graph.name!r}: {spec.key!r} is listed before its dependency {missing}"
            ) from None
        for dependency in job.inputs:
            dependency.after.append(job)
            dependency.needed += 1
        job.missing = len(job.inputs)
        job.pinned = graph.pinned == "one" and not job.inputs
        known[spec.key] = job
    jobs = list(known.values())
    first = 0
    for stop in graph.stops:
        for job in jobs[first:stop]:
            job.is_requested = not any(after.number < stop for after in job.after)
        first = stop
    return jobs


def depth_first(jobs: list[VirtualTask]) -> dict[int, int]:
    """Return each task's place in depth-first order, which finishes begun branches first.

    Like `dask.order` without its refinements: results in turn, each preceded by its inputs, and among inputs the
    one with the largest subgraph first.
    """
    depth = [0] * len(jobs)
    for job in jobs:
        depth[job.number] = 1 + max((depth[d.number] for d in job.inputs), default=0)
    place: dict[int, int] = {}
    for sink in jobs:
        stack = [sink] if sink.is_requested else []
        while stack:
            job = stack[-1]
            open_ = [d for d in job.inputs if d.number not in place]
            if open_:
                open_.sort(key=lambda d: (depth[d.number], -d.number))
                stack += open_
                continue
            stack.pop()
            place.setdefault(job.number, len(place))
    return place


def prioritize(
    jobs: list[VirtualTask],
    order: Mapping[Key, int] | None,
    threads: int,
    wide: float | None,
) -> None:
    """Set every task's priority; the lowest runs first.

    Parameters
    ----------
    order : mapping of key to int, optional
        Dask's order; default: depth first.
    wide : float or None
        Tasks per thread up to which a graph is ordered by upward rank; None: never.
    """
    places = {job.number: order[job.spec.key] for job in jobs} if order is not None else depth_first(jobs)
    if wide is not None and len(jobs) <= _MAX_RANKED:
        seconds: dict[Key, float] = {
            job.number: GUESS if job.spec.annotated is None else job.spec.annotated for job in jobs
        }
        dependents: dict[Key, list[Key]] = {job.number: [a.number for a in job.after] for job in jobs}
        ranks = upward_ranks(dependents, seconds)
        if is_narrow(dependents, ranks, seconds, threads, wide):
            places = cast(dict[int, int], order_by_rank(ranks, cast(dict[Key, float], places)))
    for job in jobs:
        job.priority = places[job.number]


class Roots:
    """The groups of tasks that Dask takes for root-ish, by its criterion."""

    def __init__(self, jobs: list[VirtualTask]) -> None:
        self._sizes: dict[str, int] = {}
        self._before: dict[str, set[str]] = {}
        for job in jobs:
            group = job.spec.group
            self._sizes[group] = self._sizes.get(group, 0) + 1
            self._before.setdefault(group, set()).update(d.spec.group for d in job.inputs)
        few = {}
        for group, before in self._before.items():
            tasks = sum(self._sizes[b] for b in before)
            few[group] = len(before) < _ROOTISH_FEWER and tasks < _ROOTISH_FEWER
        self._few = few

    def has(self, job: VirtualTask, threads: int) -> bool:
        """Whether the task is root-ish on a cluster with that many threads."""
        group = job.spec.group
        return not job.pinned and self._few[group] and self._sizes[group] > _ROOTISH_PER_THREAD * threads
