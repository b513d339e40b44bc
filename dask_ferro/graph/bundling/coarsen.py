"""Merges of a graph's pieces to a grain, each a sweep that can never make a cycle.

*Along edges*: pieces are labelled in topological order, and a piece may join the last of the clusters that it waits
for.  New clusters have rising numbers, so every edge leads to a higher one, and there is no cycle.  The same sweep from
the end has pieces join those that wait for them.

*Across a level*, the longest distance from a source, which rises along every edge: first pieces that read most from
the same piece, then all.

A grain is the seconds that a piece should be worth.  Merging down a chain loses nothing; along another edge it delays
the pieces that wait for the first half, so it has a budget; across a level it gives up parallel work worth up to a
grain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from dask_ferro.graph.bundling.partition import Floats, Ints, Quotient, merge

# Up to so many pieces, each grain merges the graph afresh, which balances best; beyond that, it takes too long.
SMALL = 4096
# A round that leaves more of the pieces than this is the last; one that leaves more than `PACKING` packs whole levels.
MIN_SHRINKAGE, LARGE_SHRINKAGE, PACKING = 0.95, 0.8, 0.9
# Grains up to which a chain is merged: what cuts it gains only where chains do not divide by the workers.
CHAIN = 4
# A share of a grain: equal shares of the work that fill a grain exactly must not need one more bin.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Limits:
    """Bounds up to which pieces are merged."""

    # Seconds that one piece may take over from neighbours while others wait for it.
    budget: float
    # Whether pieces of a level are merged, too; along edges alone, results are read where they are made.
    are_levels_merged: bool = True
    # Seconds beyond which a chain is cut, though it may be longer than a grain.
    cap: float = inf


def series(base: Quotient, grains: Sequence[float], how: Limits) -> Iterator[Quotient]:
    """Yield partitions from fine to coarse, one for each grain in seconds, ascending, that merges more."""
    finer = base
    for grain in grains:
        q = coarsen(base if len(base) <= SMALL else finer, grain, how)
        if len(q) < len(finer):
            yield q
        finer = q
        if len(q) == 1:
            return


def coarsen(q: Quotient, grain: float, how: Limits) -> Quotient:
    """Return `q` with pieces merged until they are worth about a grain, or a round merges few."""
    while True:
        before = len(q)
        q = _merge_chains(_merge_chains(q, grain, how, down=True), grain, how, down=False)
        if how.are_levels_merged:
            q, level = _merge_level(q, _levels(q), grain, kin=True)
            # Last, since this gives up parallel work of other parts: only when the merges above find little more.
            if len(q) > PACKING * before:
                q, level = _merge_level(q, level, grain, kin=False)
        if len(q) > (MIN_SHRINKAGE if before <= SMALL else LARGE_SHRINKAGE) * before:
            return q


def _merge_chains(q: Quotient, grain: float, how: Limits, *, down: bool) -> Quotient:
    """Merge pieces into those that they wait for (`down`), or that wait for them.

    A piece that waits for a cluster for which nothing else waits joins it as the next link of a chain; others join up
    to the budget.  A piece of a cluster may wait for what the cluster itself waits for, too.
    """
    n = len(q)
    if down:
        at, near, beyond = q.pred_at, q.src[q.into], np.diff(q.succ_at)
    else:
        at, near, beyond = q.succ_at, q.dst, np.diff(q.pred_at)
    limit, most = grain * (1 + ROUNDING), min(how.budget, grain) * (1 + ROUNDING)
    longest = max(min(CHAIN * grain, how.cap), grain) * (1 + ROUNDING)
    piece = np.repeat(np.arange(n), np.diff(at))
    inner_readers = np.bincount(near, weights=beyond[piece] > 0, minlength=n).astype(np.int64)
    fits = (q.kinds >= 0) & (q.seconds < longest) & (np.diff(at) > 0)
    small = q.seconds <= most
    if not small.any():
        # All merges are down chains: what a piece may join has a member with no other such reader.
        fits &= np.bincount(piece, weights=inner_readers[near] <= 1, minlength=n) > 0
    # A cluster has the place of its first piece in the sweep, under which it has its facts: seconds, shares, what it
    # took over, its edges to later pieces, and those to pieces that others wait for.
    places = np.arange(n) if down else np.arange(n)[::-1]
    label = places.tolist()
    total, share, kind = (column[places].tolist() for column in (q.seconds, q.shares, q.kinds))
    ahead, inner = beyond[places].tolist(), inner_readers[places].tolist()
    taken = [0.0] * n
    offset, neighbours, of_piece = at.tolist(), near.tolist(), label.__getitem__
    are_small, on_spine = small.tolist(), (beyond > 0).tolist()
    for v in np.flatnonzero(fits)[:: 1 if down else -1].tolist():
        labels = [*map(of_piece, neighbours[offset[v] : offset[v + 1]])]
        home, own = max(labels), label[v]
        inside = labels.count(home)
        # No other piece waits for the cluster, or those alone that nothing waits for.
        is_next = ahead[home] == inside or (on_spine[v] and inner[home] == inside)
        mine = total[own]
        if (
            not (is_next or (are_small[v] and taken[home] + mine <= most))
            or kind[home] != kind[own]
            or total[home] + mine > (longest if is_next else limit)
            or share[home] + share[own] > 1
        ):
            continue
        if inside < len(labels):
            first = home if down else n - 1 - home
            before = {home, *map(of_piece, neighbours[offset[first] : offset[first + 1]])}
            if not before.issuperset(labels):
                continue
        label[v] = home
        total[home] += mine
        share[home] += share[own]
        taken[home] += 0.0 if is_next else mine
        # A piece that nothing waits for is no inner reader.
        inner[home] += inner[own] - (inside if ahead[own] else 0)
        ahead[home] += ahead[own] - inside
    made = np.asarray(label, np.int64)
    number = np.cumsum(np.bincount(made, minlength=n) > 0) - 1
    if number[-1] == n - 1:
        return q
    return merge(q, number[made] if down else number[-1] - number[made])


def _merge_level(q: Quotient, level: Ints, grain: float, *, kin: bool) -> tuple[Quotient, Ints]:
    """Merge pieces of a level up to a grain, side by side those that read most from the same piece, or only them.

    Also return the levels of what was made, which are those of its pieces.
    """
    favourite = _favourite(q)
    # A piece may hold no more than its share, as it may take no longer than a grain.
    weight = np.maximum(q.seconds, q.shares * grain)
    order = np.lexsort((favourite, q.kinds, level))
    order = order[(q.kinds[order] >= 0) & (weight[order] < grain)]
    if kin:
        order = order[favourite[order] >= 0]
    if not len(order):
        return q, level
    columns = (level, q.kinds, favourite) if kin else (level, q.kinds)
    group = _groups([column[order] for column in columns])
    total = np.bincount(group, weights=weight[order])
    small = (weight[order] <= grain / 2) | (total[group] <= grain * (1 + ROUNDING))
    order, group = order[small], group[small]
    mine = weight[order]
    total = np.bincount(group, weights=mine, minlength=len(total))
    bins = np.maximum(1, np.ceil(total / grain - ROUNDING))
    before = np.cumsum(mine) - mine
    first = np.searchsorted(group, group)
    share = np.where(total > 0, bins / np.where(total > 0, total, 1.0), 0.0)
    place = np.minimum(np.floor((before - before[first] + mine / 2) * share[group]), bins[group] - 1)
    head = np.arange(len(q))
    held = 0.0
    last = -1
    shares = q.shares.tolist()
    for v, where in zip(order.tolist(), _groups([group, place]).tolist(), strict=True):
        if where != last or held + shares[v] > 1:
            last, held, start = where, 0.0, v
        held += shares[v]
        head[v] = start
    # Labels in topological order of clusters, of which each is within a level.
    heads = np.flatnonzero(head == np.arange(len(q)))
    heads = heads[np.argsort(level[heads], kind="stable")]
    rank = np.empty(len(q), np.int64)
    rank[heads] = np.arange(len(heads))
    return merge(q, rank[head]), level[heads]


def _groups(columns: Sequence[Ints | Floats]) -> Ints:
    """Return a number for each run of rows that are equal in all columns."""
    differ = np.zeros(len(columns[0]), bool)
    for column in columns:
        differ[1:] |= column[1:] != column[:-1]
    return np.cumsum(differ)


def _levels(q: Quotient) -> Ints:
    """Return each piece's longest distance from a source."""
    level = [0] * len(q)
    at, sources = q.pred_at.tolist(), q.src[q.into].tolist()
    for v in range(len(q)):
        if at[v] < at[v + 1]:
            level[v] = 1 + max(map(level.__getitem__, sources[at[v] : at[v + 1]]))
    return np.asarray(level, np.int64)


def _favourite(q: Quotient) -> Ints:
    """Return for each piece the neighbour that most bytes come from, or go to for a source; -1 for none."""
    best = np.full(len(q), -1, np.int64)
    for end, other in ((q.src, q.dst), (q.dst, q.src)):
        order = np.lexsort((-other, q.size, end))
        # Where several values are written to one element, the last, and heaviest, stays.
        best[end[order]] = other[order]
    return best
