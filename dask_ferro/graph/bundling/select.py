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

from typing import Literal, TypeAlias

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.coarsen import SMALL, Limits, coarsened, series
from dask_ferro.graph.bundling.makespan import DASK, FREE, lower_bound, scheduled
from dask_ferro.graph.bundling.partition import Bundles, Dag, Quotient, finest, merged

Granularity: TypeAlias = Literal["auto", "op", "model"] | float

# Projections are less exact than this: the durations of a kernel spread more.
TOLERANCE = 0.03
# Finer grains are not tried: such pieces cost the scheduler more than they balance.
PIECES_PER_WORKER = 1024


def bundle(dag: Dag, granularity: Granularity = "auto", *, workers: int) -> Bundles:
    """Return the bundles of `dag`: nodes ascending in each, bundles in a topological order.

    Parameters
    ----------
    dag : Dag
    granularity : {"auto", "op", "model"} or float
        "op" is one node a bundle (glued ones together), "model" one bundle, a number pieces of about that
        many seconds; "auto" is the least projected makespan.
    workers : int
        How many bundles can run at a time.

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
        return _auto(base, workers).bundles()
    if isinstance(granularity, str) or not granularity > 0:
        raise ConfigError(
            f"granularity: got {granularity!r}, wanted 'auto', 'op', 'model' or a positive number of seconds"
        )
    grain = float(granularity)
    if sum(dag.seconds) <= grain:
        return (tuple(range(len(dag.seconds))),)
    return coarsened(base, grain, Limits(budget=grain, lanes=1, cap=grain)).bundles()


def _auto(base: Quotient, workers: int) -> Quotient:
    """Return the partition of least projected makespan, by the rules in the module's docstring."""
    whole = merged(base, np.zeros(len(base), np.int64))
    alone = best = scheduled(whole, workers=workers, overheads=DASK).seconds
    bound = lower_bound(base, workers=workers, overheads=FREE) + DASK.task_s + DASK.dispatch_s
    if alone <= _enough(bound):
        return whole
    how = Limits(budget=DASK.task_s, lanes=workers)
    candidates: list[tuple[float, Quotient]] = []
    # The coarsest is projected fastest, and what it takes rules finer ones out.
    for partition in reversed([base, *series(base, _grains(base, workers), how)]):
        if lower_bound(partition, workers=workers, overheads=DASK, enough=_enough(best)) <= _enough(best):
            projected = scheduled(partition, workers=workers, overheads=DASK).seconds
            candidates.append((projected, partition))
            best = min(best, projected)
    if alone <= (enough := _enough(best)):
        return whole

    def preference(candidate: tuple[float, Quotient]) -> tuple[int, int, float]:
        projected, partition = candidate
        # Pieces below the cost of a task keep no worker busy.
        worthy = int((partition.seconds >= DASK.task_s).sum())
        return abs(worthy - workers), len(partition), projected

    return min((c for c in candidates if c[0] <= enough), key=preference)[1]


def _enough(best: float) -> float:
    """Return the seconds up to which a projection is no worse than `best`, as far as it can tell."""
    return best + max(TOLERANCE * best, DASK.hop_s)


def _grains(base: Quotient, workers: int) -> list[float]:
    """Return the grains to try, in seconds: a worker's share of the work by powers of two, above a hop."""
    work = float(base.seconds.sum())
    least = max(DASK.task_s + DASK.hop_s, work / workers / PIECES_PER_WORKER)
    if len(base) > SMALL:
        least = max(least, work / len(base))
    grain = work / workers
    while grain / 2 >= least:
        grain /= 2
    grains = []
    while grain < work:
        grains.append(grain)
        grain *= 2
    return grains
