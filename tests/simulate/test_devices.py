"""Virtual GPUs: what their links and their memory do, what HEFT plans for them, and what stealing gains there."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import clusters
from simulated.contenders import simulate
from simulated.graph_builder import GraphBuilder
from simulated.heft import heft
from simulated.tiled_linalg import cholesky, gemm, matmul_parallel, sparse_gemm

from dask_ferro.policy.estimates import Link
from dask_ferro.simulate.cluster import VirtualCluster, VirtualWorker
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from tests.simulate.test_engine import NO_OVERHEAD, took

MB = 1_000_000
# No message, no thought and no latency: what is left is computing and moving bytes.
FREE: dict[str, Any] = NO_OVERHEAD | {
    "same_host": Link(0.0, 100.0 * MB), "other_host": Link(0.0, 50.0 * MB),
}  # fmt: skip


def graph_of(*tasks: tuple[str, float, int, tuple[str, ...]]) -> TaskGraph:
    """Tasks by name, seconds, bytes and dependencies."""
    specs = (TaskSpec((n, 0), n, n, s, b, tuple((d, 0) for d in after)) for n, s, b, after in tasks)
    return TaskGraph("own", tuple(specs))


# ---- the cluster -------------------------------------------------------------------------------------------


def test_sixteen_hosts_of_four_gpus_and_two_cores() -> None:
    cluster = clusters.gpus(16, 4, faster=20.0, memory=32 * MB, cores=2)
    gpus = [w for w in cluster.workers if w.device == "gpu"]
    assert (len(gpus), len(cluster.workers), len({w.host for w in gpus})) == (64, 96, 16)
    assert {(w.speed, w.memory) for w in gpus} == {(20.0, 32 * MB)}
    assert cluster.power == 64 * 20 + 32


# ---- HEFT --------------------------------------------------------------------------------------------------


MIXED = clusters.gpus(1, 1, faster=20.0, cores=4, **FREE)


@pytest.mark.parametrize(
    ("graph", "seconds"),
    [
        pytest.param(graph_of(), 0.0, id="nothing takes nothing"),
        pytest.param(graph_of(("a", 1.0, 0, ())), 0.05, id="one task takes the fastest worker"),
        pytest.param(graph_of(("a", 1.0, 0, ()), ("b", 1.0, 0, ("a",))), 0.1,
            id="a chain stays on the fastest worker"),
        pytest.param(graph_of(*((f"t{n}", 1.0, 0, ()) for n in range(24))), 1.0,
            id="what one has no time for goes aside"),
        pytest.param(graph_of(*((f"t{n}", 1.0, 0, ()) for n in range(19))), 0.95, id="but not where it would be late"),
    ],
)  # fmt: skip
def test_the_plan_takes(graph: TaskGraph, seconds: float) -> None:
    assert heft(graph, MIXED).makespan == pytest.approx(seconds)


def test_a_gap_between_two_tasks_is_used() -> None:
    """Both workers have made a block at 1.0 s; the second waits 0.9 s for the other's, and runs what needs nothing."""
    two = VirtualCluster((VirtualWorker("a"), VirtualWorker("b")), **FREE)
    blocks = (("y", 1.0, 90 * MB, ()), ("x", 1.0, 90 * MB, ()))
    readers = (("v", 6.0, 0, ("y",)), ("z", 5.0, 0, ("x", "y")))
    plan = heft(graph_of(*blocks, *readers, ("small", 0.5, 0, ())), two)
    assert (plan.slots["z", 0].start, plan.slots["z", 0].worker) == (pytest.approx(1.9), "b")
    assert (plan.slots["small", 0].start, plan.slots["small", 0].worker) == (pytest.approx(1.0), "b")
    assert plan.makespan == pytest.approx(7.0)


@given(
    seconds=st.lists(st.floats(0.001, 2.0), min_size=1, max_size=12),
    reads=st.lists(st.lists(st.integers(0, 11), max_size=3), min_size=12, max_size=12),
    nbytes=st.integers(0, 50 * MB),
)
@settings(deadline=None)
def test_a_plan_keeps_the_order_and_runs_one_task_a_thread(
    seconds: list[float], reads: list[list[int]], nbytes: int
) -> None:
    inputs = [tuple(dict.fromkeys(f"t{d}" for d in read if d < n)) for n, read in enumerate(reads)]
    graph = graph_of(*((f"t{n}", each, nbytes, inputs[n]) for n, each in enumerate(seconds)))
    plan = heft(graph, MIXED)
    for task in graph.tasks:
        assert all(plan.slots[d].stop <= plan.slots[task.key].start + 1e-9 for d in task.dependencies)
    for worker in MIXED.workers:
        own = sorted(slot[:2] for slot in plan.slots.values() if slot.worker == worker.address)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(own))
    assert plan.makespan >= max(graph.critical_path / 20.0, graph.work / MIXED.power) - 1e-9


# ---- placement and stealing --------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1.0, 2.0])
def test_a_mix_of_sizes_is_done_soon_after_hefts_plan(seconds: float) -> None:
    graph = matmul_parallel(seconds=seconds)
    cluster = clusters.gpus(1, 1, faster=20.0, cores=4)
    plan = heft(graph, cluster).makespan
    assert (ours := took(graph, cluster)) <= 1.15 * plan
    assert took(graph, cluster, "stock") >= 1.5 * ours


def roots(count: int = 200, seconds: float = 0.5) -> TaskGraph:
    """Independent tasks that wait in the scheduler's queue."""
    builder = GraphBuilder("roots", count=count)
    for index in range(count):
        builder.add("root", index, seconds=seconds)
    return builder.graph()


def test_what_is_queued_goes_to_a_slow_worker_only_while_the_fast_one_has_more_to_do() -> None:
    cluster = clusters.gpus(1, 1, faster=20.0, cores=4)
    trace = simulate(roots(), cluster)
    ends = {w.address: 0.0 for w in cluster.workers}
    for span in trace.spans:
        if span.kind == "compute":
            ends[span.worker] = max(ends[span.worker], span.stop)
    assert trace.counts["elapsed"] <= 1.15 * heft(roots(), cluster).makespan
    assert max(ends.values()) - min(ends.values()) <= 0.5 + 0.1  # one task of a CPU


# 200 Gb/s between hosts, for four GPUs; a tile's product takes 50 ms.
def of_gpus(hosts: int) -> VirtualCluster:
    """So many hosts of four GPUs with NVLink."""
    return clusters.gpus(hosts, 4, faster=20.0, same_host=Link(0.0001, 50e9), other_host=Link(0.003, 6e9))


@pytest.mark.parametrize(("hosts", "tiles"), [(4, 24), (8, 32), pytest.param(16, 40, marks=pytest.mark.soak)])
def test_stealing_gains_on_a_block_sparse_product(hosts: int, tiles: int) -> None:
    """John and Milthorpe gain 16 to 45 % there."""
    graph = sparse_gemm(tiles, seconds=1.0, tile_bytes=8 * MB)
    assert took(graph, of_gpus(hosts), "none") >= 1.45 * took(graph, of_gpus(hosts))


@pytest.mark.parametrize("make", [gemm, cholesky], ids=["dense product", "Cholesky"])
def test_stealing_costs_nothing_on_a(make: object) -> None:
    graph = make(14, seconds=1.0, tile_bytes=8 * MB)  # type: ignore[operator]
    assert took(graph, of_gpus(4)) <= 1.005 * took(graph, of_gpus(4), "none")


# ---- memory ------------------------------------------------------------------------------------------------


def blocks(count: int = 40) -> TaskGraph:
    """Blocks that are loaded, worked on and summed up; nothing about them is known before, and nothing is queued."""
    builder = GraphBuilder("blocks", count=count)
    starts = [builder.add("start", index, seconds=0.02, nbytes=10) for index in range(6)]
    sums = []
    for index in range(count):
        loaded = builder.add("load", index, seconds=2.0, nbytes=100 * MB, after=starts)
        worked = builder.add("work", index, seconds=2.0, nbytes=100 * MB, after=[loaded])
        sums.append(builder.add("sum", index, seconds=0.2, nbytes=8, after=[worked]))
    builder.add("total", 0, seconds=0.01, nbytes=8, after=sums)
    return builder.graph()


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("cores", [0, 2])
def test_forty_blocks_pass_through_devices_of_four(gpus: int, cores: int) -> None:
    cluster = clusters.gpus(1, gpus, memory=400 * MB + 1000, cores=cores)
    trace = simulate(blocks(), cluster)
    assert trace.counts["bytes_short"] == 0.0
    assert trace.counts["elapsed"] <= 1.1 * (40 * 4.2 / 20.0) / gpus + 0.1


def test_stock_dask_overfills_them() -> None:
    cluster = clusters.gpus(1, 1, memory=400 * MB + 1000, cores=2)
    assert simulate(blocks(), cluster, policy="stock").counts["bytes_short"] >= 100 * MB


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=25),
    seconds=st.lists(st.floats(0.0, 0.5), min_size=25, max_size=25),
    gpus=st.integers(1, 3),
)
@settings(deadline=None, max_examples=30)
def test_whatever_does_not_fit_all_of_it_is_done(sizes: list[int], seconds: list[float], gpus: int) -> None:
    """Results that stay fill the devices: the rest is done all the same, by idle ones."""
    builder = GraphBuilder("fill")
    start = builder.add("start", 0, seconds=0.0)
    for index, (nbytes, each) in enumerate(zip(sizes, seconds, strict=False)):
        builder.add("keep", index, seconds=each, nbytes=nbytes * MB, after=[start])
    trace = simulate(builder.graph(), clusters.gpus(1, gpus, memory=50 * MB))
    assert len({span.key for span in trace.spans if span.kind == "compute"}) == len(sizes) + 1
