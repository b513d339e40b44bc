"""The plan that HEFT makes of a task graph on a virtual cluster: what a scheduler that knows everything would do.

Heterogeneous Earliest Finish Time (Topcuoglu, Hariri and Wu, IEEE TPDS 13(3), 2002): tasks by upward rank, each into
the earliest gap of the worker on which it finishes first, transfers included.  It knows every duration in advance, and
messages, thinking and queueing on links cost it nothing; so its makespan is a mark to measure by, not one to reach.
Durations are seconds, sizes bytes.
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
    """When a task runs, on which thread of which worker."""

    start: float
    stop: float
    worker: Address
    lane: int
    key: Key


class HeftSchedule(NamedTuple):
    """A slot for every task; `makespan` is when the last one is done."""

    makespan: float
    slots: Mapping[Key, Slot]


def heft(graph: TaskGraph, cluster: VirtualCluster) -> HeftSchedule:
    """Return HEFT's plan for the workers that are there at the start.

    A task takes its seconds over the worker's speed; a transfer what the link between the two workers costs in truth.
    """
    workers = {worker.address: worker for worker in cluster.at_start}
    # As in the paper: ranks by the mean over the workers, slots by each one's own speed.
    mean = fmean(1.0 / worker.speed for worker in workers.values())
    seconds: dict[Key, float] = {task.key: task.seconds * mean for task in graph.tasks}
    ranks = upward_ranks(graph.dependents, seconds)
    # Equal ranks by position: the plan is the same in every run.
    place = {task.key: number for number, task in enumerate(graph.tasks)}
    lanes: dict[tuple[Address, int], list[tuple[float, float]]] = {}
    for worker in workers.values():
        lanes.update(((worker.address, lane), []) for lane in range(worker.nthreads))
    slots: dict[Key, Slot] = {}
    for key in sorted(ranks, key=lambda key: (-ranks[key], place[key])):
        task = graph.by_key[key]
        slots[key] = min(_slots(task, graph, cluster, workers, lanes, slots), key=lambda slot: slot[1:4])
        slot = slots[key]
        # Sorted, that `_gap` finds what lies between tasks that were placed before.
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
    """The earliest slot on each thread."""
    ready: dict[Address, float] = {}
    for (address, lane), taken in lanes.items():
        worker = workers[address]
        # All threads of a worker have an input at once: it is reckoned for one of them.
        if address not in ready:
            inputs = ((done[key], graph.by_key[key].nbytes) for key in task.dependencies)
            arrivals = (slot.stop + _moving(workers[slot.worker], worker, n, cluster) for slot, n in inputs)
            ready[address] = max(arrivals, default=0.0)
        seconds = task.seconds / worker.speed
        start = _gap(taken, ready[address], seconds)
        yield Slot(start, start + seconds, address, lane, task.key)


def _gap(taken: Iterable[tuple[float, float]], ready: float, seconds: float) -> float:
    """The start of the first gap that is long enough; those before `ready` are none."""
    start = ready
    for begins, ends in taken:
        if start + seconds <= begins:
            return start
        start = max(start, ends)
    return start


def _moving(source: VirtualWorker, to: VirtualWorker, nbytes: int, cluster: VirtualCluster) -> float:
    if source.address == to.address:
        return 0.0
    return cluster.link(source, to)[1].latency + cluster.moving(source, to, nbytes)
