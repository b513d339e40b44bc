"""Partitions of a graph of nodes as plain integers, and what each is projected to take: makespan, peak of memory.

`Dag` holds all that a partition is made from: seconds of each node, bytes of each edge, and edges that must not be
cut.  `Quotient` is a partition of it together with the graph between its pieces; pieces are numbered in topological
order, so a loop over ``range(len(q))`` is a forward sweep.  `merge` contracts further and refuses to make a cycle.

    nodes   0 ─ 1 ─ 3        piece of   0 1 2 3          pieces   0 ─ 1
             ╲ 2 ╱           node       0 0 0 1

A partition without a cycle between its pieces is what "convex" means here: a piece can run as one task, because
everything that it needs can be ready before it starts.  `schedule` projects it by list scheduling.  Durations are
seconds, sizes bytes, both floats; nothing here decides anything or knows ONNX, and ties break by number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dask_ferro.policy.estimates import Link

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
# Value, src, dst, bytes.
Rows: TypeAlias = tuple[Ints, Ints, Ints, Floats]
Bundles: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Dag:
    """Nodes 0 .. n-1 in a topological order, with their projected seconds."""

    seconds: Sequence[float]
    # (src, dst, bytes), src < dst, for each value and consumer.
    edges: Sequence[tuple[int, int, float]] | Floats
    # Pairs of nodes that must share a bundle: sequences and optionals do not travel between tasks.
    glued: Sequence[tuple[int, int]] = ()
    # The value that each edge carries, a number; (): edges of one `src` with equal bytes are taken for one
    # value with several consumers.
    values: Sequence[int] | Ints = ()


@dataclass(frozen=True)
class Quotient:
    """Pieces in topological order, and the graph between them in compressed rows."""

    # The piece of each node of the `Dag`.
    piece_of: Ints
    # The seconds of each piece, and its part of what one piece may hold.
    seconds: Floats
    shares: Floats
    # Pieces of different kinds are never merged, and one of a kind below 0 with none.
    kinds: Ints
    # The edges between pieces, sorted, and the bytes that cross each.
    src: Ints
    dst: Ints
    size: Floats
    # Edges out of piece v are succ_at[v] : succ_at[v + 1]; those into it are into[pred_at[v] : pred_at[v + 1]].
    into: Ints
    succ_at: Ints
    pred_at: Ints
    # The edges value by value, each once for each consuming piece.
    rows: Rows

    def __len__(self) -> int:
        return len(self.seconds)

    def bundles(self) -> Bundles:
        """Return the nodes of each piece, ascending, pieces in topological order."""
        ends = np.cumsum(np.bincount(self.piece_of, minlength=len(self))).tolist()
        nodes = np.argsort(self.piece_of, kind="stable").tolist()
        return tuple(tuple(nodes[a:b]) for a, b in zip([0, *ends], ends, strict=False))


def finest(dag: Dag, kinds: Ints | None = None, shares: Floats | None = None) -> Quotient:
    """Return one piece for each node, but one for nodes that must not be cut apart."""
    return _label_pieces(dag, _contract(len(dag.seconds), dag.glued), kinds, shares)


def _label_pieces(dag: Dag, label: Ints, kinds: Ints | None = None, shares: Floats | None = None) -> Quotient:
    none, seconds = np.zeros(len(label)), np.asarray(dag.seconds, np.float64)
    shares = none if shares is None else shares
    return _quotient(
        label, label, seconds, shares, none.astype(np.int64) if kinds is None else kinds, _rows(dag)
    )


def make_quotient(dag: Dag, bundles: Sequence[Sequence[int]]) -> Quotient:
    """Return the quotient of `dag` by bundles in topological order; ValueError where they are no such partition."""
    n = len(dag.seconds)
    label = np.full(n, -1, np.int64)
    for index, nodes in enumerate(bundles):
        label[list(nodes)] = index
    total = sum(map(len, bundles))
    if total != n or (label < 0).any():
        raise ValueError(f"bundles: got {total} nodes, wanted each of {n} exactly once")
    return _label_pieces(dag, label)


def merge(q: Quotient, label: Ints) -> Quotient:
    """Return `q` with the pieces of each label merged; labels are 0, 1, ... in a topological order."""
    return _quotient(label[q.piece_of], label, q.seconds, q.shares, q.kinds, q.rows)


def _rows(dag: Dag) -> Rows:
    """Return the edges of `dag` as columns (value, src, dst, bytes)."""
    table = np.asarray(dag.edges, np.float64).reshape(-1, 3)
    (src, dst), size = table[:, :2].T.astype(np.int64), table[:, 2]
    # Rows of one source with equal bytes: two values counted as one make a transfer too cheap, never too dear.
    of = dag.values if len(dag.values) else src * len(src) + np.unique(size, return_inverse=True)[1]
    return np.asarray(of, np.int64), src, dst, size


def _quotient(
    piece_of: Ints, label: Ints, seconds: Floats, shares: Floats, kinds: Ints, rows: Rows
) -> Quotient:
    """Return the quotient by `label` of pieces with `seconds`, `shares`, `kinds` and `rows`."""
    n = int(label.max()) + 1 if len(label) else 0
    value, src, dst, size = rows
    src, dst = label[src], label[dst]
    if (src > dst).any():
        row = int(np.flatnonzero(src > dst)[0])
        raise ValueError(
            f"bundle {src[row]} comes after bundle {dst[row]}, which waits for it: they are not convex"
        )
    # Each value once for each piece that reads it.
    keep = np.flatnonzero(src != dst)
    keep = keep[np.unique(value[keep] * n + dst[keep], return_index=True)[1]]
    table = value[keep], src[keep], dst[keep], size[keep]
    edge, inverse = np.unique(table[1] * n + table[2], return_inverse=True)
    src, dst = np.divmod(edge, max(n, 1))
    of_kind = np.full(n, -1, np.int64)
    of_kind[label] = kinds
    return Quotient(
        piece_of,
        np.bincount(label, weights=seconds, minlength=n).astype(np.float64),
        np.bincount(label, weights=shares, minlength=n).astype(np.float64),
        of_kind,
        src,
        dst,
        np.bincount(inverse.reshape(-1), weights=table[3], minlength=len(edge)).astype(np.float64),
        np.argsort(dst, kind="stable"),
        np.concatenate([[0], np.cumsum(np.bincount(src, minlength=n))]),
        np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=n))]),
        table,
    )


def _contract(n: int, glued: Sequence[tuple[int, int]]) -> Ints:
    """Label nodes so that glued ones agree: a pair takes all that lies between the two, so no cycle arises."""
    begins = np.zeros(n + 1, np.int64)
    for src, dst in glued:
        begins[src + 1] += 1
        begins[dst + 1] -= 1
    return np.cumsum(np.cumsum(begins[:n]) == 0) - 1


# Projections, in the figures of a Dask cluster of processes: a task costs its worker `task_s` besides its own seconds;
# a task that follows another is ready `hop_s` after it, wherever it runs; bytes cost their transfer when their producer
# ran elsewhere; and the scheduler, one process, hands out a task every `dispatch_s`.  The ready piece of highest upward
# rank (the longest way to the end; Topcuoglu, Hariri, Wu, 2002), or the first in another order, goes to the worker that
# is free first, or made inputs of it, whichever begins it earlier, if bytes count `BURDEN` times.  A worker's link
# carries what it receives, and what it sends, one after another.
#
# A piece of several nodes keeps what it hands out until the last reader of any of it has run; what is sent to another
# worker counts there once more.  Results that nobody reads are not counted: they stay, however the graph is cut.

# A piece that reads some results of another is sent all of them if that is at most so many bytes more for each one
# that it reads: a task that picks one takes as long.
PICK_BYTES = 2 << 20
# How often the bytes of inputs count where a task is placed: at 1, a piece moves to any worker that is free for less
# than its inputs take alone, and 64 workers were projected to move 140 times what they do.  As in placement, where they
# count 2.5 times beside their own seconds; at 10, bundles by estimates that are too long took up to 1.48 of the time.
BURDEN = 3.5
# From those that each piece waits for to the place of each in an order: the ready piece of least place runs first.
Ranks: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[int]]


@dataclass(frozen=True)
class Overheads:
    """Costs of a task besides its nodes; the defaults were measured on Dask processes over TCP."""

    # CPU of one task, all processes together.
    task_s: float = 2.3e-3
    # Wall time from the end of a task to the start of the one that waits for it.
    hop_s: float = 6e-3
    # Between two workers.
    bytes_per_s: float = 1e9
    # The scheduler's own part of `task_s`; it is one process, so this bounds tasks per second.
    dispatch_s: float = 0.5e-3


@dataclass(frozen=True)
class FlowCosts:
    """Costs of a task of a flow, whose members send each other results without the scheduler."""

    # CPU of one task, and of a value that is sent to another worker, at each end.
    task_s: float = 30e-6
    message_s: float = 40e-6
    # From the end of a task to its value in another worker.
    hop_s: float = 60e-6
    bytes_per_s: float = 1e9

    @property
    def way_s(self) -> float:
        """From the end of a task to the end of a task of no seconds that waits for it in another worker."""
        return self.hop_s + self.message_s + self.task_s


DASK, FLOW = Overheads(), FlowCosts()
# Between members of a flow on two workers.
FLOW_LINK = Link(FLOW.hop_s, FLOW.bytes_per_s)
FREE = Overheads(task_s=0.0, hop_s=0.0, bytes_per_s=inf, dispatch_s=0.0)


class Schedule(NamedTuple):
    """Seconds from submission until the last piece ends, the worker of each piece, and starts (v) and ends (~v).

    `moved` are the bytes that are sent between workers.
    """

    seconds: float
    ran_on: Sequence[int]
    events: Sequence[int]
    moved: float


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


def output_bytes(q: Quotient) -> Floats:
    """Return for each piece the bytes that other pieces read from it."""
    value, src, _, size = q.rows
    first = np.unique(value, return_index=True)[1]
    return np.bincount(src[first], weights=size[first], minlength=len(q)).astype(np.float64)


def price(q: Quotient, overheads: Overheads) -> Quotient:
    """Return a quotient with the bytes that are sent over its edges, and the seconds of tasks that pick results.

    A piece that reads some results of another is sent all of them, or a task for each picks it.
    """
    value, src, dst, _ = q.rows
    if not len(src):
        return q
    total = output_bytes(q)[q.src]
    row_edge = np.searchsorted(q.src * len(q) + q.dst, src * len(q) + dst)
    read = np.bincount(row_edge, minlength=len(q.src))
    whole = total - q.size <= PICK_BYTES * read
    picked = ~whole[row_edge]
    first = np.unique(value[picked], return_index=True)[1]
    picks = np.bincount(src[picked][first], minlength=len(q))
    return replace(q, seconds=q.seconds + overheads.task_s * picks, size=np.where(whole, total, q.size))


def schedule(q: Quotient, *, workers: int, overheads: Overheads, ranks: Ranks | None = None) -> Schedule:
    """Return the projected schedule of a quotient, by upward rank or in the order of `ranks`."""
    hop, dispatch, per_s = overheads.hop_s, overheads.dispatch_s, overheads.bytes_per_s
    # Flat lists, since one for each piece costs more than the schedule itself.
    targets, succ_at = q.dst.tolist(), q.succ_at.tolist()
    sources, sizes, pred_at = q.src[q.into].tolist(), q.size[q.into].tolist(), q.pred_at.tolist()
    rank: Sequence[float]
    if ranks is None:
        rank = [-way for way in _upward_rank(q, overheads)]
    else:
        rank = ranks(_rows_of(q.src[q.into], q.pred_at))
    spent = (q.seconds + overheads.task_s).tolist()
    waits = np.diff(q.pred_at).tolist()
    ran_on = [-1] * len(q)
    events: list[int] = []
    coming = [(0.0, rank[v], v) for v in range(len(q)) if not waits[v]]
    heapify(coming)
    # What waits for the scheduler; roots that wait for a worker without others; what each worker was handed.
    queued: list[tuple[float, int]] = []
    roots: list[tuple[float, int]] = []
    handed: list[list[tuple[float, int, float]]] = [[] for _ in range(workers)]
    running: list[tuple[float, int, int]] = []
    # Nothing is removed from the middle of the heap, so it may hold a worker twice or a busy one; `free` is exact.
    idle = list(range(workers))
    free = [True] * workers
    # The projected end of what a worker was handed, and of what it receives and sends.
    until, receives, sends = ([0.0] * workers for _ in range(3))
    # The changes of `until`, of which the last one of each worker is in force.
    ends = [(0.0, worker) for worker in range(workers)]
    sent: set[tuple[int, int]] = set()
    now = dispatched = moved = 0.0

    def start(v: int, worker: int, arrival: float) -> None:
        free[worker] = False
        ran_on[v] = worker
        events.append(v)
        heappush(running, (max(now, arrival) + spent[v], worker, v))

    while coming or queued or running:
        while coming or queued:
            # The scheduler hands out the first in order of all that wait.
            begin = dispatched if queued else max(dispatched, coming[0][0])
            if begin + dispatch > now:
                break
            while coming and coming[0][0] <= begin:
                heappush(queued, heappop(coming)[1:])
            priority, v = heappop(queued)
            arrival = dispatched = begin + dispatch
            if pred_at[v] == pred_at[v + 1]:
                while idle and not free[idle[0]]:
                    heappop(idle)
                if idle:
                    start(v, worker := heappop(idle), arrival)
                    until[worker] = now + spent[v]
                    heappush(ends, (until[worker], worker))
                else:
                    # Dask queues roots.
                    heappush(roots, (priority, v))
                continue
            made: dict[int, float] = {}
            for edge in range(pred_at[v], pred_at[v + 1]):
                maker = ran_on[sources[edge]]
                made[maker] = made.get(maker, 0.0) + sizes[edge]
            total = sum(made.values())
            while ends[0][0] != until[ends[0][1]]:
                heappop(ends)
            worker = ends[0][1]
            least = max(until[worker], now) + BURDEN * (total - made.get(worker, 0.0)) / per_s
            for maker, size in made.items():
                begins = max(until[maker], now) + BURDEN * (total - size) / per_s
                if begins < least or (begins == least and maker < worker):
                    worker, least = maker, begins
            for edge in range(pred_at[v], pred_at[v + 1]):
                u = sources[edge]
                if (maker := ran_on[u]) != worker and (u, worker) not in sent:
                    sent.add((u, worker))
                    moved += sizes[edge]
                    took = sizes[edge] / per_s
                    receives[worker] = max(receives[worker], dispatched) + took
                    sends[maker] = max(sends[maker], dispatched) + took
                    arrival = max(arrival, receives[worker], sends[maker])
            until[worker] = max(until[worker], now, arrival) + spent[v]
            heappush(ends, (until[worker], worker))
            if free[worker]:
                start(v, worker, arrival)
            else:
                heappush(handed[worker], (priority, v, arrival))
        end = running[0][0] if running else inf
        next_out = inf
        if queued:
            next_out = dispatched + dispatch
        elif coming:
            next_out = max(dispatched, coming[0][0]) + dispatch
        now = max(now, min(end, next_out))
        while running and running[0][0] <= now:
            _, worker, u = heappop(running)
            events.append(~u)
            for v in targets[succ_at[u] : succ_at[u + 1]]:
                waits[v] -= 1
                if not waits[v]:
                    heappush(coming, (now + hop, rank[v], v))
            if handed[worker]:
                _, v, arrival = heappop(handed[worker])
                start(v, worker, arrival)
            elif roots:
                v = heappop(roots)[1]
                start(v, worker, now)
                until[worker] = now + spent[v]
                heappush(ends, (until[worker], worker))
            else:
                free[worker] = True
                heappush(idle, worker)
    return Schedule(now, ran_on, events, moved)


def peak(q: Quotient, schedule: Schedule) -> float:
    """Return the most bytes of results in memory at a time."""
    sources, sizes = _rows_of(q.src[q.into], q.pred_at), _rows_of(q.size[q.into], q.pred_at)
    made, unread = output_bytes(q).tolist(), np.diff(q.succ_at).tolist()
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
