"""Plans of recent graphs, as bundles and as flows, for graphs that are computed again, as in a loop.

A plan holds for a graph of the same tasks, edges and kinds, while what is measured changes the seconds, the longest
seconds and the bytes of tasks that may be bundled by little in all, and no bundle holds more than it may.  Graphs are
told apart by a digest.

What a graph took each way counts for more than what was projected: where flows were measured to be slower than
bundles, or the reverse, the graph is not run that way again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np
from dask.typing import Key

from dask_ferro.engines.cache import Cache
from dask_ferro.graph.bundling.partition import Bundles, Floats
from dask_ferro.graph.bundling.tasks import ALONE, TaskDag

# The sum of changes with which a choice still holds, as a share of the seconds (or bytes) of all tasks.
CHANGED = 0.25
# Longer tasks count as long as this: one of them must not hide what changes in a thousand short ones.
LONG_S = 0.05
# Numbers of all graphs that are remembered, and those that a graph itself counts as: some 20 MB.
NUMBERS, GRAPH = 1_000_000, 250
# A task with a larger share of a bundle is told apart from others exactly: one that is wanted has such a share.
_LARGE = 0.5
# Seconds that a flow takes beyond its plan.
FLOW_STARTS = 0.02
# Graphs that were planned, and of which the scheduler has not heard yet.
_SUBMITTED = 64


# The time of a graph counts once it ran so often one way, since the first run opens connections.  The fastest of the
# newest runs counts, as other graphs may have run beside the rest.
_RUNS, _NEWEST = 2, 4
# Tasks that take so many times as long, or as short, make another graph.
_ANOTHER = 2.0

Way = Literal["bundles", "flow"]


class Flow(NamedTuple):
    """The tasks of a flow by number, the member and the rank of each, and the projected seconds of its part of a graph.

    The seconds are those of the plan: each flow takes `FLOW_STARTS` beyond that.
    """

    tasks: Sequence[int]
    members: Sequence[int]
    ranks: Sequence[float]
    seconds: float


class GraphPlans:
    """How a graph may run, and what it took."""

    def __init__(self, flows: Sequence[Flow], facts: tuple[Floats, ...]) -> None:
        # None: the graph is not planned as flows.
        self.flows = flows
        # None: they were not needed yet; what they are projected to take.
        self.bundles: Bundles | None = None
        self.bundles_s = 0.0
        # The seconds, longest seconds and shares of tasks that might be bundled, and the bytes of all edges.
        self._facts = facts
        self._took: dict[Way, deque[float]] = {way: deque(maxlen=_NEWEST) for way in ("bundles", "flow")}

    @property
    def nbytes(self) -> int:
        """The numbers that are kept."""
        return GRAPH + sum(map(len, self._facts)) + 3 * sum(len(flow.tasks) for flow in self.flows)

    def holds_for(self, facts: tuple[Floats, ...], shares: Floats) -> bool:
        """Return whether the plans hold for a graph of the same structure."""
        return all(map(_is_near, self._facts, facts)) and all(
            float(shares[list(bundle)].sum()) <= 1 for bundle in self.bundles or () if len(bundle) > 1
        )

    def remember(self, last: GraphPlans) -> None:
        """Take what the graph took over from its last plans, unless its tasks take another time by now."""
        before, now = (float(facts[0].sum()) for facts in (last._facts, self._facts))
        if max(before, now) <= _ANOTHER * min(before, now):
            self._took = last._took

    def took(self, way: Way, seconds: float) -> None:
        self._took[way].append(seconds)

    def seconds(self, way: Way, projected: float) -> float:
        """Return what the graph takes one way: what was measured, or else what is projected."""
        runs = tuple(self._took[way])
        return min(runs) if len(runs) >= _RUNS else projected


class RecentChoices:
    """The plans of recent graphs, the least recently used of which are forgotten first."""

    def __init__(self) -> None:
        self._plans: Cache[GraphPlans] = Cache(NUMBERS)
        self._chosen: dict[frozenset[Key], tuple[GraphPlans, Way]] = {}

    def plans(
        self, work: TaskDag, limits: tuple[float, ...], plan: Callable[[], Sequence[Flow]]
    ) -> GraphPlans:
        """Return the plans of a graph, its last ones if they still hold.

        `limits` are what else decides (workers, members, bytes); `plan` returns the graph's flows.
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
        before: list[GraphPlans] = []

        def holds(last: GraphPlans) -> bool:
            before[:] = [last]
            return last.holds_for(facts, shares)

        def build() -> GraphPlans:
            plans = GraphPlans(plan(), facts)
            for last in before:
                plans.remember(last)
            return plans

        return self._plans.get(digest.digest(), build, holds)

    def choose(self, wanted: Collection[Key], plans: GraphPlans, way: Way) -> None:
        """Note how a graph runs that is submitted now."""
        while len(self._chosen) >= _SUBMITTED:
            self._chosen.pop(next(iter(self._chosen)), None)
        self._chosen[frozenset(wanted)] = plans, way

    def chosen(self, wanted: Collection[Key]) -> tuple[GraphPlans, Way] | None:
        """Return how a graph runs that was submitted."""
        return self._chosen.pop(frozenset(wanted), None)


def _is_near(before: Floats, now: Floats) -> bool:
    """Return whether all changes are at most a part of the smaller sum."""
    return float(np.abs(now - before).sum()) <= CHANGED * min(float(before.sum()), float(now.sum()))
