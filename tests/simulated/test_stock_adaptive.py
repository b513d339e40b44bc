"""Stock Dask's adaptive scaling as the simulator has it, beside Dask's own `Adaptive` on the same events.

Both look at the same graph on the same workers (`test_stock_stealing`), with the same jobs that are still to come, and
ask for the same workers, or let the same ones go.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from distributed import Adaptive
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.stock_adaptive import StockAdaptive

from dask_ferro.policy.scaling.facts import (
    LEAVING,
    PENDING,
    RUNNING,
    Cancel,
    Drain,
    Job,
    Pool,
    ScalingFacts,
    Submit,
)
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from tests.simulated.test_stock_stealing import MB, Real, Virtual, graphs, step
from tests.waiting import BOUND_S

MEMORY = 2**30
POOL = Pool("default", memory=MEMORY)


class _Names(list):
    """Names of workers that Dask walks in the order in which they were asked for: it has a set of them."""

    def __sub__(self, others: list[Any]) -> list[Any]:
        return [name for name in self if name not in others]


class RealCluster:
    """What Dask's `Adaptive` asks of a cluster and its scheduler: a real scheduler answers, what it wants is kept."""

    def __init__(self, real: Real) -> None:
        self.scheduler_comm, self._real = self, real
        self.asked: dict[str, Any] = {}
        self.late: list[str] = []
        self.retires: asyncio.Event | None = None

    @property
    def observed(self) -> _Names:
        return _Names(ws.name for ws in self._real.scheduler.workers.values())

    @property
    def requested(self) -> _Names:
        return _Names([*self.observed, *self.late])

    plan = requested

    async def adaptive_target(self, **how: Any) -> int:
        return self._real.scheduler.adaptive_target(**how)

    async def workers_to_close(self, **how: Any) -> list[Any]:
        return self._real.scheduler.workers_to_close(**how)

    async def retire_workers(self, **workers: Any) -> None:
        if self.retires is not None:
            await asyncio.wait_for(self.retires.wait(), BOUND_S)

    def scale(self, n: int) -> None:
        self.asked = {"up": n - len(self.plan)}

    def scale_down(self, names: list[Any]) -> None:
        self.asked = {"down": set(names)}


class Both:
    """Dask's controller and the baseline, with the same bounds, on the same events."""

    def __init__(self, graph: TaskGraph, threads: list[int], minimum: int, maximum: float) -> None:
        self.real, self.virtual = Real(graph, threads), Virtual(graph, threads)
        self.cluster = RealCluster(self.real)
        self.adaptive = Adaptive(self.cluster, interval=0, minimum=minimum, maximum=maximum)
        self.baseline = StockAdaptive(minimum, maximum)

    async def look(self, late: int = 0) -> dict[str, Any]:
        """Let both decide, while so many jobs are still to come; return what they want."""
        self.cluster.late = [f"late-{n}" for n in range(late)]
        self.cluster.asked = {}
        await self.adaptive.adapt()
        found = self._decided(LEAVING if self.adaptive._adapting else RUNNING)
        assert found == self.cluster.asked
        return found

    def _decided(self, state: str) -> dict[str, Any]:
        names = [address.removeprefix("w") for address in self.virtual.world.workers]
        jobs = [Job(name, POOL.name, state) for name in names]
        jobs += [Job(name, POOL.name, PENDING) for name in self.cluster.late]
        actions = self.baseline.decide(ScalingFacts(0.0, (POOL,), tuple(jobs)), self.virtual.scheduler)
        if any(isinstance(action, Submit) for action in actions):
            return {"up": sum(action.count for action in actions if isinstance(action, Submit))}
        gone = [name for action in actions if isinstance(action, Cancel | Drain) for name in action.jobs]
        return {"down": {int(name) if name.isdigit() else name for name in gone}} if gone else {}


async def _in_step(both: Both, data: st.DataObject) -> None:
    """Tell both the same until all is done, and look now and then; after that, they have nothing to do."""
    looks = st.sampled_from([None, 0, 0, 1, 4])
    while both.virtual.where:
        step(both.real, both.virtual, data)
        if (late := data.draw(looks)) is not None:
            await both.look(late)
    for late in data.draw(st.lists(st.sampled_from([0, 2]), max_size=4)):
        await both.look(late)


BOUNDS = st.tuples(st.sampled_from([0, 0, 1, 3]), st.sampled_from([3, 6, float("inf")]))


@settings(deadline=None, max_examples=100)
@given(graphs(), st.lists(st.integers(1, 3), min_size=1, max_size=6), BOUNDS, st.data())
def test_the_baseline_wants_what_dask_wants(graph, threads, bounds, data):
    asyncio.run(_in_step(Both(graph, threads, *bounds), data))


def tasks(count: int, nbytes: int = 8, prefix: str = "work") -> TaskGraph:
    group = f"{prefix}-{0:032x}"
    return TaskGraph(
        "alike", tuple(TaskSpec((group, n), prefix, group, 1.0, nbytes, ()) for n in range(count))
    )


@pytest.mark.parametrize(
    ("count", "nbytes", "threads", "done", "bounds", "wanted"),
    [
        pytest.param(0, 8, [], 0, (0, 9), {}, id="nothing for no work"),
        pytest.param(3, 8, [], 0, (0, 9), {"up": 1}, id="somebody for any work"),
        pytest.param(150, 8, [], 0, (0, 99), {"up": 15}, id="of 150 that wait a hundred stand for all"),
        pytest.param(300, 8, [1, 1], 0, (0, 99), {"up": 28}, id="those that wait and those that run"),
        pytest.param(300, 8, [1, 1], 0, (0, 9), {"up": 7}, id="up to the maximum"),
        pytest.param(2, 400 * MB, [1, 1], 2, (0, 9), {}, id="no worker goes without which too little memory is left"),
        pytest.param(2, 900 * MB, [1, 1], 2, (0, 9), {"up": 2}, id="twice as many where memory is full"),
        pytest.param(4, 8, [1] * 4, 2, (0, 9), {"down": {0, 1}}, id="the idle ones, in the end"),
        pytest.param(4, 8, [1] * 4, 4, (3, 9), {"down": {3}}, id="of equal ones the newest"),
        pytest.param(4, 8, [1] * 4, 0, (0, 1), {"down": {1, 2, 3}}, id="busy ones too where a maximum says so"),
    ],
)  # fmt: skip
def test_both_want(count, nbytes, threads, done, bounds, wanted):
    async def looked() -> list[dict[str, Any]]:
        both = Both(tasks(count, nbytes), threads, *bounds)
        for key, at in sorted(both.virtual.where.items(), key=lambda task: task[1])[:done]:
            for side in (both.real, both.virtual):
                side.finish(at, key, 1.0, nbytes)
        return [await both.look() for _ in range(3)]

    first, _, third = asyncio.run(looked())
    assert third == wanted
    assert first == (wanted if "up" in wanted else {})  # who goes was too many three times in a row


def test_nobody_is_asked_for_while_others_retire():
    async def looked() -> dict[str, Any]:
        both = Both(tasks(4), [1] * 4, 0, 1)
        both.cluster.retires = asyncio.Event()
        for _ in range(2):
            await both.look()
        retires = asyncio.ensure_future(both.adaptive.adapt())
        await asyncio.sleep(0)
        assert both.adaptive._adapting
        both.adaptive.minimum = both.adaptive.maximum = both.baseline.minimum = both.baseline.maximum = 9
        found = await both.look()
        both.cluster.retires.set()
        await retires
        return found

    assert asyncio.run(looked()) == {}
