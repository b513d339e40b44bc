"""HEFT's plan of a task graph on a virtual cluster: the schedule of a scheduler with complete knowledge.

Heterogeneous Earliest Finish Time (Topcuoglu, Hariri and Wu, IEEE TPDS 13(3), 2002): tasks by upward rank, each in
the earliest gap of the worker on which it finishes first, transfers included.  Every duration is known in advance;
messages, scheduling and queueing on links cost nothing; so its makespan is a reference that a real scheduler does not
reach.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import NamedTuple

from dask_ferro.policy.facts import Address
from dask_ferro.policy.ranking import upward_ranks
from dask_ferro.simulate.cluster import VirtualCluster, VirtualWorker
from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph, TaskSpec


class Slot(NamedTuple):
    """The thread of a worker and the times at which a task runs."""

    start: float
    stop: float
    worker: Address
    lane: int
    key: Key


class HeftSchedule(NamedTuple):
    """A slot for every task; `makespan` is the end of the last one."""

    makespan: float
    slots: Mapping[Key, Slot]


def heft(graph: TaskGraph, cluster: VirtualCluster) -> HeftSchedule:
    """Return HEFT's plan for the workers that are connected at the start.

    A task takes its seconds over the worker's speed; a transfer takes the true cost of the link between the two
    workers.
    """
    workers = {worker.address: worker for worker in cluster.at_start}
    # As in the paper: ranks by means over the workers, slots by each worker's own speed.
    mean = fmean(1.0 / worker.speed for worker in workers.values())
    seconds: dict[Key, float] = {task.key: task.seconds * mean for task in graph.tasks}
    ranks = upward_ranks(graph.dependents, seconds)
    # Equal ranks are ordered by position: the plan is the same in every run.
    place = {task.key: number for number, task in enumerate(graph.tasks)}
    lanes: dict[tuple[Address, int], list[tuple[float, float]]] = {}
    for worker in workers.values():
        lanes.update(((worker.address, lane), []) for lane in range(worker.nthreads))
    slots: dict[Key, Slot] = {}
    for key in sorted(ranks, key=lambda key: (-ranks[key], place[key])):
        task = graph.by_key[key]
        slots[key] = min(_slots(task, graph, cluster, workers, lanes, slots), key=lambda slot: slot[1:4])
        slot = slots[key]
        # Sorted, so that `_gap` finds gaps between tasks placed earlier.
        insort(lanes[slot.worker, slot.lane], (slot.start, slot.stop))
    return HeftSchedule(max((slot.stop for slot in slots.values()), default=0.0), slots)


def _slots(
    task: TaskSpec,
    graph: TaskGraph,
    cluster: VirtualCluster,
    workers: Mapping[Address, VirtualWorker],
    lanes: Mapping[tuple[Address, int], list[tuple[float, float]]],
    done: Mapping[Key, Slot],
) -> Iterable[Slot]:
    """Return the earliest slot on each thread."""
    ready: dict[Address, float] = {}
    for (address, lane), taken in lanes.items():
        worker = workers[address]
        # All threads of a worker share its inputs: their arrival is computed for one of them.
        if address not in ready:
            inputs = ((done[key], graph.by_key[key].nbytes) for key in task.dependencies)
            arrivals = (slot.stop + _moving(workers[slot.worker], worker, n, cluster) for slot, n in inputs)
            ready[address] = max(arrivals, default=0.0)
        seconds = task.seconds / worker.speed
        start = _gap(taken, ready[address], seconds)
        yield Slot(start, start + seconds, address, lane, task.key)


def _gap(taken: Iterable[tuple[float, float]], ready: float, seconds: float) -> float:
    """Return the start of the first gap that is long enough, at `ready` or later."""
    start = ready
    for begins, ends in taken:
        if start + seconds <= begins:
            return start
        start = max(start, ends)
    return start


def _moving(source: VirtualWorker, to: VirtualWorker, nbytes: int, cluster: VirtualCluster) -> float:
    if source.address == to.address:
        return 0.0
    link = cluster.link(source, to)[1]
    return link.latency + nbytes / link.bandwidth
