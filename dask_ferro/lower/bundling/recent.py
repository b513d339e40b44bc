"""How recent graphs ran: as tasks, as bundles, or as flows; their plans, for graphs that are computed again.

A plan holds for a graph of the same tasks, edges and kinds, while what is measured changes the seconds, the longest
seconds and the bytes of tasks that may be bundled by little in all, and no bundle holds more than it may.  Graphs are
told apart by a digest of what they consist of, whatever their keys are.

The way to run a graph is the fastest of those that were measured.  A way is not measured before it ran twice.  Until
then it runs if it may be faster: its projection, as right as the best one of this graph was, or half of its first run
takes less.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from hashlib import blake2b
from math import inf, isfinite, nan
from typing import Literal, NamedTuple

import numpy as np
from dask.typing import Key

from dask_ferro.engines.cache import Cache
from dask_ferro.graph.bundling.partition import Bundles, Floats
from dask_ferro.graph.bundling.tasks import SINGLETON, TaskDag

# The sum of changes with which a choice still holds, as a share of the seconds (or bytes) of all tasks.
MAX_CHANGE = 0.25
# Longer tasks count as long as this: one of them must not hide what changes in a thousand short ones.
LONG_S = 0.05
# Numbers of all graphs that are remembered, and those that a graph itself counts as: some 20 MB.
NUMBERS, GRAPH = 1_000_000, 250
# A task with a larger share of a bundle is told apart from others exactly: one that is wanted has such a share.
_LARGE_SHARE = 0.5
# Seconds that a flow takes beyond its plan.
FLOW_STARTS = 0.02
# Graphs that were planned, and of which the scheduler has not heard yet.
_MAX_SUBMITTED = 64


# The time of a graph counts once it ran so often one way, since the first run opens connections, for which it may take
# so many times as long.  The fastest of the newest runs counts, as other graphs may have run beside the rest.
_RUNS, _FIRST_FACTOR, _NEWEST = 2, 2.0, 4
# Tasks that take so many times as long, or as short, make another graph.
_DURATION_FACTOR = 2.0

Way = Literal["tasks", "bundles", "flow"]


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

    def __init__(self, flows: Sequence[Flow], limits: tuple[object, ...], facts: tuple[Floats, ...]) -> None:
        # None: the graph is not planned as flows.
        self.flows = flows
        # None: they were not needed yet.
        self.bundles: Bundles | None = None
        # The seconds of each way that the graph may run; inf: it was not needed yet.
        self.projected: dict[Way, float] = {"tasks": inf}
        # What has to stay equal: numbers of workers and bytes, and the kinds of tasks.
        self._limits = limits
        # The seconds, longest seconds and shares of tasks that might be bundled (nan: it may not), the bytes of edges.
        self._facts = facts
        self._took: defaultdict[Way, deque[float]] = defaultdict(partial(deque, maxlen=_NEWEST))

    @property
    def nbytes(self) -> int:
        """The numbers that are kept."""
        return GRAPH + sum(map(len, self._facts)) + 3 * sum(len(flow.tasks) for flow in self.flows)

    def holds_for(self, limits: tuple[object, ...], facts: tuple[Floats, ...], shares: Floats) -> bool:
        """Return whether the plans hold for a graph of the same structure."""
        is_same = limits == self._limits and all(map(_is_near, self._facts, facts))
        return is_same and all(
            float(shares[list(bundle)].sum()) <= 1 for bundle in self.bundles or () if len(bundle) > 1
        )

    def remember(self, last: GraphPlans) -> None:
        """Take what the graph took over from its last plans, unless its tasks take another time by now."""
        known = ~np.isnan(last._facts[0] + self._facts[0])
        before, now = (float(facts[0][known].sum()) for facts in (last._facts, self._facts))
        if max(before, now) <= _DURATION_FACTOR * min(before, now):
            self._took = last._took

    def took(self, way: Way, seconds: float) -> None:
        self._took[way].append(seconds)

    def seconds(self, way: Way) -> float:
        """Return what the graph takes one way: what was measured, or else what is projected."""
        return self._measured().get(way, self.projected[way])

    def _measured(self) -> dict[Way, float]:
        return {way: min(runs) for way, runs in self._took.items() if len(runs) >= _RUNS}

    def way(self) -> Way:
        """Return the way that the graph runs now: the fastest measured, or another that may be faster."""
        measured = {way: s for way, s in self._measured().items() if way in self.projected}
        ratios = [s / self.projected[way] for way, s in measured.items() if isfinite(self.projected[way])]
        factor, least = min([1.0, *ratios]), min(measured.values(), default=inf)
        may_take = {
            way: min([factor * s, *(one / _FIRST_FACTOR for one in self._took[way])])
            for way, s in self.projected.items()
            if way not in measured
        }
        if faster := [way for way, s in may_take.items() if s < least]:
            return min(faster, key=self.projected.__getitem__)
        return min(measured, key=measured.__getitem__, default="tasks")


class RecentChoices:
    """The plans of recent graphs, the least recently used of which are forgotten first."""

    def __init__(self) -> None:
        self._plans: Cache[GraphPlans] = Cache(NUMBERS)
        self._chosen: dict[frozenset[Key], tuple[GraphPlans, Way]] = {}

    def plans(
        self,
        work: TaskDag,
        names: Sequence[object],
        limits: tuple[object, ...],
        plan: Callable[[], Sequence[Flow]],
    ) -> GraphPlans:
        """Return the plans of a graph, its last ones if they still hold.

        `names` tell graphs of the same edges apart, and plans hold for `limits`; `plan` returns the graph's flows.
        """
        kinds, shares = np.asarray(work.kinds, np.int64), np.asarray(work.shares, np.float64)
        edges = np.asarray(work.dag.edges, np.float64).reshape(-1, 3)
        digest = blake2b(repr((len(shares), names)).encode(), digest_size=16)
        digest.update(edges[:, :2].tobytes())
        is_free = (kinds != SINGLETON) & (shares <= _LARGE_SHARE)
        seconds, most = (
            np.minimum(np.asarray(each, np.float64), LONG_S)
            for each in (work.dag.seconds, work.most or work.dag.seconds)
        )
        facts = *(np.where(is_free, each, nan) for each in (seconds, most, shares)), edges[:, 2]
        exact = *limits, kinds.tobytes()
        before: list[GraphPlans] = []

        def holds(last: GraphPlans) -> bool:
            before[:] = [last]
            return last.holds_for(exact, facts, shares)

        def build() -> GraphPlans:
            plans = GraphPlans(plan(), exact, facts)
            for last in before:
                plans.remember(last)
            return plans

        return self._plans.get(digest.digest(), build, holds)

    def choose(self, wanted: Collection[Key], plans: GraphPlans, way: Way) -> None:
        """Note how a graph runs that is submitted now."""
        while len(self._chosen) >= _MAX_SUBMITTED:
            self._chosen.pop(next(iter(self._chosen)), None)
        self._chosen[frozenset(wanted)] = plans, way

    def chosen(self, wanted: Collection[Key]) -> tuple[GraphPlans, Way] | None:
        """Return how a graph runs that was submitted."""
        return self._chosen.pop(frozenset(wanted), None)


def _is_near(before: Floats, now: Floats) -> bool:
    """Return whether the same are known, and all changes are at most a part of the smaller sum."""
    changes, least = np.nansum(np.abs(now - before)), min(np.nansum(before), np.nansum(now))
    return np.array_equal(np.isnan(before), np.isnan(now)) and bool(changes <= MAX_CHANGE * least)
