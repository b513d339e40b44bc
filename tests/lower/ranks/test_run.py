"""A pipeline's call for one client and for another: its keys, what it keeps, and how its inputs reach the tasks."""

from __future__ import annotations

import json

import dask
import numpy as np
import onnx.parser
import pytest
from distributed import Client, LocalCluster, futures_of, wait

from dask_ferro.errors import InputError
from dask_ferro.flow.run import MEMBER
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.optim import SGD, Adam
from dask_ferro.graph.tensor.tensor import input
from dask_ferro.lower.ranks import rank_assignment, spmd_tasks
from dask_ferro.lower.ranks.parallel import parallelize
from tests.graph.pipeline.nets import mlp
from tests.lower.ranks.runs import M, alike, flat
from tests.waiting import WHOLE_S, until


def training(optimizer=None):
    net = mlp(4, width=16)
    return net, parallelize(net.loss, params=net.params, stages=2, micro_batches=M, optimizer=optimizer)


def three_outputs(width=64):
    """Forwards with outputs that differ by a factor, on one input."""
    x = input("x", ("N", width), "float32")
    h = nn.relu(x) * 2.0
    return parallelize({"h": h, "s": h * 2.0, "r": h * 3.0}, stages=2, micro_batches=2, schedule="gpipe")


@pytest.fixture(scope="module")
def two():
    """A client of two workers of this process that is not the default one."""
    with (
        LocalCluster(n_workers=2, processes=False, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def keys_of(run):
    return set(dask.core.flatten(run.__dask_keys__()))


# ---- keys --------------------------------------------------------------------------------------------------


def test_pipelines_that_differ_in_what_carries_the_batch_share_no_key():
    x, t = input("x", ("N", 3), "float32"), input("t", ("M", 3), "float32")
    y = nn.relu(x) + nn.relu(t).sum()
    ones = {"x": np.ones((4, 3), np.float32), "t": np.ones((4, 3), np.float32)}
    how = {"stages": 2, "micro_batches": 2, "schedule": "gpipe"}
    one, both = (parallelize({"y": y}, batch_inputs=batch, **how)(ones) for batch in (["x"], ["x", "t"]))
    assert keys_of(one).isdisjoint(keys_of(both))
    assert one.compute(scheduler="sync")[0, 0] == 13
    assert both.compute(scheduler="sync")[0, 0] == 7


@pytest.mark.parametrize("rows", [8, 20_000], ids=["inside the tasks", "as tasks"])
def test_tasks_written_without_a_client_and_for_one_share_the_cluster(two, rows):
    """A collection submitted by name, and computed on the same client."""
    run = three_outputs()(np.ones((rows, 64), np.float32))
    early = two.compute(run)
    held = two.persist(run)
    found = run.compute(scheduler=two)
    for outputs in (found, early.result(timeout=WHOLE_S), held.compute(scheduler=two)):
        assert {name: float(array[0, 0]) for name, array in outputs.items()} == {"h": 2, "s": 4, "r": 6}


@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["gradients", "optimizer"])
def test_no_key_is_of_two_tasks_if_two_clients_write_a_step(two, caplog, optimizer):
    net, step = training(optimizer)
    run = step(net.batch(32 * M))
    wanted = run.compute(scheduler="sync")
    early = two.compute(run)
    alike(run.compute(scheduler=two), wanted)
    alike(early.result(timeout=WHOLE_S), wanted)
    assert "different `run_spec`" not in caplog.text


# ---- inputs ------------------------------------------------------------------------------------------------


def test_an_input_is_inside_the_tasks_that_read_it_or_one_task(monkeypatch):
    net, step = training()
    batch = net.batch(2 * M)
    inside = step(batch)
    assert inputs_of(inside) == 0
    monkeypatch.setattr(spmd_tasks, "EMBED_BYTES", 0)
    apart = step(batch)
    assert inputs_of(apart) > 0
    alike(apart.compute(scheduler="sync"), inside.compute(scheduler="sync"))


def inputs_of(run):
    """The number of tasks of a run that are inputs."""
    return sum(str(key[0]).startswith("spmd-input") for key in run.__dask_graph__().to_dict())


def test_what_a_worker_had_is_computed_again_from_the_arrays_in_the_graph():
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        held = client.persist(three_outputs()(np.ones((20_000, 64), np.float32)))
        wait(futures_of(held), timeout=WHOLE_S)
        worker = next(iter(cluster.workers.values()))
        cluster.sync(worker.close, timeout=WHOLE_S, nanny=False)
        found = held.compute()
    assert {name: float(array[0, 0]) for name, array in found.items()} == {"h": 2, "s": 4, "r": 6}


# ---- workers and clients -----------------------------------------------------------------------------------


def test_workers_that_join_after_the_call_have_their_stages(monkeypatch):
    monkeypatch.setattr(rank_assignment, "LOOKED_UP_S", 0.0)
    net, step = training()
    batch = net.batch(2 * M)
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        run = step(batch)
        assert homes_of(run) == set()
        for workers in (1, 2):
            cluster.scale(workers)
            client.wait_for_workers(workers, timeout=WHOLE_S)
            assert homes_of(run) == set(client.nthreads())
        alike(run.compute(), step(batch).compute(scheduler="sync"))


def homes_of(run):
    """The workers in the annotations of a run's tasks."""
    graph = run.__dask_graph__()
    layers = [layer for layer in graph.layers.values() if MEMBER in (layer.annotations or {})]
    return {layer.annotations[MEMBER](key).worker for layer in layers for key in layer}


# ---- what Dask makes of it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [{"stages": 2, "micro_batches": M}, {}], ids=["two stages", "one graph"])
def test_persisted_steps_keep_losses_and_nothing_else_of_the_steps_before(two, cut):
    net = mlp(4, width=16)
    step = parallelize(net.loss, params=net.params, optimizer=SGD(0.1), **cut)
    with two.as_current():
        now, losses = {}, []
        for seed in range(3):
            run = step(net.batch(2 * M, seed), **now).persist(scheduler=two)
            now = {"params": run.params, "state": run.state}
            losses.append(run.loss)
            wait(futures_of(run), timeout=WHOLE_S)
        kept = {future.key for future in futures_of([run, losses])}
        del now

        def wanted(dask_scheduler):
            return {ts.key for ts in dask_scheduler.tasks.values() if ts.state == "memory"}

        until(lambda: two.run_on_scheduler(wanted) == kept, "the parameters of earlier steps to be released")


@pytest.mark.parametrize("optimizer", [None, SGD(0.1)], ids=["gradients", "optimizer"])
def test_an_optimized_run_is_the_run(optimizer):
    net, step = training(optimizer)
    run = step(net.batch(2 * M))
    (found,) = dask.optimize(run)
    alike(found.compute(scheduler="sync"), run.compute(scheduler="sync"))


def test_a_pipeline_without_parameters_in_its_tree_is_refused():
    net = mlp(4, width=16)
    with pytest.raises(InputError, match="params: got no tensors"):
        parallelize(net.loss, params={"w": []}, stages=2, micro_batches=M)


@pytest.mark.parametrize("dtype", [None, object], ids=["numpy's text", "objects"])
def test_text_is_an_input(dtype):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 19]> equal (string[N] x, string[N] z) => (bool[N] y) { y = Equal(x, z) }'
    )
    step = parallelize(model, stages=1, micro_batches=2, schedule="gpipe")
    given = {"x": np.array(list("abcd"), dtype), "z": np.array(list("abxd"), dtype)}
    assert step(given).compute(scheduler="sync").tolist() == [True, True, False, True]


def test_a_state_that_was_saved_as_text_goes_on():
    net, step = training(Adam(0.01))
    one, two = net.batch(2 * M, 1), net.batch(2 * M, 2)
    first = step(one).compute(scheduler="sync")
    wanted = step(two, params=first.params, state=first.state).compute(scheduler="sync")
    as_lists = {name: [array.tolist() for array in flat(part)] for name, part in first.state.items()}
    read = json.loads(json.dumps(as_lists))
    state = {name: like(first.state[name], iter(read[name])) for name in first.state}
    alike(step(two, params=first.params, state=state).compute(scheduler="sync"), wanted)


def like(tree, values):
    if isinstance(tree, dict):
        return {name: like(part, values) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [like(part, values) for part in tree]
    return next(values)
