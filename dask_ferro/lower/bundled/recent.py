"""Choices of bundles of recent graphs, for those that are computed again, as in a loop.

A choice holds for a graph of the same tasks, edges and kinds, while what is measured changes seconds and
bytes by little.  Graphs are told apart by a digest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from dask_ferro.graph.bundling.partition import Bundles, Floats
from dask_ferro.graph.bundling.tasks import TaskDag

# Of the seconds (or bytes) of all tasks, the sum of changes with which a choice still holds.
CHANGED = 0.25
# Tasks of all graphs that are remembered: some 20 MB.
TASKS = 200_000
# A task with a larger share of a bundle is told apart from others exactly: one that is wanted has such a share.
_LARGE = 0.5


class _LastChoice(NamedTuple):
    seconds: Floats
    shares: Floats
    bundles: Bundles


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
        with self._lock:
            last = self._choices.get(digest)
            if last is not None and _is_near(last.seconds, seconds) and _is_near(last.shares, shares):
                self._choices.move_to_end(digest)
                return last.bundles
        found = choose()
        with self._lock:
            self._choices[digest] = _LastChoice(seconds, shares, found)
            self._choices.move_to_end(digest)
            total = sum(len(choice.seconds) for choice in self._choices.values())
            while total > TASKS:
                total -= len(self._choices.popitem(last=False)[1].seconds)
        return found


def _digest(work: TaskDag, shares: Floats, limits: tuple[float, ...]) -> bytes:
    made = blake2b(repr((len(shares), limits)).encode(), digest_size=16)
    made.update(np.asarray([edge[:2] for edge in work.dag.edges], np.int64).tobytes())
    made.update(np.asarray(work.kinds, np.int64).tobytes())
    made.update((shares > _LARGE).tobytes())
    return made.digest()


def _is_near(before: Floats, now: Floats) -> bool:
    return float(np.abs(now - before).sum()) <= CHANGED * float(before.sum())
