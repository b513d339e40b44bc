"""A flow on virtual workers: every task runs once, and no worker is idle for long while others have tasks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.flows import simulate_flow
from simulated.graph_builder import GraphBuilder

from dask_ferro.simulate.graphs.taskgraph import TaskGraph


def chains(count: int, steps: int, seconds: Callable[[int], float]) -> TaskGraph:
    """Return chains without edges between them."""
    builder = GraphBuilder("chains", count=count, steps=steps)
    for chain in range(count):
        last = None
        for step in range(steps):
            after = [] if last is None else [last]
            last = builder.add("link", step, chain, seconds=seconds(chain), nbytes=1000, after=after)
    return builder.graph()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), workers=st.integers(2, 6), steals=st.booleans())
def test_every_task_runs_once(seed: int, workers: int, steals: bool) -> None:
    rng = random.Random(seed)
    builder = GraphBuilder("random", seed=seed)
    keys: list[object] = []
    for i in range(rng.randint(2, 40)):
        after = rng.sample(keys, min(len(keys), rng.randint(0, 3)))
        size = rng.choice([100, 10**6, 10**8])
        keys.append(
            builder.add("task", i, seconds=rng.choice([0.0, 1e-4, 1e-3, 1e-2]), nbytes=size, after=after)
        )
    graph = builder.graph()
    slow = {worker: rng.choice([1.0, 3.0, 10.0]) for worker in range(workers)}
    result = simulate_flow(
        graph, workers, steals=steals, slowness=slow, believed=lambda s: s * rng.choice([0.1, 1.0, 10.0])
    )
    assert sorted(map(str, result.ran)) == sorted(map(str, keys))
    assert steals or result.stolen == 0


@pytest.mark.parametrize("workers", [2, 8, 32])
@pytest.mark.parametrize("seconds", [1e-3, 2e-2])
def test_a_slow_worker_costs_its_part_of_the_speed(workers: int, seconds: float) -> None:
    graph = chains(20 * workers, 5, lambda _: seconds)
    bound = 100 * workers * seconds / (workers - 1 + 1 / 3)
    stolen, planned = (
        simulate_flow(graph, workers, slowness={0: 3.0}, steals=steals) for steals in (True, False)
    )
    assert planned.seconds > 0.95 * 3 * 100 * seconds
    # The slow worker's last task, and what reads it.
    assert stolen.seconds < 1.15 * bound + 2 * 3 * seconds
    assert 0 < stolen.stolen < len(graph.tasks) / 3


@pytest.mark.parametrize("workers", [2, 8])
def test_durations_that_are_ten_times_off_cost_little(workers: int) -> None:
    rng = random.Random(1)
    wrong = {chain: 10 ** rng.uniform(-1, 1) for chain in range(40 * workers)}
    graph = chains(40 * workers, 3, lambda chain: 1e-3 * wrong[chain])
    bound = sum(task.seconds for task in graph.tasks) / workers
    stolen, planned = (
        simulate_flow(graph, workers, believed=lambda _: 1e-3, steals=steals) for steals in (True, False)
    )
    # A task of 10 ms may begin when all others have ended.
    assert stolen.seconds < 1.15 * bound + 10e-3
    assert planned.seconds > stolen.seconds
