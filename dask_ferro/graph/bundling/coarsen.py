"""Passes that merge pieces of a graph, each a sweep that can never make a cycle.

A pass takes a `Quotient` and returns, for each piece, the piece that it goes into.  Two kinds are safe by
construction, so no pass ever searches for a cycle:

- *along edges*, when all predecessors of a piece are in one cluster (or all its successors): a way out of the
  cluster and back would have to enter through the piece, and it has no other entrance.  `chains`, `absorbed`.
- *across a level*: levels still rise along every edge.  `siblings`, `across`.

A grain is the seconds that a piece should be worth.  Merging down a chain loses nothing; along another edge
it delays the pieces that wait for the first half, so it has a budget; across a level it gives up parallel work worth
up to a grain.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import ceil, inf

import numpy as np
import numpy.typing as npt

from dask_ferro.graph.bundling.partition import Floats, Ints, Quotient, merged, relevelled

# Pieces: in graphs of more, the time that planning itself takes matters.
LARGE = 4096
# A round that leaves more of the pieces than this is the last.
FEW, FEW_OF_LARGE = 0.95, 0.8
# A share of a grain: equal shares of the work that fill a grain exactly must not need one more bin.
ROUNDING = 1e-9

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Coarseness:
    """Bounds up to which pieces are merged.

    Parameters
    ----------
    grain : float
        Seconds up to which pieces that run side by side are packed.
    budget : float
        Seconds that one piece may take over from small neighbours along edges.
    cap : float
        Seconds beyond which a chain is cut, where few bytes cross.
    spine : float
        Seconds that one piece may take over from pieces with work before and after them, before anything is
        packed: the long chain in a graph where other pieces hang from each of its links.
    lanes : int
        Pack a whole level, though its pieces share no neighbours, into at most one piece a lane or a multiple
        of that; 0 packs only what shares neighbours.
    side_by_side : bool
        Pack pieces that run side by side at all; without, only along edges, where results are read inside a piece.
    """

    grain: float
    budget: float
    cap: float = inf
    spine: float = 0.0
    lanes: int = 0
    side_by_side: bool = True


def coarsened(q: Quotient, how: Coarseness) -> Quotient:
    """Return `q` with pieces merged until they are worth about a grain, or a round merges few."""
    q = _chained(q, how.cap)
    while True:
        before = len(q)
        if how.spine:
            q = _absorb(q, how.spine, how.cap, ends=False)
        if how.side_by_side:
            q = _apply(q, siblings(q, how.grain, sources=False))
            q = _apply(q, siblings(q, how.grain, sources=True))
        q = _absorb(q, how.budget, how.cap, ends=True)
        # Last, since this gives up parallel work: only when the merges above find little more.
        if how.lanes and len(q) > 0.9 * before:
            q = q if len(q) == before else relevelled(q)
            q = _apply(q, across(q, how.grain, how.lanes))
        if len(q) == before:
            return q
        q = _chained(relevelled(q), how.cap)
        if len(q) > (FEW_OF_LARGE if before > LARGE else FEW) * before:
            return q


def _chained(q: Quotient, cap: float) -> Quotient:
    """Return `q` with chains merged, and again: pieces that a value skips may be a chain themselves."""
    found = q
    while True:
        before = len(found)
        found = _apply(found, chains(found, cap))
        if len(found) > FEW * before:
            return q if found is q else relevelled(found)


def _apply(q: Quotient, label: Ints) -> Quotient:
    return merged(q, label) if (label != np.arange(len(q))).any() else q


def _absorb(q: Quotient, budget: float, cap: float, *, ends: bool) -> Quotient:
    q = _apply(q, absorbed(q, budget, cap, down=True, ends=ends))
    return _apply(q, absorbed(q, budget, cap, down=False, ends=ends))


def chains(q: Quotient, cap: float = inf) -> Ints:
    """Label runs of pieces that can only run one after the other; runs longer than `cap` seconds are cut.

    A value that skips a piece does not break a run: in ``a -> b -> c`` with ``a -> c`` too, `c` waits for `b`
    anyway.
    """
    head = np.arange(len(q))
    before, after = _links(q)
    head[after] = before
    # Pointer jumping: a chain of n pieces takes log n rounds.
    while ((above := head[head]) != head).any():
        head = above
    if cap < inf:
        _cut_long(q, head, cap)
    return head


def _links(q: Quotient) -> tuple[Ints, Ints]:
    """Return pairs in which the second piece is the only successor of the first, and the first its only predecessor.

    Nothing leads from the first to the second but their edge, so merging them makes no cycle and delays
    no piece.
    """
    next_of, last_of = np.full((2, len(q)), -1, np.int64)
    # Written from the last edge on, so that the first successor stays.
    next_of[q.src[::-1]] = q.dst[::-1]
    last_of[q.dst] = q.src
    linked = (next_of >= 0) & (last_of[next_of] == np.arange(len(q)))
    out = np.flatnonzero(linked[q.src] & (next_of[q.src] != q.dst))
    linked[q.src[out[~_has_edge(q, next_of[q.src[out]], q.dst[out])]]] = False
    last = last_of[q.dst]
    into = np.flatnonzero(linked[last] & (next_of[last] == q.dst) & (last != q.src))
    linked[last[into[~_has_edge(q, q.src[into], last[into])]]] = False
    before = np.flatnonzero(linked)
    return before, next_of[before]


def _has_edge(q: Quotient, src: Ints, dst: Ints) -> npt.NDArray[np.bool_]:
    """Return for each pair whether there is an edge between its pieces."""
    edges, wanted = q.src * len(q) + q.dst, src * len(q) + dst
    at = np.minimum(np.searchsorted(edges, wanted), len(edges) - 1)
    return np.asarray(edges[at] == wanted)


def _cut_long(q: Quotient, head: Ints, cap: float) -> None:
    """Relabel each run of more than `cap` seconds as several."""
    total = np.bincount(head, weights=q.seconds, minlength=len(q))
    members = np.flatnonzero(total[head] > cap * (1 + ROUNDING))
    members = members[np.argsort(head[members], kind="stable")]
    place = np.zeros(len(q), np.int64)
    place[members] = np.arange(len(members))
    value, src, dst, size = q.rows
    inside = np.flatnonzero((head[src] == head[dst]) & (total[head[src]] > cap * (1 + ROUNDING)))
    inside = inside[np.lexsort((place[dst[inside]], value[inside]))]
    # A value crosses every cut up to its last consumer.
    last = inside[np.diff(value[inside], append=-1) != 0]
    begin, end = (np.bincount(place[v[last]], weights=size[last], minlength=len(place)) for v in (src, dst))
    # Bytes from members up to this one to later ones.
    crossing = np.cumsum(begin - end)
    for run in _runs(members, head[members]):
        for a, b in _cuts(q.seconds[run].tolist(), crossing[place[run]].tolist(), cap):
            head[run[a:b]] = run[a]


def _cuts(seconds: list[float], crossing: list[float], cap: float) -> list[tuple[int, int]]:
    """Return spans of at most `cap` seconds, each cut where the fewest bytes cross in its second half."""
    spans = []
    start = 0
    while start < len(seconds):
        total, end, stop, fewest = 0.0, start, start + 1, inf
        while end < len(seconds) and (end == start or total + seconds[end] <= cap * (1 + ROUNDING)):
            total += seconds[end]
            if 2 * total >= cap and crossing[end] <= fewest:
                fewest, stop = crossing[end], end + 1
            end += 1
        stop = end if end == len(seconds) else stop
        spans.append((start, stop))
        start = stop
    return spans


def absorbed(q: Quotient, budget: float, cap: float = inf, *, down: bool, ends: bool = True) -> Ints:
    """Label small pieces as the only cluster that they wait for (`down`), or that waits for them.

    A cluster takes over at most `budget` seconds.  A small piece with one neighbour on the other side too
    goes where more bytes would cross; one with none there is left alone without `ends`.
    """
    n = len(q)
    comes, goes = (np.bincount(end, weights=q.size, minlength=n) for end in (q.dst, q.src))
    if down:
        at, neighbours, beyond = q.pred_at, q.src[q.into], np.diff(q.succ_at)
        elsewhere = (beyond == 1) & (goes > comes)
    else:
        at, neighbours, beyond = q.succ_at, q.dst, np.diff(q.pred_at)
        elsewhere = (beyond == 1) & (comes >= goes)
    joins = (q.seconds <= budget) & (np.diff(at) > 0) & ~elsewhere & (ends | (beyond > 0))
    small = np.flatnonzero(joins).tolist()
    if not small:
        return np.arange(n)
    offset, near, mine = at.tolist(), neighbours.tolist(), q.seconds.tolist()
    # In topological order (or against it), so a neighbour's own label is final when it is read.
    label = list(range(n))
    taken, total = [0.0] * n, list(mine)
    for v in small if down else reversed(small):
        a, b = offset[v], offset[v + 1]
        home = label[near[a]]
        if taken[home] + mine[v] > budget or total[home] + mine[v] > cap:
            continue
        if b - a > 1 and any(label[u] != home for u in near[a + 1 : b]):
            continue
        label[v] = home
        taken[home] += mine[v]
        total[home] += mine[v]
    return np.asarray(label, np.int64)


def siblings(q: Quotient, grain: float, *, sources: bool) -> Ints:
    """Label pieces of a level that wait for the same pieces, packed to a grain.

    Pieces that wait for nothing have that only in common when nothing waits for them either; with `sources`,
    pieces go by those that wait for them.  Sets are compared by a hash: a collision packs unrelated pieces of one
    level, which is safe.
    """
    if sources:
        at, key = q.succ_at, _sums(_hashes(len(q))[q.dst], q.succ_at)
        alike = np.diff(at) > 0
    else:
        at, key = q.pred_at, _sums(_hashes(len(q))[q.src[q.into]], q.pred_at)
        alike = (np.diff(at) > 0) | (np.diff(q.succ_at) == 0)
    members = np.flatnonzero(alike & (q.seconds < grain))
    members = members[np.lexsort((members, key[members], q.level[members]))]
    # Groups that fit into one grain are labelled in one go; only the others are packed one by one.
    first = _changes(q.level[members], key[members])
    group = np.repeat(np.arange(len(first)), np.diff(first, append=len(members)))
    total = np.bincount(group, weights=q.seconds[members], minlength=len(first))
    fits = total[group] <= grain * (1 + ROUNDING)
    label = np.arange(len(q))
    label[members[fits]] = members[first[group[fits]]]
    rest = ~fits & (q.seconds[members] <= grain / 2)
    for pieces in _runs(members[rest], group[rest]):
        label[pieces] = pieces[_packed(q.seconds[pieces], grain)]
    return label


def _changes(*columns: npt.NDArray[np.generic]) -> Ints:
    """Return the rows that differ from the row before, the first included."""
    differ = np.zeros(len(columns[0]), bool)
    differ[:1] = True
    for column in columns:
        differ[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(differ)


def _runs(items: Ints, key: Ints) -> list[Ints]:
    """Split items where their keys change."""
    return np.split(items, _changes(key)[1:]) if len(items) else []


def _packed(seconds: Floats, grain: float) -> Ints:
    """Return the first item of each item's bin; bins are filled by LPT, the longest item into the emptiest bin."""
    bins = max(1, ceil(float(seconds.sum()) / grain - ROUNDING))
    loads = [(0.0, i, -1) for i in range(bins)]
    heapify(loads)
    home = np.arange(len(seconds))
    items = seconds.tolist()
    for v in np.argsort(-seconds, kind="stable").tolist():
        load, i, head = loads[0]
        # The first item of a bin is its label.
        head = v if head < 0 else head
        home[v] = head
        heapreplace(loads, (load + items[v], i, head))
    return home


def across(q: Quotient, grain: float, lanes: int) -> Ints:
    """Label pieces of a level, packed to a grain, those side by side that read most from the same piece."""
    total = np.bincount(q.level, weights=q.seconds, minlength=1)
    small = (q.seconds <= grain / 2) | (total[q.level] <= grain)
    members = np.flatnonzero(small & (q.seconds < grain))
    members = members[np.lexsort((members, _favourite(q)[members], q.level[members]))]
    level, mine = q.level[members], q.seconds[members]
    total = np.bincount(level, weights=mine, minlength=len(total))
    bins = np.maximum(1, np.ceil(total / grain - ROUNDING))
    # Nine pieces keep eight workers busy for as long as ten do.
    bins = np.where(bins > lanes, np.round(bins / lanes) * lanes, bins)
    before = np.cumsum(mine) - mine
    starts = _changes(level)
    before -= np.repeat(before[starts], np.diff(starts, append=len(level)))
    share = np.where(total > 0, bins / np.where(total > 0, total, 1.0), 0.0)
    place = np.minimum(np.floor((before + mine / 2) * share[level]), bins[level] - 1)
    head = _changes(level, place)
    label = np.arange(len(q))
    label[members] = np.repeat(members[head], np.diff(head, append=len(members)))
    return label


def _favourite(q: Quotient) -> Ints:
    """Return for each piece the neighbour that most bytes come from, or go to for a source; -1 for none."""
    best = np.full(len(q), -1, np.int64)
    for end, other in ((q.src, q.dst), (q.dst, q.src)):
        order = np.lexsort((-other, q.size, end))
        # Where several values are written to one element, the last, and heaviest, stays.
        best[end[order]] = other[order]
    return best


def _hashes(n: int) -> Hashes:
    """Return the first `n` numbers of splitmix64, equal on all machines."""
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _sums(terms: Hashes, at: Ints) -> Hashes:
    """Return the sums (mod 2^64) of the terms between successive offsets."""
    running: Hashes = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
    return np.asarray(running[at[1:]] - running[at[:-1]], np.uint64)
