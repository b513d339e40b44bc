"""The projected makespan of a partition: list scheduling on identical workers, with Dask's overheads.

The model, in the figures of a Dask cluster of processes: a task costs its worker `task_s` besides its own
seconds; a task that follows another is ready `hop_s` after it, wherever it runs; bytes cost their transfer
when their producer ran elsewhere; and the scheduler, one process, hands out a task every `dispatch_s`.  A
free worker takes the ready bundle of highest upward rank (the longest way to the end), the worker that holds
most of its inputs first.

Durations are seconds, sizes bytes.  It decides nothing and knows neither nodes nor devices; ties break by
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from dask_ferro.graph.bundling.partition import Dag, Quotient, partitioned


@dataclass(frozen=True)
class Overheads:
    """Costs of a task besides its nodes; the defaults were measured on Dask processes over TCP.

    Parameters
    ----------
    task_s : float
        CPU of one task, all processes together.
    hop_s : float
        Wall time from the end of a task to the start of the one that waits for it.
    bytes_per_s : float
        Between two workers.
    dispatch_s : float
        The scheduler's own part of `task_s`; it is one process, so this bounds tasks per second.
    """

    task_s: float = 2.3e-3
    hop_s: float = 6e-3
    bytes_per_s: float = 1e9
    dispatch_s: float = 0.5e-3


DASK = Overheads()


def project(
    dag: Dag, bundles: Sequence[Sequence[int]], *, workers: int, overheads: Overheads = DASK
) -> float:
    """Return the projected seconds from submission until the last bundle ends.

    Parameters
    ----------
    dag : Dag
    bundles : sequence of sequence of int
        A convex partition of its nodes; ValueError if it is none.
    workers : int
        Identical, one bundle at a time each.
    overheads : Overheads

    References
    ----------
    Upward rank: Topcuoglu, Hariri, Wu, "Performance-effective and low-complexity task scheduling for
    heterogeneous computing", 2002.
    """
    return makespan(partitioned(dag, bundles), workers=workers, overheads=overheads)


def lower_bound(q: Quotient, *, workers: int, overheads: Overheads) -> float:
    """Return the larger of the longest path, the work, and the scheduler's part: no schedule beats it."""
    tasks = len(q)
    work = (float(q.seconds.sum()) + tasks * overheads.task_s) / workers
    path = max(upward_rank(q, replace(overheads, bytes_per_s=inf)), default=0.0)
    return max(path, work, tasks * overheads.dispatch_s)


def upward_rank(q: Quotient, overheads: Overheads) -> list[float]:
    """Return, for each piece, the seconds of the longest way from its start to the end of the graph."""
    # Lists, since a numpy array makes a new object for each element that is read.
    ends, targets = q.succ_at.tolist(), q.dst.tolist()
    hops = (q.size / overheads.bytes_per_s + overheads.hop_s).tolist()
    rank: list[float] = (q.seconds + overheads.task_s).tolist()
    for u in range(len(q) - 1, -1, -1):
        tail = 0.0
        for edge in range(ends[u], ends[u + 1]):
            way = rank[targets[edge]] + hops[edge]
            if way > tail:
                tail = way
        rank[u] += tail
    return rank


def makespan(q: Quotient, *, workers: int, overheads: Overheads) -> float:
    """Return the projected makespan of a quotient."""
    hop, dispatch = overheads.hop_s, overheads.dispatch_s
    rank = upward_rank(q, overheads)
    targets, ends = q.dst.tolist(), q.succ_at.tolist()
    spent = (q.seconds + overheads.task_s).tolist()
    transfers = _Transfers(q, overheads)
    waits = np.diff(q.pred_at).tolist()
    arrived = [0.0] * len(q)
    coming = [(0.0, -rank[v], v) for v in range(len(q)) if not waits[v]]
    heapify(coming)
    ready: list[tuple[float, int]] = []
    running: list[tuple[float, int, int]] = []
    # Nothing is removed from the middle of the heap, so it may hold a worker twice or a busy one; `free` is exact.
    idle = list(range(workers))
    free = [True] * workers
    now = dispatched = 0.0
    while coming or ready or running:
        while coming and max(dispatched, coming[0][0]) + dispatch <= now:
            at, priority, v = heappop(coming)
            arrived[v] = dispatched = max(dispatched, at) + dispatch
            heappush(ready, (priority, v))
        while ready and _is_any_free(idle, free):
            v = heappop(ready)[1]
            worker = transfers.holder(v, free)
            worker = heappop(idle) if worker < 0 else worker
            free[worker] = False
            begin = max(now, arrived[v] + transfers.seconds(v, worker))
            heappush(running, (begin + spent[v], worker, v))
        end = running[0][0] if running else inf
        start = max(dispatched, coming[0][0]) + dispatch if coming else inf
        now = max(now, min(end, start))
        while running and running[0][0] <= now:
            _, worker, u = heappop(running)
            free[worker] = True
            heappush(idle, worker)
            for v in targets[ends[u] : ends[u + 1]]:
                waits[v] -= 1
                if not waits[v]:
                    heappush(coming, (now + hop, -rank[v], v))
    return now


def _is_any_free(idle: list[int], free: list[bool]) -> bool:
    """Return whether a worker is free; then the least of them is the first of `idle`."""
    while idle and not free[idle[0]]:
        heappop(idle)
    return bool(idle)


class _Transfers:
    """Workers of finished pieces, and the bytes that their consumers fetch from them."""

    def __init__(self, q: Quotient, overheads: Overheads) -> None:
        self._ends = q.pred_at.tolist()
        self._sources = q.src[q.into].tolist()
        self._seconds = (q.size[q.into] / overheads.bytes_per_s).tolist()
        self._ran_on = [-1] * len(q)

    def holder(self, v: int, free: list[bool]) -> int:
        """Return the free worker that holds most bytes of the inputs of `v`, or -1."""
        a, b = self._ends[v], self._ends[v + 1]
        # Most pieces have one input; no dict is built for them.
        if b - a == 1:
            worker = self._ran_on[self._sources[a]]
            return worker if free[worker] else -1
        held: dict[int, float] = {}
        for edge in range(a, b):
            worker = self._ran_on[self._sources[edge]]
            if free[worker]:
                held[worker] = held.get(worker, 0.0) + self._seconds[edge]
        return min(held, key=lambda w: (-held[w], w)) if held else -1

    def seconds(self, v: int, worker: int) -> float:
        """Return the seconds until the inputs of `v` are at `worker`, where it will run."""
        total = 0.0
        for edge in range(self._ends[v], self._ends[v + 1]):
            if self._ran_on[self._sources[edge]] != worker:
                total += self._seconds[edge]
        self._ran_on[v] = worker
        return total
