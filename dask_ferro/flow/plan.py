"""The plan of a flow: which member computes each task, in which order, and how long it is projected to take.

Tasks are assigned in the order of their upward rank, each to the member where it is projected to end first (HEFT;
Topcuoglu, Hariri, Wu, 2002), of those that have an input of it and the one that is free first.  Tasks without inputs
are all ready at once, and say nothing of where their readers' other inputs are: neighbours in the graph's order go to
one member, or each to the member that is free first, whichever is projected to end earlier.  Durations are seconds,
sizes bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dask_ferro.graph.bundling.partition import Quotient


@dataclass(frozen=True)
class FlowCosts:
    """What an inner task costs besides its own seconds.

    Parameters
    ----------
    task_s : float
        CPU of one task.
    message_s : float
        CPU of a value that is sent to another worker, at each end.
    hop_s : float
        From the end of a task to its value in another worker.
    bytes_per_s : float
        Between two workers.
    """

    task_s: float = 30e-6
    message_s: float = 40e-6
    hop_s: float = 60e-6
    bytes_per_s: float = 1e9


# How often what a message takes is counted where a task is assigned: that it is sent for one task is seen at once, that
# its readers follow it there is not.  Of large graphs one is tried.
_AVERSIONS, _SMALL = (1.0, 8.0, 64.0), 10_000


class FlowPlan(NamedTuple):
    """Projected seconds, the member of each task, and the order in which ready tasks run (the least first)."""

    seconds: float
    members: Sequence[int]
    order: Sequence[float]


def planned(q: Quotient, members: int, costs: FlowCosts) -> FlowPlan:
    """Return the plan of a graph of tasks for a number of members."""
    graph = _Graph.of(q)
    free, blocks = [-1] * len(q), _blocks(graph, members)
    found = [
        _assigned(graph, list(owners), members, costs, aversion)
        for owners in (free, blocks)
        for aversion in (_AVERSIONS if len(q) <= _SMALL else _AVERSIONS[1:2])
    ]
    seconds, owners = min(found, key=lambda one: one[0])
    return FlowPlan(seconds, owners, [-way for way in _ways(graph, costs, owners)])


class _Graph(NamedTuple):
    """The tasks' seconds; each task's inputs and readers, with bytes."""

    seconds: list[float]
    inputs: list[list[tuple[int, float]]]
    readers: list[list[tuple[int, float]]]

    @classmethod
    def of(cls, q: Quotient) -> _Graph:
        # Lists, since a numpy array makes a new object for each element that is read.
        into = list(zip(q.src[q.into].tolist(), q.size[q.into].tolist(), strict=True))
        out = list(zip(q.dst.tolist(), q.size.tolist(), strict=True))
        inputs = [into[a:b] for a, b in pairwise(q.pred_at.tolist())]
        readers = [out[a:b] for a, b in pairwise(q.succ_at.tolist())]
        return cls(q.seconds.tolist(), inputs, readers)


def _ways(graph: _Graph, costs: FlowCosts, owners: Sequence[int] | None = None) -> list[float]:
    """Return the seconds from the start of each task to the end of the graph; with owners, what is sent costs."""
    ways = [seconds + costs.task_s for seconds in graph.seconds]
    for u in range(len(ways) - 1, -1, -1):
        tail = 0.0
        for v, size in graph.readers[u]:
            way = ways[v]
            if owners is not None and owners[u] != owners[v]:
                way += costs.hop_s + costs.message_s + size / costs.bytes_per_s
            tail = max(tail, way)
        ways[u] += tail
    return ways


def _blocks(graph: _Graph, members: int) -> list[int]:
    """Return the members of tasks without inputs, neighbours together; -1 for the others."""
    sources = [v for v, inputs in enumerate(graph.inputs) if not inputs]
    spent = np.asarray([graph.seconds[v] for v in sources]) + 1e-9
    middle = np.cumsum(spent) - spent / 2
    owners = [-1] * len(graph.seconds)
    for v, member in zip(sources, (middle / spent.sum() * members).astype(int).tolist(), strict=True):
        owners[v] = member
    return owners


def _assigned(
    graph: _Graph, owners: list[int], members: int, costs: FlowCosts, aversion: float
) -> tuple[float, Sequence[int]]:
    """Return the projected seconds, and the members of all tasks where those of some are given."""
    ways = _ways(graph, costs)
    free = [0.0] * members
    ends = [0.0] * len(owners)
    sent: set[tuple[int, int]] = set()
    for v in sorted(range(len(owners)), key=lambda v: (-ways[v], v)):
        inputs = graph.inputs[v]
        if owners[v] >= 0:
            among = {owners[v]}
        else:
            among = {owners[u] for u, _ in inputs}
            among.add(min(range(members), key=free.__getitem__))
        best, least, end = -1, 0.0, 0.0
        for member in among:
            ready, coming = 0.0, 0
            for u, size in inputs:
                at = ends[u]
                if owners[u] != member:
                    at += costs.hop_s + size / costs.bytes_per_s
                    coming += (u, member) not in sent
                ready = max(ready, at)
            at = max(free[member] + coming * costs.message_s, ready) + graph.seconds[v] + costs.task_s
            seen = at + (aversion - 1) * coming * (costs.message_s + costs.hop_s)
            if best < 0 or (seen, member) < (least, best):
                best, least, end = member, seen, at
        for u, _ in inputs:
            if owners[u] != best and (u, best) not in sent:
                sent.add((u, best))
                free[owners[u]] += costs.message_s
        owners[v], ends[v] = best, end
        free[best] = end
    return max(max(ends, default=0.0), max(free)), owners
