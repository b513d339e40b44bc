"""Bundles of a graph whose durations were measured, or are guesses from what is alike.

`select.bundle` cuts a model, whose nodes are projected from their operators.  Here the nodes are tasks of somebody
else's graph.  Of the partitions that are looked at, the one that is projected to end first is taken, if it gains:

    projected(bundles, seconds) <= projected(tasks, seconds, half of the overheads of tasks that may be bundled)
    projected(bundles, most)    <= projected(tasks, most) x 1.05

The overheads are the projection's largest error: a quiet machine has half of them, and a bundle costs more than a task.
Rows of 8 points on 2 workers, by pairs, were projected to take 0.9 of the time, and took 1.15 of it.  Merging down
chains alone needs no such margin: their tasks wait for each other anyway.  `most` differs from `seconds` for guesses
alone: a guess that is too short makes bundles that are too long.

Tasks that take less than was estimated are no risk: bundles that are too small still save overhead.  Nor may
the results that are in memory at a time be projected to take more than 1.05 times what those of the graph as it is do,
beyond an allowance: bundles keep results for longer.

A task has a kind: tasks of different kinds are never in one bundle, and a task of kind `ALONE` is one by itself.  It
also has a share of what a bundle may hold, in bytes or by any other limit; the shares of a bundle's tasks add up to
at most 1. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np

from dask_ferro.graph.bundling.coarsen import LARGE, Coarseness, coarsened
from dask_ferro.graph.bundling.makespan import DASK, Overheads, lower_bound, makespan
from dask_ferro.graph.bundling.partition import Bundles, Dag, Floats, Ints, Quotient, finest
from dask_ferro.graph.bundling.peak import Ranks, as_numbered, as_sent, handed_out, peak_bytes

# The kind of a task that is never bundled.
ALONE = -1
# A bundle's seconds at most: what the death of a worker costs.
LONGEST = 1.0
# Projections, of seconds or bytes, that differ by less are equal.
EQUAL = 0.05
# Up to so many tasks, each grain packs the graph afresh; beyond that, packing takes longer than it gains.
SMALL = 512
# Of a larger graph, merging along edges that leaves more of the pieces than this is not tried again.
FEW = 0.9
# Of the bytes that single tasks hand out, the most that bundles may, where memory is short.
HANDED_OUT = 0.75
# Pieces of all partitions whose peaks are projected, for each task: of a large graph, that takes seconds.
PEAKS = 2
FREE = Overheads(task_s=0.0, hop_s=0.0, bytes_per_s=inf, dispatch_s=0.0)
# Kinds that are bundled, the most frequent ones.  Each costs a pass over the graph: of a small one, more are.
KINDS, MOST_KINDS, PASSES = 8, 64, 400_000


@dataclass(frozen=True)
class TaskDag:
    """A graph of tasks, and what may be bundled.

    Parameters
    ----------
    dag : Dag
        With the estimated seconds; those of tasks of kind `ALONE` may be a guess.
    kinds : sequence of int
        Of each task, `ALONE` or a number from 0.
    shares : sequence of float
        Of each task, its part of what one bundle may hold: from 0 up; a task of more than 1 is a bundle by itself.
    most : sequence of float, optional
        The seconds that each task may take; without it, the estimates are as good as measured.
    """

    dag: Dag
    kinds: Sequence[int]
    shares: Sequence[float]
    most: Sequence[float] = ()


class _TaskArrays(NamedTuple):
    """The tasks' seconds, kinds, shares and longest seconds, as arrays; no longest seconds: there is no guess."""

    seconds: Floats
    kinds: Ints
    shares: Floats
    most: Floats

    def at_most(self, q: Quotient) -> Quotient:
        """Return a partition with the seconds that its tasks may take."""
        seconds = np.bincount(q.piece_of, weights=self.most, minlength=len(q))
        return replace(q, seconds=seconds.astype(np.float64))


class _Projection(NamedTuple):
    """The projection of makespans."""

    workers: int
    overheads: Overheads

    def of(self, q: Quotient) -> float:
        return makespan(as_sent(q, self.overheads), workers=self.workers, overheads=self.overheads)

    def least(self, q: Quotient) -> float:
        """Return a bound that no schedule of the partition beats; it is vectorized, the projection is a loop."""
        return lower_bound(as_sent(q, self.overheads), workers=self.workers, overheads=self.overheads)

    def alone(self, base: Quotient) -> float:
        """Return the projection for the tasks as they are; what holds against its bound holds against it, too."""
        return self.of(base) if len(base) <= LARGE else self.least(base)


class _Alternative(NamedTuple):
    """A partition and its projected makespan."""

    projected: float
    partition: Quotient


def bundle_tasks(
    work: TaskDag,
    *,
    workers: int,
    allowance: float = inf,
    ranks: Ranks = as_numbered,
    overheads: Overheads = DASK,
) -> Bundles:
    """Return the bundles of a graph of tasks: tasks ascending in each, bundles in a topological order.

    Parameters
    ----------
    work : TaskDag
    workers : int
        Tasks that run at a time.
    allowance : float
        Bytes that results may take in memory at a time, whatever those of single tasks do.
    ranks : callable
        Returns the rank of each bundle, given those that each one waits for: of ready ones, the least runs first.
    overheads : Overheads

    Raises
    ------
    ValueError
        Edges that do not go forward; kinds and shares that are not one for each task; seconds or shares that are
        negative or not a number; no worker; or a task that costs nothing beside its own seconds.

    Examples
    --------
    Four tasks of 1 ms one after the other, the last of which has to be by itself:

    >>> dag = Dag([1e-3] * 4, [(0, 1, 8.0), (1, 2, 8.0), (2, 3, 8.0)])
    >>> bundle_tasks(TaskDag(dag, [0, 0, 0, ALONE], [0.0] * 4), workers=2)
    ((0, 1, 2), (3,))
    """
    if workers < 1 or not overheads.task_s > 0:
        raise ValueError(f"got {workers} workers and task_s={overheads.task_s}, wanted 1 or more, and over 0")
    tasks = _arrays(work)
    base = finest(work.dag)
    if len(base) < 2 or not (tasks.kinds != ALONE).any():
        return base.bundles()
    is_tight = handed_out(base).sum() > allowance
    found = _gaining(base, tasks, _Projection(workers, overheads), is_tight)
    if is_tight:
        peak = partial(peak_bytes, workers=workers, overheads=overheads, ranks=ranks)
        found = _fitting(found, allowance, lambda q: peak(as_sent(q, overheads)))
    bundles = _chosen(found).partition.bundles()
    return tuple(chain.from_iterable(_within(bundle, tasks.shares) for bundle in bundles))


def _gaining(base: Quotient, tasks: _TaskArrays, project: _Projection, is_tight: bool) -> list[_Alternative]:
    """Return the tasks as they are, and partitions that gain, until one is as good as the bound of all."""
    workers, overheads = project
    found = [single := _Alternative(project.alone(base), base)]
    # Merging saves nothing of what tasks cost that are by themselves.
    spent = np.bincount(base.piece_of, weights=(tasks.kinds == ALONE) * overheads.task_s, minlength=len(base))
    # What a partition gains has to be more than half of what tasks are assumed to cost.
    halves = {name: getattr(overheads, name) / 2 for name in ("task_s", "hop_s", "dispatch_s")}
    half = project._replace(overheads=replace(overheads, **halves))
    enough = half.alone(replace(base, seconds=base.seconds + spent / 2))
    chains = _packed(base, tasks, Coarseness(LONGEST, budget=0.0, cap=LONGEST, side_by_side=False))
    enough_of_chains = (1 - EQUAL) * single.projected if len(chains) < len(base) else enough
    bound = lower_bound(replace(base, seconds=base.seconds + spent), workers=workers, overheads=FREE)
    if bound > enough_of_chains:
        return found
    longest = (1 + EQUAL) * project.alone(tasks.at_most(base)) if len(tasks.most) else inf
    best = single.projected
    seen: set[bytes] = set()
    for partition in chain([chains], _partitions(base, tasks, workers, overheads, is_tight)):
        if (same := blake2b(partition.piece_of.tobytes(), digest_size=8).digest()) in seen:
            continue
        seen.add(same)
        most = enough_of_chains if partition is chains else enough
        if project.least(partition) > min(best, most) or (projected := project.of(partition)) > most:
            continue
        if longest < inf and project.of(tasks.at_most(partition)) > longest:
            continue
        found.append(_Alternative(projected, partition))
        best = min(best, projected)
        if best <= (1 + EQUAL) * bound:
            break
    return found


def _fitting(
    found: list[_Alternative], allowance: float, peak: Callable[[Quotient], float]
) -> list[_Alternative]:
    """Return the alternatives without the best ones whose results do not fit; the first is the tasks as they are."""
    if len(found) == 1:
        return found
    single = found[0]
    least = peak(single.partition)
    room = max(allowance, (1 + EQUAL) * least)
    if least > allowance:
        # A projection takes as long as Dask's own ordering of the graph.  Bundles that hand out most results keep them
        # for longer than single tasks do, and need none.
        most = HANDED_OUT * handed_out(single.partition).sum()
        found = [one for one in found if one is single or handed_out(one.partition).sum() <= most]
    left = PEAKS * max(LARGE, len(single.partition))
    while (best := _chosen(found)) is not single:
        left -= len(best.partition)
        if left < 0:
            return [single]
        if peak(best.partition) <= room:
            break
        found = [one for one in found if one is not best]
    return found


def _chosen(found: list[_Alternative]) -> _Alternative:
    """Return the alternative that ends first; of equals, the coarsest."""
    return min(found, key=lambda one: (one.projected, len(one.partition)))


def _within(bundle: tuple[int, ...], shares: Floats) -> Iterator[tuple[int, ...]]:
    """Cut a bundle whose shares are more than 1: packing fills bins up to their mean, and some a little more.

    In the order of the tasks, so that no cycle arises.
    """
    if len(bundle) == 1 or float(shares[list(bundle)].sum()) <= 1:
        yield bundle
        return
    start, total = 0, 0.0
    for end, task in enumerate(bundle):
        if end > start and total + shares[task] > 1:
            yield bundle[start:end]
            start, total = end, 0.0
        total += float(shares[task])
    yield bundle[start:]


def _arrays(work: TaskDag) -> _TaskArrays:
    n = len(work.dag.seconds)
    if len(work.kinds) != n or len(work.shares) != n or len(work.most) not in (0, n):
        raise ValueError(
            f"got {len(work.kinds)} kinds, {len(work.shares)} shares and {len(work.most)} longest seconds, wanted one"
            f" for each of {n} tasks"
        )
    seconds, shares, most = (np.asarray(a, np.float64) for a in (work.dag.seconds, work.shares, work.most))
    if not all((numbers >= 0).all() for numbers in (seconds, shares, most)):
        raise ValueError("seconds or shares of a task are negative or not a number, wanted 0 or more")
    if np.array_equal(seconds, most):
        most = most[:0]
    kinds = np.asarray(work.kinds, np.int64)
    if (kinds != ALONE).any():
        counts = np.bincount(kinds[kinds != ALONE])
        # Stable, so that of equally frequent kinds the first are kept, on every machine.
        kept = np.argsort(-counts, kind="stable")[: max(KINDS, min(MOST_KINDS, PASSES // n))]
        kinds = np.where(np.isin(kinds, kept[counts[kept] > 1]), kinds, ALONE)
    return _TaskArrays(seconds, kinds, shares, most)


def _partitions(
    base: Quotient, tasks: _TaskArrays, workers: int, overheads: Overheads, is_tight: bool
) -> Iterator[Quotient]:
    """Return partitions from fine to coarse: merged along edges and among siblings, then across whole levels too.

    Where memory is tight, along edges alone too: a result that is read where it is made takes none.

    A small graph is packed afresh for each grain, which balances best; a large one starts from the grain before.
    """
    total = float(tasks.seconds[tasks.kinds != ALONE].sum())
    grain = overheads.task_s
    most = min(LONGEST, max(4 * total, 8 * grain))
    kin = level = edges = base
    fresh, stuck = len(base) <= SMALL, False
    while grain <= most:
        how = Coarseness(grain, budget=grain, cap=grain)
        if not stuck:
            finer = base if fresh else kin
            kin = _packed(finer, tasks, how)
            # A further grain would merge as little, and costs a second at 100,000 tasks.
            stuck = not fresh and len(kin) > FEW * len(finer)
            if not stuck and len(kin) < len(base):
                yield kin
        if is_tight:
            edges = _packed(base if fresh else edges, tasks, replace(how, side_by_side=False))
            if len(edges) < len(base):
                yield edges
        finer = kin if fresh or len(kin) < len(level) else level
        level = _packed(finer, tasks, replace(how, lanes=workers))
        if len(level) < len(kin):
            yield level
        grain *= 2


def _packed(q: Quotient, tasks: _TaskArrays, how: Coarseness) -> Quotient:
    """Return `q` with pieces of one kind merged, kind by kind, while they fit the grain and their shares fit 1."""
    for kind in np.unique(tasks.kinds[tasks.kinds != ALONE]).tolist():
        kind_of = np.empty(len(q), np.int64)
        kind_of[q.piece_of] = tasks.kinds
        share = np.bincount(q.piece_of, weights=tasks.shares, minlength=len(q))
        weight = np.maximum(q.seconds, share * how.grain)
        # Passes merge no piece of more than a grain, so those of other kinds stay as they are.
        weight[kind_of != kind] = 4 * how.grain
        packed = coarsened(replace(q, seconds=weight), how)
        seconds = np.bincount(packed.piece_of, weights=tasks.seconds, minlength=len(packed))
        q = replace(packed, seconds=seconds.astype(np.float64))
    return q
