"""Pipelines on real workers: the order of actions, memory, and results when a worker dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import dask
import numpy as np
import pytest
from distributed import futures_of
from emulated.sleeping import sleeping

import dask_ferro as ff
from dask_ferro.graph.pipeline.action import Action
from dask_ferro.graph.pipeline.schedules import make_schedule as named_schedule
from dask_ferro.graph.tensor.optim import Adam
from dask_ferro.lower.client import use_client
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.lower.ranks.pipeline import Pipeline
from tests.clusters import running
from tests.graph.pipeline.nets import mlp, tied
from tests.lower.ranks.runs import (
    M,
    actions_of,
    equal,
    inner_tasks,
    killed_in_a_flow,
    leaves,
    same,
    trained,
    workers_of,
)
from tests.waiting import finished, result

KINDS = ("forward", "backward", "input_grad", "weight_grad")


def order_of(client, run):
    """The actions that each worker computed, in order, and the value."""
    ran, value = inner_tasks(client, run.compute)
    actions = actions_of(run)
    rows = {
        worker: tuple(actions[key][0] for key in keys if key[0].rpartition("-")[0] in KINDS)
        for worker, keys in ran.items()
    }
    return [rows[worker] for worker in workers_of(client)], value


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_four_processes_keep_the_exact_order_of_the_list(four, name):
    model = sleeping(4, 0.1)
    step = Pipeline(model, pipeline_of(name), list(range(4)))
    run = step(np.arange(12, dtype=np.float32)[:, None])
    nothing = {Action(0, "I", i) for i in range(6)}  # the gradient of the batch itself is not computed
    wanted = [tuple(a for a in row if a not in nothing) for row in step.schedule.stages]
    order, (loss, grads) = order_of(four, run)
    assert order == wanted
    assert loss == 5.5
    assert [g.ravel().tolist() for g in grads] == [[5.0, 6.0]] * 4


def pipeline_of(name):
    return named_schedule(name, 4, 6)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        ("1f1b", 12),
        ("zb-v", 12),
        ("dualpipe-v", 16),
    ],
)
def test_workers_give_the_bits_of_one_process(four, schedule, rows):
    net = tied(layers=12)
    batch = net.batch(rows)
    run = parallelize(net.loss, params=net.params, stages=4, micro_batches=M, schedule=schedule)(batch)
    wanted = run.compute(scheduler="sync")
    for found in (run.compute(), result(four.compute(run)), run.persist().compute()):
        np.testing.assert_array_equal(found[0], wanted[0])
        for name, value in wanted[1].items():
            np.testing.assert_array_equal(found[1][name], value)


@pytest.mark.cluster
def test_stages_run_on_the_workers_that_are_named(four):
    workers = workers_of(four)[::-1]
    names = [four.scheduler_info()["workers"][worker]["name"] for worker in workers]
    for rows, given in enumerate((workers, names)):  # other rows, other tasks
        model = sleeping(4, 0.0)
        step = Pipeline(model, pipeline_of("gpipe"), list(range(4)), workers=given)
        order, _ = order_of(four, step(np.full((6, 1), rows, np.float32)))
        assert [{action.chunk for action in row} for row in order] == [{3}, {2}, {1}, {0}]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("workers", "said"),
    [
        pytest.param(
            ["tcp://127.0.0.1:1", 0], r"has no \['tcp://127.0.0.1:1'\], only .*0 at tcp", id="not there"
        ),
        pytest.param([0, 1, 2, 3], "got 4, wanted one for each of the 2 stages", id="too many"),
    ],
)
def test_workers_that_cannot_be_the_stages_are_refused(four, workers, said):
    net = mlp(layers=2)
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=1, workers=workers)
    with pytest.raises(ff.InputError, match=said):
        step(net.batch(2))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("schedule", "embedded"),
    [
        pytest.param("1f1b", 2 << 20, id="whole backwards"),
        pytest.param("zb-h1", 2 << 20, id="split backwards"),
        pytest.param("1f1b", 0, id="inputs that are tasks"),
    ],
)
def test_a_worker_that_is_killed_in_the_middle_of_a_step_changes_nothing(
    four, monkeypatch, schedule, embedded
):
    monkeypatch.setattr("dask_ferro.lower.ranks.spmd_tasks.EMBED_BYTES", embedded)
    net = mlp(layers=8, width=64)
    step = parallelize(net.loss, params=net.params, stages=4, micro_batches=24, schedule=schedule)
    run = step(net.batch(24 * 8, seed=7))
    wanted = run.compute(scheduler="sync")
    with ThreadPoolExecutor(1) as pool:
        begin = partial(pool.submit, run.compute, scheduler=four)
        loss, grads = killed_in_a_flow(four, begin).result(timeout=60)
    np.testing.assert_array_equal(loss, wanted[0])
    for got, value in zip(grads, wanted[1], strict=True):
        np.testing.assert_array_equal(got["w"], value["w"])
        np.testing.assert_array_equal(got["b"], value["b"])


@pytest.mark.cluster
@pytest.mark.parametrize("embedded", [2 << 20, 0])
def test_parameters_stay_on_their_stages_from_step_to_step(four, monkeypatch, embedded):
    monkeypatch.setattr("dask_ferro.lower.ranks.spmd_tasks.EMBED_BYTES", embedded)
    net, optimizer = mlp(layers=4, width=64), Adam(0.01)
    batches = [net.batch(2 * M, seed) for seed in range(3)]
    step = parallelize(
        net.loss,
        params=net.params,
        stages=[f"layer{i}" for i in range(4)],
        micro_batches=M,
        optimizer=optimizer,
    )
    now, homes = None, workers_of(four)
    for batch in batches:
        now = step(batch, **({} if now is None else {"params": now.params, "state": now.state})).submit()
        finished(futures_of(now.params))
        for home, part in zip(homes, now.params, strict=True):
            assert all(four.who_has([f])[f.key] == (home,) for f in futures_of(part))
    *_, wanted = trained(net, optimizer, batches)
    equal(type(now)(*dask.compute(*now)), wanted)


@pytest.mark.cluster
def test_parameters_that_are_futures_are_refused(four):
    net = mlp(layers=4)
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M)
    held = [{name: four.scatter(np.zeros(1)) for name in part} for part in net.params]
    with pytest.raises(ff.InputError, match="got Future, wanted an array"):
        step(net.batch(2 * M), params=held)


def flat(tree):
    return [array for part in leaves(tree) for array in part]


@pytest.mark.cluster
def test_a_run_is_written_again_for_another_client_and_for_none(four):
    net = mlp(layers=4, width=32)
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M)
    with use_client(None):
        run = step(net.batch(2 * M))  # before there is a cluster
    wanted = run.compute(scheduler="sync")
    for _ in range(2):
        same(run.compute(), (wanted[0], flat(wanted[1])))
        same(run.compute(scheduler="sync"), (wanted[0], flat(wanted[1])))
    with running(2, kind=ff.LocalCluster, processes=False):
        same(run.compute(), (wanted[0], flat(wanted[1])))
    same(run.compute(scheduler=four), (wanted[0], flat(wanted[1])))
