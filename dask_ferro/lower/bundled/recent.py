"""Choices of bundles of recent graphs, for those that are computed again, as in a loop.

A choice holds for a graph of the same tasks, edges and kinds, while what is measured changes the seconds, the longest
seconds and the bytes of tasks that may be bundled by little in all, and no bundle holds more than it may.  That nothing
is bundled, as nothing gains or fits, holds for longer, since finding it out again would gain as little.  Graphs are
told apart by a digest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from dask_ferro.graph.bundling.partition import Bundles, Floats
from dask_ferro.graph.bundling.tasks import ALONE, TaskDag

# Of the seconds (or bytes) of all tasks, the sum of changes with which a choice still holds.
CHANGED = 0.25
# The same for the seconds of a graph of which nothing was bundled.
CHANGED_OF_NOTHING = 1.0
# Longer tasks count as long as this: one of them must not hide what changes in a thousand short ones.
LONG_S = 0.05
# Tasks of all graphs that are remembered, and tasks that a graph itself counts as: some 20 MB.
TASKS, GRAPH = 200_000, 50
# A task with a larger share of a bundle is told apart from others exactly: one that is wanted has such a share.
_LARGE = 0.5


class _LastChoice(NamedTuple):
    """Bundles; the seconds, longest seconds and shares of tasks that might be bundled, and the bytes of all edges."""

    seconds: Floats
    most: Floats
    shares: Floats
    nbytes: Floats
    bundles: Bundles

    def holds_for(self, now: _LastChoice, shares: Floats) -> bool:
        several = [bundle for bundle in self.bundles if len(bundle) > 1]
        change = CHANGED if several else CHANGED_OF_NOTHING
        pairs = ((self.shares, now.shares), (self.nbytes, now.nbytes))
        return (
            _is_near(self.seconds, now.seconds, change)
            and _is_near(self.most, now.most, change)
            and all(_is_near(a, b, CHANGED) for a, b in pairs)
            and all(float(shares[list(bundle)].sum()) <= 1 for bundle in several)
        )


class RecentChoices:
    """The bundles of recent graphs, the least recently used of which are forgotten first."""

    def __init__(self) -> None:
        self._choices: OrderedDict[bytes, _LastChoice] = OrderedDict()
        # Two graphs may be written out at a time, in two threads.
        self._lock = threading.Lock()

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
        seconds, shares = np.asarray(work.dag.seconds, np.float64), np.asarray(work.shares, np.float64)
        digest = _digest(work, shares, limits)
        is_free = (np.asarray(work.kinds, np.int64) != ALONE) & (shares <= _LARGE)
        nbytes = np.asarray(work.dag.edges, np.float64).reshape(-1, 3)[:, 2]
        most = np.asarray(work.most if len(work.most) else seconds, np.float64)
        short, long = np.minimum(seconds[is_free], LONG_S), np.minimum(most[is_free], LONG_S)
        now = _LastChoice(short, long, shares[is_free], nbytes, ())
        with self._lock:
            last = self._choices.get(digest)
            if last is not None and last.holds_for(now, shares):
                self._choices.move_to_end(digest)
                return last.bundles
        found = choose()
        with self._lock:
            self._choices[digest] = now._replace(bundles=found)
            self._choices.move_to_end(digest)
            total = sum(map(_size, self._choices.values()))
            while total > TASKS:
                total -= _size(self._choices.popitem(last=False)[1])
        return found


def _size(choice: _LastChoice) -> int:
    return GRAPH + 2 * len(choice.seconds) + len(choice.nbytes)


def _digest(work: TaskDag, shares: Floats, limits: tuple[float, ...]) -> bytes:
    made = blake2b(repr((len(shares), limits)).encode(), digest_size=16)
    made.update(np.asarray(work.dag.edges, np.float64).reshape(-1, 3)[:, :2].tobytes())
    made.update(np.asarray(work.kinds, np.int64).tobytes())
    made.update((shares > _LARGE).tobytes())
    return made.digest()


def _is_near(before: Floats, now: Floats, most: float) -> bool:
    """Return whether all changes are at most a part of the smaller sum."""
    return float(np.abs(now - before).sum()) <= most * min(float(before.sum()), float(now.sum()))
