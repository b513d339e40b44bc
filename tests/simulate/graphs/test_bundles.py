"""Graphs of the simulator in bundles: the same work, and what bundles gain there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.generators import build

from dask_ferro.simulate.cluster import VirtualCluster
from dask_ferro.simulate.engine import simulate
from dask_ferro.simulate.graphs.bundles import in_bundles
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec


def chains(count: int, length: int, seconds: float) -> TaskGraph:
    return build("chains", count=count, length=length, seconds=seconds, fast=seconds / 10)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 9), st.sampled_from([1, 2, 8]), st.sampled_from([1e-3, 0.02]))
def test_bundles_do_the_same_work_in_a_possible_order(
    seed: int, width: int, workers: int, mean: float
) -> None:
    graph = build("random-dag", width=width, least=mean / 2, most=2 * mean, seed=seed)
    made = in_bundles(graph, workers)
    assert made.work == pytest.approx(graph.work)
    # `simulate` refuses a graph in which a task comes before one that it reads.
    assert simulate(made, VirtualCluster.local(workers)).busy_seconds >= graph.work * (1 - 1e-6)


def test_each_phase_is_bundled_by_itself() -> None:
    tasks = tuple(
        TaskSpec(("x-1a2b3c4d", i), "x", "x-1a2b3c4d", 1e-3, 8, (("x-1a2b3c4d", i - 1),) if i else ())
        for i in range(20)
    )
    made = in_bundles(TaskGraph("two", tasks, phases=(10, 10)), 2)
    assert made.phases == (1, 1)
    assert made.tasks[1].dependencies == (made.tasks[0].key,)


def test_a_bundle_hands_out_what_others_read_and_tells_its_seconds() -> None:
    graph = chains(1, 30, 1e-3)
    (bundle,) = in_bundles(graph, 2).tasks
    assert bundle.seconds == bundle.annotated == pytest.approx(graph.work)
    assert bundle.nbytes == graph.tasks[-1].nbytes


@pytest.mark.parametrize(("workers", "most"), [(8, 1.02), (64, 0.9), (256, 0.5)])
def test_short_tasks_gain_the_more_the_more_workers_wait_for_one_scheduler(workers: int, most: float) -> None:
    graph = chains(2 * workers, 8, 5e-3)
    cluster = VirtualCluster.local(workers)
    single, bundled = (simulate(g, cluster).counts["elapsed"] for g in (graph, in_bundles(graph, workers)))
    assert bundled <= most * single


def test_long_tasks_stay_as_they_are() -> None:
    graph = build("skew", tasks=40)
    assert len(in_bundles(graph, 8).tasks) == len(graph.tasks)
