"""Choices of bundles of recent graphs, for those that are computed again, as in a loop.

A choice holds for a graph of the same tasks, edges and kinds, while what is measured changes the seconds, the longest
seconds and the bytes of tasks that may be bundled by little in all, and no bundle holds more than it may.  Graphs are
told apart by a digest.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from dask_ferro.engines.cache import Cache
from dask_ferro.graph.bundling.partition import Bundles, Floats
from dask_ferro.graph.bundling.tasks import ALONE, TaskDag

# Of the seconds (or bytes) of all tasks, the sum of changes with which a choice still holds.
CHANGED = 0.25
# Longer tasks count as long as this: one of them must not hide what changes in a thousand short ones.
LONG_S = 0.05
# Numbers of all graphs that are remembered, and those that a graph itself counts as: some 20 MB.
NUMBERS, GRAPH = 1_000_000, 250
# A task with a larger share of a bundle is told apart from others exactly: one that is wanted has such a share.
_LARGE = 0.5


class _Choice(NamedTuple):
    """Bundles; the seconds, longest seconds and shares of tasks that might be bundled, and the bytes of all edges."""

    bundles: Bundles
    facts: tuple[Floats, ...]

    @property
    def nbytes(self) -> int:
        return GRAPH + sum(map(len, self.facts))

    def holds_for(self, facts: tuple[Floats, ...], shares: Floats) -> bool:
        return all(map(_is_near, self.facts, facts)) and all(
            float(shares[list(bundle)].sum()) <= 1 for bundle in self.bundles if len(bundle) > 1
        )


class RecentChoices:
    """The bundles of recent graphs, the least recently used of which are forgotten first."""

    def __init__(self) -> None:
        self._choices: Cache[_Choice] = Cache(NUMBERS)

    def bundles(self, work: TaskDag, limits: tuple[float, ...], choose: Callable[[], Bundles]) -> Bundles:
        """Return the bundles of a graph, from its last choice if that still holds.

        Parameters
        ----------
        work : TaskDag
        limits : tuple of numbers
            What else decides: workers, bytes.
        choose : callable
            Returns the bundles.
        """
        kinds, shares = np.asarray(work.kinds, np.int64), np.asarray(work.shares, np.float64)
        edges = np.asarray(work.dag.edges, np.float64).reshape(-1, 3)
        digest = blake2b(repr((len(shares), limits)).encode(), digest_size=16)
        for array in (edges[:, :2], kinds, shares > _LARGE):
            digest.update(array.tobytes())
        is_free = (kinds != ALONE) & (shares <= _LARGE)
        seconds, most = (
            np.minimum(np.asarray(each, np.float64)[is_free], LONG_S)
            for each in (work.dag.seconds, work.most or work.dag.seconds)
        )
        facts = seconds, most, shares[is_free], edges[:, 2]
        choice = self._choices.get(
            digest.digest(), lambda: _Choice(choose(), facts), lambda last: last.holds_for(facts, shares)
        )
        return choice.bundles


def _is_near(before: Floats, now: Floats) -> bool:
    """Return whether all changes are at most a part of the smaller sum."""
    return float(np.abs(now - before).sum()) <= CHANGED * min(float(before.sum()), float(now.sum()))
