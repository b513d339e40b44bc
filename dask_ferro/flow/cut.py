"""Cut a graph into parts that run one after another, because one flow would last too long.

    0 1 2 │ 3 4 5 │ a │ 6 7      tasks in a topological order, `a` on its own; the values that cross a line are picked

Parts are neighbours in one topological order: no part waits for a later one, and nothing outside of a part is both
before and after its tasks.  A part that does not fit is cut near the middle of its seconds, at the place that the
fewest values cross.  Tasks are ordered by their numbers, which is depth first, so that few values cross anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np

from dask_ferro.graph.bundling.partition import Floats, Ints

Part = TypeVar("Part")
Plan: TypeAlias = Callable[[Ints, float], Part | None]
# Maximum distance of a cut from the middle of a part, as a share of the part's seconds.
_MAX_OFFSET = 1 / 8


def cut_graph(
    seconds: Floats, edges: Floats, inside: Sequence[bool], plan: Plan[Part], most: int
) -> list[Part]:
    """Return the parts of a graph in the order in which they run; [] if there would be more than `most`.

    Tasks are in a topological order.  A row of `edges` is (task, its reader, bytes); edges are sorted by their
    readers. A task that is not `inside` is a part on its own.  `plan(tasks, crossing)` returns the part of some tasks
    while `crossing` bytes of results that cross its bounds are in memory, or None if it does not fit.
    """
    order, spans = sort_tasks(edges, inside)
    src, dst = np.argsort(order)[edges[:, :2].T.astype(np.int64)]
    last, nbytes = np.arange(len(order)), np.zeros(len(order))
    np.maximum.at(last, src, dst)
    nbytes[src] = edges[:, 2]
    parts, left = list[Part](), spans[::-1]
    while left and len(parts) + len(left) <= most:
        start, stop = left.pop()
        crosses = last[:stop] >= np.where(np.arange(stop) < start, start, stop)
        part = plan(order[start:stop], float(nbytes[:stop][crosses].sum()))
        if part is not None:
            parts.append(part)
        elif stop - start > 1:
            place = start + _middle(seconds[order[start:stop]], last[start:stop] - start)
            left += [(place, stop), (start, place)]
        else:
            return []
    return [] if left else parts


def sort_tasks(edges: Floats, inside: Sequence[bool]) -> tuple[Ints, list[tuple[int, int]]]:
    """Return tasks in a topological order, and the bounds of the runs of tasks that are `inside`."""
    # How often paths to each task inside leave for tasks outside.
    stage = [0 if is_inside else -1 for is_inside in inside]
    for u, v in edges[:, :2].astype(np.int64).tolist():
        stage[v] = max(stage[v], stage[u] + (inside[v] and not inside[u]))
    turn = 2 * np.asarray(stage, np.int64) + ~np.asarray(inside, bool)
    order = np.argsort(turn, kind="stable")
    bounds = [0, *(np.flatnonzero(np.diff(turn[order])) + 1).tolist(), len(order)]
    return order, [(start, stop) for start, stop in pairwise(bounds) if start < stop and inside[order[start]]]


def _middle(seconds: Floats, last: Ints) -> int:
    """Return the cut near the middle that the fewest values cross; `last` has the last reader of each task's result."""
    n = len(seconds)
    # Results whose last reader is behind all of these tasks are picked at any cut.
    own = np.flatnonzero(last < n)
    changes = np.bincount(own, minlength=n) - np.bincount(last[own], minlength=n)
    done = np.cumsum(seconds)
    off = np.abs(done[:-1] - done[-1] / 2)
    places = np.flatnonzero(off <= max(float(off.min()), _MAX_OFFSET * float(done[-1])))
    return int(places[np.lexsort((off[places], np.cumsum(changes)[places]))[0]]) + 1
