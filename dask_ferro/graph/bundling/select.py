"""Choice of bundles: few, and as many as keep the workers busy.

A task costs about 2.3 ms of CPU and a hop between tasks 6 ms, so a bundle has to be worth many of those.
"auto" does not guess how many: it merges the graph at a series of grains, projects the makespan of each
partition by list scheduling, and keeps the one that ends first; what is within `TOLERANCE` or one hop of it
counts as equal, and then one bundle wins, else the number of bundles nearest to the number of workers.

Rules.  Every node is in exactly one bundle.  Bundles are convex: the graph between them has no cycle.  Glued
edges are never cut.  The same graph gives the same bundles, everywhere.  Integers in, integers out: durations
are seconds, sizes bytes, and what a node computes is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.coarsen import LARGE, Coarseness, chains, coarsened
from dask_ferro.graph.bundling.makespan import DASK, Overheads, lower_bound, makespan, project
from dask_ferro.graph.bundling.partition import Bundles, Dag, Quotient, finest, merged, quotient_edges

__all__ = ["Bundles", "Dag", "Granularity", "Overheads", "bundle", "project", "quotient_edges"]

Granularity: TypeAlias = Literal["auto", "op", "model"] | float

# Projections are less exact than this: the durations of a kernel spread more.
TOLERANCE = 0.03
# Finer grains are not tried: such pieces cost the scheduler more than they balance.
PIECES_PER_WORKER = 1024
FREE = Overheads(task_s=0.0, hop_s=0.0, bytes_per_s=inf, dispatch_s=0.0)
# A multiple of the lower bound: below it, no further way of merging is tried.
ENOUGH = 1.05
# A further way of merging costs a second at 100,000 nodes.
ENOUGH_OF_LARGE = 1.5


def bundle(
    dag: Dag, granularity: Granularity = "auto", *, workers: int, overheads: Overheads = DASK
) -> Bundles:
    """Return the bundles of `dag`: nodes ascending in each, bundles in a topological order.

    Parameters
    ----------
    dag : Dag
    granularity : {"auto", "op", "model"} or float
        "op" is one node a bundle (glued ones together), "model" one bundle, a number pieces of about that
        many seconds; "auto" is the least projected makespan.
    workers : int
        How many bundles can run at a time.
    overheads : Overheads

    Returns
    -------
    tuple of tuple of int

    Raises
    ------
    ConfigError
        The granularity or the number of workers is not valid.
    ValueError
        Edges that do not go forward.

    Examples
    --------
    Two branches worth a task each, then a join:

    >>> dag = Dag([0.0, 0.1, 0.1, 0.0], [(0, 1, 8.0), (0, 2, 8.0), (1, 3, 8.0), (2, 3, 8.0)])
    >>> bundle(dag, workers=2)
    ((0,), (1,), (2,), (3,))
    >>> bundle(dag, workers=1)
    ((0, 1, 2, 3),)
    """
    if workers < 1:
        raise ConfigError(f"workers: got {workers}, wanted 1 or more")
    if granularity == "model":
        return (tuple(range(len(dag.seconds))),) if dag.seconds else ()
    base = finest(dag)
    if granularity == "op" or len(base) < 2:
        return base.bundles()
    if granularity == "auto":
        return _auto(base, workers, overheads).bundles()
    if isinstance(granularity, str) or not granularity > 0:
        raise ConfigError(
            f"granularity: got {granularity!r}, wanted 'auto', 'op', 'model' or a positive number of seconds"
        )
    grain = float(granularity)
    if sum(dag.seconds) <= grain:
        return (tuple(range(len(dag.seconds))),)
    return coarsened(base, Coarseness(grain, budget=grain, cap=grain, lanes=1)).bundles()


def bundled(
    dag: Dag, granularity: Granularity, *, workers: int, overheads: Overheads
) -> tuple[Bundles, float]:
    """Return the bundles of `dag`, as `bundle` does, and their projected makespan in seconds."""
    found = bundle(dag, granularity, workers=workers, overheads=overheads)
    return found, project(dag, found, workers=workers, overheads=overheads)


class Candidate(NamedTuple):
    """A partition and its projected makespan in seconds."""

    projected: float
    partition: Quotient


def _auto(base: Quotient, workers: int, overheads: Overheads) -> Quotient:
    """Return the partition of least projected makespan, by the rules in the module's docstring."""
    whole = merged(base, np.zeros(len(base), np.int64))
    alone = best = makespan(whole, workers=workers, overheads=overheads)
    bound = lower_bound(base, workers=workers, overheads=FREE) + overheads.task_s + overheads.dispatch_s
    if _equal(alone, bound, overheads):
        return whole
    candidates = [Candidate(alone, whole)]
    for tried, way in enumerate(_ways(base, workers, overheads)):
        for partition in way:
            # The bound is vectorized; a projection is a loop over all pieces.
            if not _equal(lower_bound(partition, workers=workers, overheads=overheads), best, overheads):
                continue
            projected = makespan(partition, workers=workers, overheads=overheads)
            candidates.append(Candidate(projected, partition))
            best = min(best, projected)
        enough = ENOUGH_OF_LARGE if tried and len(base) > LARGE else ENOUGH
        if best <= enough * bound + overheads.hop_s:
            break
    return _chosen(candidates, workers, overheads)


def _equal(projected: float, best: float, overheads: Overheads) -> bool:
    """Return whether `projected` is no worse than `best`, as far as a projection can tell."""
    return projected <= best + max(TOLERANCE * best, overheads.hop_s)


def _chosen(candidates: list[Candidate], workers: int, overheads: Overheads) -> Quotient:
    """Return one bundle if it is as good as the best, else about as many as workers."""
    alone, best = candidates[0], min(c.projected for c in candidates)
    if _equal(alone.projected, best, overheads):
        return alone.partition
    # Equal within the tolerance, but never a longer makespan than without any cut.
    good = [c for c in candidates if _equal(c.projected, best, overheads) and c.projected <= alone.projected]

    def preference(c: Candidate) -> tuple[int, int, float]:
        # Pieces below the cost of a task keep no worker busy.
        worthy = int((c.partition.seconds >= overheads.task_s).sum())
        return abs(worthy - workers), len(c.partition), c.projected

    return min(good, key=preference).partition


def _ways(base: Quotient, workers: int, overheads: Overheads) -> Iterator[Iterator[Quotient]]:
    """Return series of partitions, each from fine to coarse, the most promising series first."""
    grains = _grains(base, workers, overheads)
    yield _series(base, grains, workers, overheads)
    yield iter([base])
    yield _spines(base, grains, overheads)
    if len(base) <= LARGE:
        yield _cut_chains(base, grains, workers, overheads)


def _grains(base: Quotient, workers: int, overheads: Overheads) -> list[float]:
    """Return the grains to try, in seconds: a worker's share of the work by powers of two, above a hop."""
    work = float(base.seconds.sum())
    least = max(overheads.task_s + overheads.hop_s, work / workers / PIECES_PER_WORKER)
    if len(base) > LARGE:
        least = max(least, work / len(base))
    grain = work / workers
    while grain / 2 >= least:
        grain /= 2
    grains = []
    while grain < work:
        grains.append(grain)
        grain *= 2
    return grains


def _series(base: Quotient, grains: list[float], lanes: int, overheads: Overheads) -> Iterator[Quotient]:
    """Merge only pieces that share neighbours, which keeps branches apart; from each grain on, also across levels.

    A small graph is packed afresh at each grain, which balances best; a large one starts from the grain
    before.
    """
    start = kin = level = merged(base, chains(base))
    fresh, stuck = len(start) <= LARGE, False
    for grain in grains:
        budget = min(overheads.task_s, grain)
        if not stuck:
            finer = start if fresh else kin
            kin = coarsened(finer, Coarseness(grain, budget))
            stuck = not fresh and len(kin) > 0.9 * len(finer) > LARGE
            if not stuck:
                yield kin
        coarser = kin if fresh or len(kin) < len(level) else level
        level = coarsened(coarser, Coarseness(grain, budget, lanes=lanes))
        if len(level) < len(kin):
            yield level
        if len(level) == 1:
            return


def _spines(base: Quotient, grains: list[float], overheads: Overheads) -> Iterator[Quotient]:
    """Merge along edges up to a grain first, for long chains that other work hangs from."""
    q = base
    for grain in grains:
        finer, q = q, coarsened(q, Coarseness(grain, min(overheads.task_s, grain), spine=grain))
        if len(q) > 0.6 * len(finer) > LARGE:
            # Too short to be a spine.
            return
        yield q


def _cut_chains(base: Quotient, grains: list[float], lanes: int, overheads: Overheads) -> Iterator[Quotient]:
    """Cut chains at a grain, for a few long ones that do not divide by the workers."""
    for grain in grains:
        yield coarsened(base, Coarseness(grain, min(overheads.task_s, grain), cap=grain, lanes=lanes))
