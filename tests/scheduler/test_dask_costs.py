"""What the scheduler hears of tasks that finish tells what Dask's own tasks cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dask_ferro.graph.bundling.partition import DASK
from dask_ferro.scheduler import dask_costs
from dask_ferro.scheduler.dask_costs import DaskCosts
from tests.each import every

HOP_S = 10 * DASK.hop_s


def ends(costs: DaskCosts, key: str, worker: str, start: float, reads: int = 0, readers: Any = ()) -> None:
    """Let a task of a second end, which reads so many others, and has readers by key."""
    dependents = [SimpleNamespace(key=reader) for reader in readers]
    ts: Any = SimpleNamespace(key=key, dependencies=[None] * reads, dependents=dependents)
    message = {"worker": worker, "startstops": [{"action": "compute", "start": start, "stop": start + 1}]}
    costs.task_left(ts, "memory", 1.0, message)


@every(
    ("chains", "between", "reader_on", "reads", "readers", "hop_s"),
    [
        pytest.param(16, 0, "a", 1, ["second"], HOP_S, id="what a chain on one worker tells"),
        pytest.param(15, 0, "a", 1, ["second"], DASK.hop_s, id="too few tasks"),
        pytest.param(16, 1, "a", 1, ["second"], DASK.hop_s, id="the worker ran another task between"),
        pytest.param(16, 0, "b", 1, ["second"], DASK.hop_s, id="another worker, with another clock"),
        pytest.param(16, 0, "a", 2, ["second"], DASK.hop_s, id="a task that waits for two"),
        pytest.param(16, 0, "a", 1, ["second", "third"], DASK.hop_s, id="the other reader may come first"),
        pytest.param(16, 0, "a", 1, [], DASK.hop_s, id="a reader that is submitted later"),
    ],
)
def test_a_hop_is_from_the_end_of_a_task_to_the_start_of_its_reader(
    chains: int, between: int, reader_on: str, reads: int, readers: list[str], hop_s: float
) -> None:
    costs = DaskCosts()
    for i in range(chains):
        now = 10.0 * i
        ends(costs, f"first-{i}", "a", now, readers=[f"{reader}-{i}" for reader in readers])
        for n in range(between):
            ends(costs, f"between-{i}-{n}", "a", now + 1)
        ends(costs, f"second-{i}", reader_on, now + 1 + HOP_S, reads)
    assert costs.overheads().hop_s == pytest.approx(hop_s)


@every(
    ("windows", "seconds", "cpu_s", "dispatch_s"),
    [
        pytest.param(17, 1.0, 5e-3, 5e-3, id="ten times what was believed"),
        pytest.param(17, 1.0, 4e-4, DASK.dispatch_s, id="about what was believed"),
        pytest.param(16, 1.0, 5e-3, DASK.dispatch_s, id="too few: the first window has no start"),
        pytest.param(17, 9.0, 5e-3, DASK.dispatch_s, id="a loop that has other things to do"),
    ],
)
def test_a_dispatch_is_the_loop_s_cpu_over_tasks_that_end_fast(
    windows: int, seconds: float, cpu_s: float, dispatch_s: float
) -> None:
    costs, now = DaskCosts(), 100.0
    with pytest.MonkeyPatch.context() as patch:
        for i in range(windows):
            patch.setattr(dask_costs, "perf_counter", lambda i=i: now + seconds * i)
            patch.setattr(dask_costs, "thread_time", lambda i=i: cpu_s * dask_costs._TASKS * i)
            for n in range(dask_costs._TASKS):
                ends(costs, f"x-{i}-{n}", "a", now)
    assert costs.overheads().dispatch_s == pytest.approx(dispatch_s)
