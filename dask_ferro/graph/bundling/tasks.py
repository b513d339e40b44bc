"""Bundles of a graph whose durations were measured, or are guesses from what is alike.

`plan.choose` cuts a model, whose nodes are projected from their operators.  Here the nodes are tasks of somebody
else's graph.  The partition of a series that is projected to end first is taken, if it gains:

    projected(bundles, seconds) <= projected(tasks, seconds, half of the overheads of tasks that may be bundled)
    projected(bundles, most)    <= projected(tasks, most) x 1.05

The overheads are the projection's largest error: a quiet machine has half of them, and a bundle costs more than a task.
Rows of 8 points on 2 workers, by pairs, were projected to take 0.9 of the time, and took 1.15 of it.  Tasks of a chain
wait for each other anyway: merging down chains alone needs no such margin.  `most` differs from `seconds` for guesses
alone: a guess that is too short makes bundles that are too long.

Tasks that take less than was estimated are a small risk, since bundles that are too small still save overhead.  What
reads from a bundle waits for all of it, so it may be ready a hop later.  If the tasks of random graphs take no time,
bundles are projected to take 0.89 to 0.96 of the time on average, and over 1.05 of it for none of 100 graphs.  The
results in memory at a time may be projected to take 1.05 times what those of the graph as it is do, and an allowance:
bundles keep results for longer.  Bytes that bundles are projected to move between workers beyond those that tasks move
count as if one link carried all of them: on 64 workers, roots in twelve bundles took 2.3 times as long, as all others
read from twelve workers.

A task has a kind: tasks of different kinds are never in one bundle, and a task of kind `SINGLETON` is one by itself.
It also has a share of what a bundle may hold, in bytes or by any other limit; the shares of a bundle's tasks add up to
at most 1. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

import numpy as np

from dask_ferro.graph.bundling.coarsen import SMALL, Limits, coarsen, series
from dask_ferro.graph.bundling.partition import (
    DASK,
    FREE,
    Bundles,
    Dag,
    Floats,
    Overheads,
    Quotient,
    Ranks,
    finest,
    lower_bound,
    make_quotient,
    output_bytes,
    peak,
    price,
    schedule,
)

# The kind of a task that is never bundled.
SINGLETON = -1
# A bundle's seconds at most: what the death of a worker costs.
LONGEST = 1.0
# Projections, of seconds or bytes, that differ by less are equal.
TOLERANCE = 0.05
# Pieces of all partitions whose peaks are projected, for each task: of a large graph, that takes seconds.
PEAKS = 2


@dataclass(frozen=True)
class TaskDag:
    """A graph of tasks, and what may be bundled."""

    # The seconds are estimates; those of tasks of kind `SINGLETON` may be a guess.
    dag: Dag
    # `SINGLETON`, or a number from 0.
    kinds: Sequence[int]
    # Parts of what one bundle may hold; a task of more than 1 is a bundle by itself.
    shares: Sequence[float] | Floats
    # The seconds that each task may take; (): the estimates are as good as measured.
    most: Sequence[float] = ()


def bundle_tasks(
    work: TaskDag,
    *,
    workers: int,
    allowance: float = inf,
    ranks: Ranks | None = None,
    overheads: Overheads = DASK,
) -> Bundles:
    """Return the bundles of a graph of tasks: tasks ascending in each, bundles in a topological order.

    Results may take `allowance` bytes in memory at a time, whatever those of single tasks do.  The ready bundle of
    least rank runs first; default: as they are numbered.  Four tasks of 1 ms in a chain, the last of which has to be by
    itself:

    >>> dag = Dag([1e-3] * 4, [(0, 1, 8.0), (1, 2, 8.0), (2, 3, 8.0)])
    >>> bundle_tasks(TaskDag(dag, [0, 0, 0, SINGLETON], [0.0] * 4), workers=2)
    ((0, 1, 2), (3,))
    """
    seconds, shares, most = (np.asarray(a, np.float64) for a in (work.dag.seconds, work.shares, work.most))
    base = finest(work.dag, np.asarray(work.kinds, np.int64), shares)
    if len(seconds) < 2 or not (base.kinds != SINGLETON).any():
        return base.bundles()
    search = _Search(
        base, most if len(most) and not np.array_equal(seconds, most) else None, workers, overheads
    )
    return search.chosen(allowance, ranks or (lambda sources: range(len(sources)))).bundles()


def project(dag: Dag, bundles: Bundles, *, workers: int, overheads: Overheads) -> float:
    """Return the projected seconds of bundles, or a bound below them if there are many."""
    return _projection(make_quotient(dag, bundles), workers, overheads)[0]


def _projection(q: Quotient, workers: int, overheads: Overheads) -> tuple[float, float]:
    """Return the projected seconds and the bytes moved, or bounds if there are many pieces."""
    sent = price(q, overheads)
    if len(q) > SMALL:
        return lower_bound(sent, workers=workers, overheads=overheads), inf
    plan = schedule(sent, workers=workers, overheads=overheads)
    return plan.seconds, plan.moved


@dataclass(frozen=True)
class _Search:
    """The search for the bundles of tasks: as they are, the seconds that they may take, and where they run."""

    base: Quotient
    most: Floats | None
    workers: int
    overheads: Overheads

    def chosen(self, allowance: float, ranks: Ranks) -> Quotient:
        """Return the partition that ends first, of those that gain and whose results fit."""
        is_tight = bool(output_bytes(self.base).sum() > allowance)
        found = sorted(self._gaining(is_tight), key=lambda one: (one[0], len(one[1])))
        if not is_tight or not found:
            return found[0][1] if found else self.base
        room = max(allowance, (1 + TOLERANCE) * self._peak(self.base, ranks))
        left = PEAKS * max(SMALL, len(self.base))
        for _, partition in found:
            left -= len(partition)
            if left < 0:
                break
            if self._peak(partition, ranks) <= room:
                return partition
        return self.base

    def _gaining(self, is_tight: bool) -> Iterator[tuple[float, Quotient]]:
        """Yield partitions that gain, each with its projected seconds, until one is as good as the bound of all."""
        base, overheads = self.base, self.overheads
        # Merging saves nothing of what tasks cost that are by themselves.
        spent = (base.kinds == SINGLETON) * overheads.task_s
        # The gain of a partition has to be more than half of what tasks are assumed to cost.
        halves = {name: getattr(overheads, name) / 2 for name in ("task_s", "hop_s", "dispatch_s")}
        half = replace(self, overheads=replace(overheads, **halves))
        best, moved = self._alone(base)
        # List scheduling may end later with less overhead.
        enough = min(best, half._alone(replace(base, seconds=base.seconds + spent / 2))[0])
        # What can be saved is less than projections can tell: other gains are chance.
        if enough > (1 - TOLERANCE / 2) * best:
            return
        bound = lower_bound(replace(base, seconds=base.seconds + spent), workers=self.workers, overheads=FREE)
        chains = coarsen(base, LONGEST, Limits(budget=0.0, are_levels_merged=False))
        of_chains = (1 - TOLERANCE) * best if len(chains) < len(base) else enough
        if bound > max(enough, of_chains):
            return
        longest = inf if self.most is None else (1 + TOLERANCE) * self._alone(self._at_most(base))[0]
        others = ((partition, enough) for partition in self._partitions(is_tight))
        for partition, wanted in chain([(chains, of_chains)], others):
            sent, most = price(partition, overheads), min(best, wanted)
            if lower_bound(sent, workers=self.workers, overheads=overheads, enough=most) > most:
                continue
            plan = schedule(sent, workers=self.workers, overheads=overheads)
            seconds = plan.seconds + max(0.0, plan.moved - moved) / overheads.bytes_per_s
            if seconds > wanted:
                continue
            if longest < inf and self._seconds(self._at_most(partition)) > longest:
                continue
            yield seconds, partition
            best = min(best, seconds)
            if best <= (1 + TOLERANCE) * bound:
                return

    def _partitions(self, is_tight: bool) -> Iterator[Quotient]:
        """Return partitions; where memory is tight, along edges alone too: what is read where it is made takes none."""
        # A bundle of one task's overhead gains half at most, and costs a fourth of the search.
        grain = 2 * self.overheads.task_s
        total = float(self.base.seconds[self.base.kinds != SINGLETON].sum())
        grains = [grain]
        while 2 * grains[-1] <= min(LONGEST, max(4 * total, 4 * grain)):
            grains.append(2 * grains[-1])
        how = Limits(budget=self.overheads.task_s, cap=LONGEST)
        edges = series(self.base, grains, Limits(budget=LONGEST, are_levels_merged=False)) if is_tight else ()
        return chain(series(self.base, grains, how), edges)

    def _at_most(self, q: Quotient) -> Quotient:
        """Return a partition with the seconds that its tasks may take."""
        seconds = np.bincount(q.piece_of, weights=self.most, minlength=len(q))
        return replace(q, seconds=seconds.astype(np.float64))

    def _seconds(self, q: Quotient) -> float:
        return schedule(price(q, self.overheads), workers=self.workers, overheads=self.overheads).seconds

    def _peak(self, q: Quotient, ranks: Ranks) -> float:
        sent = price(q, self.overheads)
        return peak(sent, schedule(sent, workers=self.workers, overheads=self.overheads, ranks=ranks))

    def _alone(self, q: Quotient) -> tuple[float, float]:
        """Return the projection for the tasks as they are; what holds against its bound holds against it, too."""
        return _projection(q, self.workers, self.overheads)
