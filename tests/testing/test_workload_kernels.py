"""Workloads on Dask: the tasks do what the graph says, real kernels are right, and a run leaves nothing behind."""

from __future__ import annotations

import distributed
import numpy as np
import pytest
from emulated import workload_kernels
from simulated.generators import build

from dask_ferro.errors import InputError
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from tests.clusters import running
from tests.waiting import finished

pytestmark = pytest.mark.filterwarnings("ignore:Sending large graph")


def spec(name, *after, seconds=0.0, nbytes=0, annotated=None):
    return TaskSpec((name, 0), name, name, seconds, nbytes, tuple((a, 0) for a in after), annotated)


@pytest.fixture(scope="module")
def inside():
    """Four one-thread workers in this process."""
    with running(4, processes=False) as client:
        yield client


def evaluated(tasks, outputs):
    """What the outputs are, computed here, in any order that works."""
    values = {}
    for key, task in tasks.items():  # graphs stand in an order in which they could run
        values[key] = task(values)
    return {key: values[key] for key in outputs}


def test_a_sleep_returns_as_many_bytes_as_the_graph_says():
    tasks, outputs = workload_kernels.dask_graph(
        TaskGraph("two", (spec("a", nbytes=7), spec("b", "a", nbytes=9)))
    )
    assert outputs == [("b", 0)]
    assert {key: task.dependencies for key, task in tasks.items()} == {("a", 0): set(), ("b", 0): {("a", 0)}}
    assert evaluated(tasks, outputs) == {("b", 0): bytes(9)}


def test_the_real_kernels_factor_the_matrix():
    tasks, outputs = workload_kernels.dask_graph(build("cholesky", nt=4, tile_bytes=6 * 6 * 8), kernel="real")
    found = evaluated(tasks, list(tasks))
    factor = np.zeros((24, 24))
    for (group, *index), tile in found.items():
        if group.startswith(("potrf", "trsm")):
            i, k = (index[0], index[0]) if len(index) == 1 else index
            factor[6 * i : 6 * i + 6, 6 * k : 6 * k + 6] = tile
    whole = np.block([[workload_kernels.matrix(i, j, 6) for j in range(4)] for i in range(4)])
    np.testing.assert_allclose(factor @ factor.T, whole, atol=1e-12)
    np.testing.assert_allclose(factor, np.linalg.cholesky(whole), atol=1e-12)
    assert len(outputs) == 1


def test_the_real_kernels_multiply():
    tasks, outputs = workload_kernels.dask_graph(build("gemm", nt=3, tile_bytes=4 * 4 * 8), kernel="real")
    found = evaluated(tasks, outputs)
    whole = np.block([[workload_kernels.operand(i, j, 4) for j in range(3)] for i in range(3)])
    assert len(found) == 9
    for (_, i, j, _), tile in found.items():
        np.testing.assert_allclose(tile, (whole @ whole)[4 * i : 4 * i + 4, 4 * j : 4 * j + 4], atol=1e-12)


@pytest.mark.parametrize(
    ("name", "kernel", "told"),
    [
        ("cholesky", "fast", 'kernel: got \'fast\', wanted "sleep", "real" or "declared"'),
        (
            "skew",
            "real",
            'workload skew: its tasks have no real kernels; wanted cholesky, gemm, or kernel "sleep"',
        ),
    ],
    ids=["a kernel that is none", "real kernels of a workload without"],
)
def test_what_cannot_run_is_refused(name, kernel, told):
    with pytest.raises(InputError) as refused:
        workload_kernels.dask_graph(build(name), kernel=kernel)
    assert str(refused.value) == told


def test_every_task_of_a_workload_runs_once(inside):
    graph = build("cholesky", nt=4, seconds=0.001)
    with distributed.get_task_stream(inside) as stream:
        workload_kernels.run(inside, graph, time_scale=0.0)
    assert sorted(str(row["key"]) for row in stream.data) == sorted(str(task.key) for task in graph.tasks)


def test_estimates_travel_as_annotations(inside):
    graph = TaskGraph("told", (spec("a", annotated=0.25), spec("b", "a")))
    held = workload_kernels.submit(inside, TaskGraph("told", (*graph.tasks, spec("c", "b", annotated=1.5))))
    finished(held)

    def annotations(dask_scheduler):
        return {key[0]: task.annotations for key, task in dask_scheduler.tasks.items()}

    found = inside.run_on_scheduler(annotations)
    assert found["c"] == {"ferro": {"seconds": 1.5}}
    for future in held:
        future.release()
    workload_kernels.await_forgotten(inside, [("a", 0), ("b", 0), ("c", 0)])


def test_an_error_in_a_task_is_raised_and_the_tasks_are_released(inside):
    graph = TaskGraph("wrong", (spec("a", nbytes=-1),))
    with pytest.raises(ValueError, match="negative count"):
        workload_kernels.run(inside, graph)
    assert inside.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) == 0


@pytest.mark.cluster
def test_a_workload_runs_on_worker_processes(client):
    graph = build("cholesky", nt=3, tile_bytes=16 * 16 * 8)
    assert workload_kernels.run(client, graph, kernel="real") > 0
    assert client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) == 0
