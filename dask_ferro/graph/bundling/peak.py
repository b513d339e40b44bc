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
from heapq import heappop, heappush
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from dask_ferro.graph.bundling.makespan import Overheads
from dask_ferro.graph.bundling.partition import Floats, Quotient

Ranks: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[int]]
# A piece that reads some results of another is sent all of them if that is at most so many bytes more for each one
# that it reads: a task that picks one takes as long.
MORE = 2 << 20


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
    queues = _Queues(ranks([sources[a:b] for a, b in pairwise(at)]), workers)
    memory = _Holdings(q)
    spent = (q.seconds + overheads.task_s).tolist()
    readers, reader_at = q.dst.tolist(), q.succ_at.tolist()
    waits = np.diff(q.pred_at).tolist()
    coming = [(0.0, v) for v in range(len(q)) if not waits[v]]
    running: list[tuple[float, int, int]] = []
    free = set(range(workers))
    now = 0.0
    while coming or running:
        # The next event: a piece arrives, which matters where a worker is free, or one ends.
        if coming and (not running or (free and coming[0][0] <= running[0][0])):
            now = max(now, coming[0][0])
        else:
            now, worker, done = heappop(running)
            free.add(worker)
            memory.end(done)
            for reader in readers[reader_at[done] : reader_at[done + 1]]:
                waits[reader] -= 1
                if not waits[reader]:
                    heappush(coming, (now + overheads.hop_s, reader))
        while coming and coming[0][0] <= now:
            piece = heappop(coming)[1]
            queues.put(piece, memory.nearest(piece))
        for worker in sorted(free):
            if (piece := queues.take(worker)) < 0:
                break
            free.remove(worker)
            memory.start(piece, worker)
            heappush(running, (now + spent[piece], worker, piece))
    return memory.most


class _Queues:
    """Ready pieces: those of a worker that holds their inputs, and those without; whoever has none takes another's."""

    def __init__(self, ranks: Sequence[int], workers: int) -> None:
        self._ranks = ranks
        self._anywhere: list[tuple[int, int]] = []
        self._of: list[list[tuple[int, int]]] = [[] for _ in range(workers)]

    def put(self, piece: int, worker: int) -> None:
        """Add a ready piece; a worker of -1: anywhere."""
        heappush(self._anywhere if worker < 0 else self._of[worker], (self._ranks[piece], piece))

    def take(self, worker: int) -> int:
        """Return the first of a worker's pieces, and remove it; -1: there is none on any worker."""
        found = [queue for queue in (self._of[worker], self._anywhere) if queue]
        queue = min(found) if found else max(self._of, key=len)
        return heappop(queue)[1] if queue else -1


class _Holdings:
    """What pieces hand out, on the workers that made it and those that were sent it."""

    def __init__(self, q: Quotient) -> None:
        self._nbytes = handed_out(q).tolist()
        self._sources, self._at = q.src[q.into].tolist(), q.pred_at.tolist()
        self._sizes = q.size[q.into].tolist()
        self._unread = np.diff(q.succ_at).tolist()
        # By piece, the workers that hold its results, the first of which made them, and the bytes on all.
        self._holders: list[list[int]] = [[] for _ in range(len(q))]
        self._total = [0.0] * len(q)
        self._held = self.most = 0.0

    def nearest(self, piece: int) -> int:
        """Return the worker that holds most of a piece's inputs; -1: it has none."""
        near: dict[int, float] = {}
        for edge in range(self._at[piece], self._at[piece + 1]):
            for worker in self._holders[self._sources[edge]]:
                near[worker] = near.get(worker, 0.0) + self._sizes[edge]
        return max(near, key=lambda worker: (near[worker], -worker)) if near else -1

    def start(self, piece: int, worker: int) -> None:
        """Note that a piece runs on a worker; what it reads from others is sent there."""
        for edge in range(self._at[piece], self._at[piece + 1]):
            holders = self._holders[self._sources[edge]]
            if worker not in holders:
                holders.append(worker)
                self._add(self._sources[edge], self._sizes[edge])
        self._holders[piece] = [worker]

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
