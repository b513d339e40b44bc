"""The projected makespan of a partition, and its peak of results in memory: list scheduling, with Dask's overheads.

The model, in the figures of a Dask cluster of processes: a task costs its worker `task_s` besides its own seconds; a
task that follows another is ready `hop_s` after it, wherever it runs; bytes cost their transfer when their producer ran
elsewhere; and the scheduler, one process, hands out a task every `dispatch_s`.  Of the ready pieces, a free worker
takes that of highest upward rank (the longest way to the end; Topcuoglu, Hariri, Wu, 2002), or the first in another
order, and of the free workers that which holds most of its inputs.

A piece of several nodes keeps what it hands out until the last reader of any of it has run; what is sent to another
worker counts there once more.  Results that nobody reads are not counted: they stay, however the graph is cut.

Durations are seconds, sizes bytes.  It decides nothing and knows neither nodes nor devices; ties break by number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dask_ferro.graph.bundling.partition import Floats, Ints, Quotient

# A piece that reads some results of another is sent all of them if that is at most so many bytes more for each one
# that it reads: a task that picks one takes as long.
MORE = 2 << 20
# Of each piece, those that it waits for, to the place of each in an order: of ready pieces, the least runs first.
Ranks: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[int]]


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
FREE = Overheads(task_s=0.0, hop_s=0.0, bytes_per_s=inf, dispatch_s=0.0)


class Schedule(NamedTuple):
    """Seconds from submission until the last piece ends, the worker of each piece, and starts (v) and ends (~v)."""

    seconds: float
    ran_on: Sequence[int]
    events: Sequence[int]


def lower_bound(q: Quotient, *, workers: int, overheads: Overheads, enough: float = inf) -> float:
    """Return the larger of the longest path, the work, and the scheduler's part: no schedule beats it.

    Where the others are more than `enough`, the path is left out, which takes longest to find.
    """
    tasks = len(q)
    work = (float(q.seconds.sum()) + tasks * overheads.task_s) / workers
    least = max(work, tasks * overheads.dispatch_s)
    return least if least > enough else max(least, longest_path(q, replace(overheads, bytes_per_s=inf)))


def longest_path(q: Quotient, overheads: Overheads = FREE) -> float:
    """Return the seconds of the longest path."""
    return max(_upward_rank(q, overheads), default=0.0)


def _upward_rank(q: Quotient, overheads: Overheads) -> list[float]:
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


def handed_out(q: Quotient) -> Floats:
    """Return for each piece the bytes that other pieces read from it."""
    value, src, _, size = q.rows
    first = np.unique(value, return_index=True)[1]
    return np.bincount(src[first], weights=size[first], minlength=len(q)).astype(np.float64)


def as_sent(q: Quotient, overheads: Overheads) -> Quotient:
    """Return a quotient with the bytes that are sent over its edges, and the seconds of tasks that pick results.

    A piece that reads some results of another is sent all of them, or a task for each picks it.
    """
    value, src, dst, _ = q.rows
    if not len(src):
        return q
    total = handed_out(q)[q.src]
    row_edge = np.searchsorted(q.src * len(q) + q.dst, src * len(q) + dst)
    read = np.bincount(row_edge, minlength=len(q.src))
    whole = total - q.size <= MORE * read
    picked = ~whole[row_edge]
    first = np.unique(value[picked], return_index=True)[1]
    picks = np.bincount(src[picked][first], minlength=len(q))
    return replace(q, seconds=q.seconds + overheads.task_s * picks, size=np.where(whole, total, q.size))


def scheduled(q: Quotient, *, workers: int, overheads: Overheads, ranks: Ranks | None = None) -> Schedule:
    """Return the projected schedule of a quotient, by upward rank or in the order of `ranks`."""
    hop, dispatch, per_s = overheads.hop_s, overheads.dispatch_s, overheads.bytes_per_s
    targets, sources = _rows_of(q.dst, q.succ_at), _rows_of(q.src[q.into], q.pred_at)
    sizes = _rows_of(q.size[q.into], q.pred_at)
    rank: Sequence[float] = [-way for way in _upward_rank(q, overheads)] if ranks is None else ranks(sources)
    spent = (q.seconds + overheads.task_s).tolist()
    waits = np.diff(q.pred_at).tolist()
    arrived = [0.0] * len(q)
    ran_on = [-1] * len(q)
    events: list[int] = []
    coming = [(0.0, rank[v], v) for v in range(len(q)) if not waits[v]]
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
        while ready and len(running) < workers:
            v = heappop(ready)[1]
            # The free worker that made most bytes of the inputs, else the first.
            made: dict[int, float] = {}
            for u, size in zip(sources[v], sizes[v], strict=True):
                made[ran_on[u]] = made.get(ran_on[u], 0.0) + size
            worker = min((w for w in made if free[w]), key=lambda w: (-made[w], w), default=-1)
            while worker < 0 or not free[worker]:
                worker = heappop(idle)
            free[worker] = False
            ran_on[v] = worker
            events.append(v)
            fetched = sum(made.values()) - made.get(worker, 0.0)
            heappush(running, (max(now, arrived[v] + fetched / per_s) + spent[v], worker, v))
        end = running[0][0] if running else inf
        start = max(dispatched, coming[0][0]) + dispatch if coming else inf
        now = max(now, min(end, start))
        while running and running[0][0] <= now:
            _, worker, u = heappop(running)
            events.append(~u)
            free[worker] = True
            heappush(idle, worker)
            for v in targets[u]:
                waits[v] -= 1
                if not waits[v]:
                    heappush(coming, (now + hop, rank[v], v))
    return Schedule(now, ran_on, events)


def peak(q: Quotient, schedule: Schedule) -> float:
    """Return the most bytes of results in memory at a time."""
    sources, sizes = _rows_of(q.src[q.into], q.pred_at), _rows_of(q.size[q.into], q.pred_at)
    made, unread = handed_out(q).tolist(), np.diff(q.succ_at).tolist()
    # By piece, its bytes on all workers.
    held = [0.0] * len(q)
    sent: set[tuple[int, int]] = set()
    total = most = 0.0
    for event in schedule.events:
        if event >= 0:
            worker = schedule.ran_on[event]
            for u, size in zip(sources[event], sizes[event], strict=True):
                if schedule.ran_on[u] != worker and (u, worker) not in sent:
                    sent.add((u, worker))
                    held[u] += size
                    total += size
            most = max(most, total)
            continue
        held[~event] += made[~event]
        total += made[~event]
        most = max(most, total)
        for u in sources[~event]:
            unread[u] -= 1
            if not unread[u]:
                total -= held[u]
    return most


def _rows_of(column: Ints | Floats, at: Ints) -> list[list[Any]]:
    """Return the lists of a column, which starts at each place of `at`: numpy makes an object for each element."""
    values = column.tolist()
    return [values[a:b] for a, b in pairwise(at.tolist())]
