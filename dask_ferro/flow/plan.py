"""Plan a flow: which member computes each task, in which order, and how long it is projected to take.

Tasks are assigned in the order of their upward rank, each to the member that is projected to end it first (HEFT:
Topcuoglu, Hariri, Wu, 2002).  Candidates are the members that have an input of it and the member that is free first.
Tasks without inputs are all ready at the start, and nothing is known about the places of their readers' other inputs:
neighbours in the graph's order get one member, or each gets the member that is free first, whichever is projected to
end earlier.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dask_ferro.graph.bundling.partition import FlowCosts, Quotient, output_bytes

# Factors on the cost of a message when a task is assigned: the message for this task is known, but not that readers
# of the task follow it to that member.  Large graphs try one factor.
_AVERSIONS, _SMALL = (1.0, 8.0, 64.0), 10_000


class FlowPlan(NamedTuple):
    """Projected seconds, the member of each task, and the order in which ready tasks run (the lowest first)."""

    seconds: float
    members: Sequence[int]
    order: Sequence[float]


def plan_flow(q: Quotient, members: int, costs: FlowCosts) -> FlowPlan:
    """Return the plan of a graph of tasks for a number of members."""
    graph = _Graph.of(q, costs)
    order = np.argsort(-np.asarray(_ways(graph, costs)), kind="stable").tolist()
    free, blocks = [-1] * len(q), _blocks(q, members)
    found = [
        _assign(graph, order, owners.copy(), members, costs, aversion)
        for owners in (free, blocks)
        for aversion in (_AVERSIONS if len(q) <= _SMALL else _AVERSIONS[1:2])
    ]
    seconds, owners = min(found, key=lambda one: one[0])
    return FlowPlan(seconds, owners, [-way for way in _ways(graph, costs, owners)])


def peak_bytes(q: Quotient, plan: FlowPlan) -> float:
    """Return the projected bytes of results that are still read, on all workers at a time, copies included."""
    turn = np.empty(len(q), np.int64)
    turn[np.argsort(plan.order, kind="stable")] = np.arange(len(q))
    last = turn.copy()
    np.maximum.at(last, q.src, turn[q.dst])
    owners = np.asarray(plan.members, np.int64)
    members = int(owners.max(initial=0)) + 1
    holders = np.unique(q.src * members + owners[q.dst]) // members
    held = output_bytes(q) * np.bincount(holders, minlength=len(q))
    live = np.zeros(len(q) + 1)
    np.add.at(live, turn, held)
    np.subtract.at(live, last + 1, held)
    return float(live.cumsum().max(initial=0.0))


class _Graph(NamedTuple):
    """Seconds of each task, overhead included; its inputs and its readers: the first of each, and the rows.

    Flat lists: a numpy array creates a new object for each element that is read, and creating a list for each task
    takes longer than the plan.
    """

    spent: list[float]
    input_at: list[int]
    inputs: list[int]
    # Seconds from the end of an input elsewhere, or of a task here, to the value in the reader's worker.
    comes: list[float]
    reader_at: list[int]
    readers: list[int]
    goes: list[float]

    @classmethod
    def of(cls, q: Quotient, costs: FlowCosts) -> _Graph:
        hops = costs.hop_s + q.size / costs.bytes_per_s
        spent = (q.seconds + costs.task_s).tolist()
        into = q.pred_at.tolist(), q.src[q.into].tolist(), hops[q.into].tolist()
        return cls(spent, *into, q.succ_at.tolist(), q.dst.tolist(), hops.tolist())


def _ways(graph: _Graph, costs: FlowCosts, owners: Sequence[int] | None = None) -> list[float]:
    """Return the seconds from the start of each task to the end of the graph; with owners, messages are included."""
    ways, at, readers, goes = graph.spent.copy(), graph.reader_at, graph.readers, graph.goes
    for u in range(len(ways) - 1, -1, -1):
        tail = 0.0
        for edge in range(at[u], at[u + 1]):
            v = readers[edge]
            way = ways[v]
            if owners is not None and owners[u] != owners[v]:
                way += goes[edge] + costs.message_s
            if way > tail:
                tail = way
        ways[u] += tail
    return ways


def _blocks(q: Quotient, members: int) -> list[int]:
    """Return the members of tasks without inputs, with neighbours together; -1 for the other tasks."""
    sources = np.flatnonzero(np.diff(q.pred_at) == 0)
    spent = q.seconds[sources] + 1e-9
    middle = np.cumsum(spent) - spent / 2
    owners = np.full(len(q), -1, np.int64)
    owners[sources] = middle / spent.sum() * members
    found: list[int] = owners.tolist()
    return found


def _assign(
    graph: _Graph, order: Sequence[int], owners: list[int], members: int, costs: FlowCosts, aversion: float
) -> tuple[float, Sequence[int]]:
    """Return the projected seconds, and the members of all tasks; the members of some tasks may be fixed."""
    message, averse = costs.message_s, (aversion - 1) * (costs.message_s + costs.hop_s)
    spent, input_at, inputs, comes = graph.spent, graph.input_at, graph.inputs, graph.comes
    free = [0.0] * members
    ends = [0.0] * len(owners)
    # By task, the members that were sent its result, as bits.
    sent = [0] * len(owners)
    for v in order:
        first, last = input_at[v], input_at[v + 1]
        if owners[v] >= 0:
            among = {owners[v]}
        else:
            among = {owners[u] for u in inputs[first:last]}
            among.add(free.index(min(free)))
        best, least, end = -1, 0.0, 0.0
        for member in among:
            ready, coming = 0.0, 0
            for edge in range(first, last):
                u = inputs[edge]
                at = ends[u]
                if owners[u] != member:
                    at += comes[edge]
                    coming += not sent[u] >> member & 1
                if at > ready:
                    ready = at
            at = free[member] + coming * message
            at = (at if at > ready else ready) + spent[v]
            seen = at + averse * coming
            if best < 0 or (seen, member) < (least, best):
                best, least, end = member, seen, at
        for u in inputs[first:last]:
            if owners[u] != best and not sent[u] >> best & 1:
                sent[u] |= 1 << best
                free[owners[u]] += message
        owners[v], ends[v] = best, end
        free[best] = end
    return max(max(ends, default=0.0), max(free)), owners
