"""Plans of flows: every task has a member, the order is one in which members never wait for each other in a circle."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.flow.plan import peak_bytes, plan_flow
from dask_ferro.graph.bundling.partition import Dag, FlowCosts, finest

COSTS = FlowCosts()


def stencil(width: int, steps: int, seconds: float) -> Dag:
    edges = [
        (width * (s - 1) + y, width * s + x, 8.0)
        for s in range(1, steps)
        for x in range(width)
        for y in (x - 1, x, x + 1)
        if 0 <= y < width
    ]
    return Dag([seconds] * (width * steps), edges)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), members=st.integers(1, 6))
def test_a_plan_is_complete_and_no_better_than_its_bounds(seed: int, members: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    seconds = rng.exponential(1e-3, count)
    edges = [
        (int(u), v, float(rng.integers(1, 10**6)))
        for v in range(count)
        for u in rng.choice(v, min(v, int(rng.integers(0, 4))), replace=False)
    ]
    plan = plan_flow(finest(Dag(seconds.tolist(), edges)), members, COSTS)
    assert len(plan.members) == len(plan.order) == count
    assert all(0 <= member < members for member in plan.members)
    # What a task reads comes before it.
    assert all(plan.order[u] < plan.order[v] for u, v, _ in edges)
    spent = seconds + COSTS.task_s
    way = spent.copy()
    for u, v, _ in sorted(edges, key=lambda edge: -edge[0]):
        way[u] = max(way[u], spent[u] + way[v])
    assert plan.seconds >= max(spent.sum() / members, way.max()) * (1 - 1e-9)


def test_neighbours_of_a_stencil_stay_together() -> None:
    dag = stencil(12, 50, 2e-4)
    plan = plan_flow(finest(dag), 2, COSTS)
    crossing = {(u, plan.members[v]) for u, v, _ in dag.edges if plan.members[int(u)] != plan.members[int(v)]}
    assert len(crossing) <= 2.5 * 50
    assert plan.seconds < 1.5 * 12 * 50 * 2e-4 / 2


def test_the_peak_of_a_loop_is_that_of_a_few_steps() -> None:
    tasks = finest(stencil(4, 300, 1e-3))
    # Two rows of four values of 8 bytes, some on both workers; a member may be a few steps ahead.
    assert 4 * 8 <= peak_bytes(tasks, plan_flow(tasks, 2, COSTS)) <= 2 * 2 * 2 * 4 * 8


def test_the_peak_of_a_sum_has_all_its_terms() -> None:
    tasks = finest(Dag([1e-3] * 101, [(u, 100, 8.0) for u in range(100)]))
    assert peak_bytes(tasks, plan_flow(tasks, 1, COSTS)) == 800
