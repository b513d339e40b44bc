"""The projected peak of a partition's results in memory.

A piece that waits for others is ready `hop_s` after the last of them.  It runs on the worker that holds most of its
inputs, unless another one has nothing to do; what that one lacks is sent to it, and counts once more.  Of its ready
pieces a worker takes the first in Dask's order.  A piece of several nodes keeps what it hands out until the last reader
of any of it has run.  Results that the graph's user asks for are not counted: they stay, however the graph is cut.
That the scheduler hands out one task at a time is left out: it would count against the graph of single tasks.

Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from dask_ferro.graph.bundling.makespan import Overheads
from dask_ferro.graph.bundling.partition import Floats, Quotient

Ranks: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[int]]
# A piece that reads some results of another is sent all of them if that is at most so many bytes more for each one
# that it reads: a task that picks one takes as long.
MORE = 2 << 20
# Workers that hold a result, and count when its readers are placed: what all read would be on each of thousands.
HOLDERS = 8


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


def as_numbered(sources: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return ranks in which pieces run as they are numbered."""
    return range(len(sources))


def peak_bytes(q: Quotient, *, workers: int, overheads: Overheads, ranks: Ranks = as_numbered) -> float:
    """Return the most bytes of results that are in memory at a time.

    Parameters
    ----------
    q : Quotient
        As sent.
    workers : int
        Pieces that run at a time.
    overheads : Overheads
    ranks : callable
        Returns the rank of each piece, given those that each one waits for: of ready pieces, the least runs first.
    """
    sources, at = q.src[q.into].tolist(), q.pred_at.tolist()
    rank = ranks([sources[a:b] for a, b in pairwise(at)])
    queues, memory = _Queues(rank, workers), _Holdings(q, workers)
    spent = (q.seconds + overheads.task_s).tolist()
    readers, reader_at = q.dst.tolist(), q.succ_at.tolist()
    waits = np.diff(q.pred_at).tolist()
    coming = [(0.0, rank[v], v) for v in range(len(q)) if not waits[v]]
    heapify(coming)
    running: list[tuple[float, int, int]] = []
    now = 0.0
    while coming or running:
        # The next event: a piece arrives, or one ends; its worker takes the next piece before others arrive.
        if coming and (not running or coming[0][0] <= running[0][0]):
            now, _, piece = heappop(coming)
            worker = queues.put(piece, memory.nearest(piece))
        else:
            now, worker, done = heappop(running)
            memory.end(done)
            for reader in readers[reader_at[done] : reader_at[done + 1]]:
                waits[reader] -= 1
                if not waits[reader]:
                    heappush(coming, (now + overheads.hop_s, rank[reader], reader))
            piece = queues.take(worker)
        if worker >= 0 and piece >= 0:
            memory.start(piece, worker)
            heappush(running, (now + spent[piece], worker, piece))
    return memory.most


class _Queues:
    """Free workers, and pieces that wait for one: for that which holds their inputs, or for any."""

    def __init__(self, rank: Sequence[int], workers: int) -> None:
        self._rank = rank
        self._anywhere: list[tuple[int, int]] = []
        self._of: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
        # Workers with a queue of their own, as keys: the longest would have to be sought among all.
        self._queued: dict[int, None] = {}
        self._free = dict.fromkeys(range(workers))

    def put(self, piece: int, nearest: int) -> int:
        """Return the free worker that runs a ready piece, its nearest one or any; -1: there is none, and it waits."""
        if self._free:
            worker = nearest if nearest in self._free else next(iter(self._free))
            del self._free[worker]
            return worker
        heappush(self._anywhere if nearest < 0 else self._of[nearest], (self._rank[piece], piece))
        if nearest >= 0:
            self._queued[nearest] = None
        return -1

    def take(self, worker: int) -> int:
        """Return the next piece of a worker that has become free, its own or another's; -1: there is none."""
        own = self._of[worker]
        if own and not (self._anywhere and self._anywhere < own):
            return self._taken(worker)
        if self._anywhere:
            return heappop(self._anywhere)[1]
        if self._queued:
            return self._taken(next(iter(self._queued)))
        self._free[worker] = None
        return -1

    def _taken(self, victim: int) -> int:
        piece = heappop(self._of[victim])[1]
        if not self._of[victim]:
            del self._queued[victim]
        return piece


class _Holdings:
    """What pieces hand out, on the workers that made it and those that were sent it."""

    def __init__(self, q: Quotient, workers: int) -> None:
        self._nbytes = handed_out(q).tolist()
        self._sources, self._at = q.src[q.into].tolist(), q.pred_at.tolist()
        self._sizes = q.size[q.into].tolist()
        self._unread = np.diff(q.succ_at).tolist()
        # By piece, the first workers that hold its results, and the bytes on all; by worker, all that it was sent.
        self._near: list[list[int]] = [[] for _ in range(len(q))]
        self._total = [0.0] * len(q)
        self._there: list[set[int]] = [set() for _ in range(workers)]
        self._held = self.most = 0.0

    def nearest(self, piece: int) -> int:
        """Return the worker that holds most of a piece's inputs; -1: it has none."""
        near: dict[int, float] = {}
        for edge in range(self._at[piece], self._at[piece + 1]):
            for worker in self._near[self._sources[edge]]:
                near[worker] = near.get(worker, 0.0) + self._sizes[edge]
        return max(near, key=lambda worker: (near[worker], -worker)) if near else -1

    def start(self, piece: int, worker: int) -> None:
        """Note that a piece runs on a worker; what it reads from others is sent there."""
        there = self._there[worker]
        for edge in range(self._at[piece], self._at[piece + 1]):
            source = self._sources[edge]
            if source not in there:
                there.add(source)
                self._add(source, self._sizes[edge])
                if len(self._near[source]) < HOLDERS:
                    self._near[source].append(worker)
        there.add(piece)
        self._near[piece] = [worker]

    def _add(self, source: int, nbytes: float) -> None:
        self._total[source] += nbytes
        self._held += nbytes
        self.most = max(self.most, self._held)

    def end(self, piece: int) -> None:
        """Note that a piece has run."""
        self._add(piece, self._nbytes[piece])
        for edge in range(self._at[piece], self._at[piece + 1]):
            source = self._sources[edge]
            self._unread[source] -= 1
            if not self._unread[source]:
                self._held -= self._total[source]
