"""Pipelines: every schedule gives the same bits, and the order of a list is kept by real workers."""

from __future__ import annotations

import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import dask.array as da
import distributed
import numpy as np
import onnx_ir as ir
import pytest
from distributed import get_task_stream
from hypothesis import given, settings

import dask_ferro as ff
from dask_ferro.graph import nn, tree
from dask_ferro.graph.autodiff import grad
from dask_ferro.graph.schedule import Schedule
from dask_ferro.graph.schedules.action import Action
from dask_ferro.graph.schedules.closed import StageSeconds
from dask_ferro.graph.schedules.known import NAMES, known
from dask_ferro.graph.sleeping import sleeping
from dask_ferro.graph.tensor import argument, asarray
from dask_ferro.graph.tensor_model import build
from dask_ferro.lower.actions import Values
from dask_ferro.lower.pipeline import Pipeline, pipeline
from tests.graph.pipeline_nets import mlp, tied, transformer, without_pipeline
from tests.graph.schedules import feasible
from tests.graphs import mlp as onnx_mlp
from tests.graphs import mlp_reference

NETS = {"mlp": mlp, "tied": tied, "transformer": transformer}
KINDS = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}
M = 4


@pytest.fixture(scope="module")
def reference():
    """Each net's loss and gradients without a pipeline."""
    nets = {name: make() for name, make in NETS.items()}
    return {
        name: (net, net.batch(3 * M), *without_pipeline(net, net.batch(3 * M), M, whole_model))
        for name, net in nets.items()
    }


def whole_model(outputs):
    """The outputs as one model in this process."""
    model, bound = build(outputs)
    graph = ff.from_onnx(ir.to_proto(model), granularity="model")
    return lambda feeds: graph(bound | feeds).compute(scheduler="sync")


def same(result, wanted):
    loss, grads = result
    np.testing.assert_array_equal(loss, wanted[0])
    flat = [array for part in leaves(grads) for array in part]
    assert len(flat) == len(wanted[1])
    for got, value in zip(flat, wanted[1], strict=True):
        np.testing.assert_array_equal(got, value)


def leaves(part):
    if isinstance(part, np.ndarray):
        return [[part]]
    return [found for p in (part.values() if isinstance(part, dict) else part) for found in leaves(p)]


# ---- the same numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_every_schedule_gives_the_bits_of_no_pipeline(reference, name, schedule):
    net, batch, *wanted = reference[name]
    step = pipeline(net.loss, net.params, stages=2, micro_batches=M, schedule=schedule)
    same(step(batch).compute(scheduler="sync"), wanted)


@pytest.mark.parametrize("schedule", NAMES)
def test_where_the_engine_fuses_nodes_the_bits_are_those_of_one_worker_with_the_same_cut(reference, schedule):
    net, batch, loss, grads = reference["transformer"]
    step = pipeline(net.loss, net.params, stages=2, micro_batches=M, schedule=schedule)
    chunks = range(step.schedule.chunks)
    turn = [f"{c}F{{0}}" for c in chunks] + [f"{c}B{{0}}" for c in reversed(chunks)]
    alone = Schedule.of([[cell.format(i) for i in range(M) for cell in turn]], "one by one")
    value, found = pipeline(net.loss, net.params, schedule=alone)(batch).compute(scheduler="sync")
    same(step(batch).compute(scheduler="sync"), (value, [g for [g] in leaves(found)]))
    assert value == pytest.approx(loss, rel=1e-9)
    for [g], wanted in zip(leaves(found), grads, strict=True):
        np.testing.assert_allclose(g, wanted, rtol=1e-5, atol=1e-9)


@settings(max_examples=6, deadline=None)
@given(feasible())
def test_any_list_that_can_run_gives_the_bits_of_no_pipeline(schedule):
    net = mlp(layers=4, width=3)
    batch = net.batch(2 * schedule.micro_batches)
    wanted = without_pipeline(net, batch, schedule.micro_batches, whole_model)
    for edges in ("window", "chain"):
        step = pipeline(net.loss, net.params, schedule=schedule, edges=edges)
        same(step(batch).compute(scheduler="sync"), wanted)


def test_threads_give_the_same_bits(reference):
    net, batch, *wanted = reference["tied"]
    same(
        pipeline(net.loss, net.params, stages=2, micro_batches=M)(batch).compute(scheduler="threads"), wanted
    )


def test_a_schedule_from_a_file(reference, tmp_path):
    net, batch, *wanted = reference["mlp"]
    rows = [["0F0", "0F1", "0F2", "0F3", "0B3", "0B2", "0B1", "0B0"]]
    Schedule.of(rows, "all back").save(tmp_path / "own.csv")
    step = pipeline(net.loss, net.params, schedule=str(tmp_path / "own.csv"))
    assert step.schedule.stages == Schedule.of(rows).stages
    same(step(batch).compute(scheduler="sync"), wanted)


def test_losses_are_summed_if_asked(reference):
    net, batch, loss, grads = reference["mlp"]
    step = pipeline(net.loss, net.params, stages=2, micro_batches=M, reduction="sum")
    got, found = step(batch).compute(scheduler="sync")
    assert got == M * loss  # exact: M is a power of two
    np.testing.assert_array_equal(found[0]["w"], M * grads[0])


def test_parameters_of_a_call_take_the_place_of_the_constants(reference):
    net, batch, *_ = reference["mlp"]
    step = pipeline(net.loss, net.params, stages=2, micro_batches=M)
    moved = [{"w": np.zeros((6, 6)), "b": np.full(6, i + 1.0)} for i in range(len(net.params))]
    loss, grads = step(batch, params=moved).compute(scheduler="sync")
    assert loss == pytest.approx(np.mean((9.0 - batch["t"]) ** 2))
    assert grads[0]["b"].tolist() == [0.0] * 6
    np.testing.assert_allclose(grads[-1]["b"], 2 * np.mean(9.0 - batch["t"], axis=0) / 6)


def test_the_form_of_parameters_comes_back():
    x = argument("x", ("N", 2), np.float64)
    w = asarray(np.eye(2))
    loss = nn.mse(nn.sigmoid(x @ w) @ w, x)
    _, found = pipeline(loss, w, stages=2, micro_batches=1)(np.ones((3, 2))).compute(scheduler="sync")
    assert found.shape == (2, 2)
    _, found = pipeline(loss, {"only": [w]}, stages=2, micro_batches=1)(np.ones((3, 2))).compute(
        scheduler="sync"
    )
    assert found["only"][0].shape == (2, 2)


def test_the_loss_of_a_whole_batch_is_that_of_its_micro_batches(reference):
    net, batch, loss, grads = reference["mlp"]
    outputs = {
        "loss": net.loss,
        **{f"g{i}": g for i, g in enumerate(tree.leaves(grad(net.loss, net.params)))},
    }
    whole = whole_model(outputs)(batch)
    assert whole["loss"] == pytest.approx(loss, rel=1e-12)
    for i, g in enumerate(grads):
        np.testing.assert_allclose(whole[f"g{i}"], g, rtol=1e-10, atol=1e-13)


# ---- inference ---------------------------------------------------------------------------------------------


def test_an_onnx_model_runs_its_forwards():
    x = np.random.default_rng(0).standard_normal((8, 6), dtype=np.float32)
    step = pipeline(onnx_mlp(), stages=2, micro_batches=4, schedule="gpipe")
    assert {action.kind for row in step.schedule.stages for action in row} == {"F"}
    np.testing.assert_allclose(step(x).compute(scheduler="sync"), mlp_reference(x), rtol=1e-5)


def test_several_outputs_come_by_name_whichever_chunk_makes_them():
    x = argument("x", ("N", 3), np.float64)
    early = nn.relu(x)
    late = nn.sigmoid(early @ asarray(np.ones((3, 3))))
    batch = np.random.default_rng(0).standard_normal((6, 3))
    step = pipeline({"early": early, "late": late, "size": late.sum()}, stages=3, micro_batches=2)
    got = step(batch).compute(scheduler="sync")
    np.testing.assert_array_equal(got["early"], np.maximum(batch, 0))
    assert got["late"].shape == (6, 3)
    np.testing.assert_allclose(got["size"].sum(), got["late"].sum())


def test_a_dask_array_is_cut_into_micro_batches(reference):
    net, batch, *wanted = reference["mlp"]
    lazy = {name: da.from_array(a, chunks=(5, 4)) for name, a in batch.items()}
    same(pipeline(net.loss, net.params, stages=2, micro_batches=M)(lazy).compute(scheduler="sync"), wanted)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            {"schedule": "1f2b", "stages": 2}, "'1f2b', wanted one of gpipe, 1f1b", id="an unknown name"
        ),
        pytest.param({"stages": 2}, "wanted stages and micro_batches", id="no micro-batches"),
        pytest.param({"micro_batches": 2}, "wanted stages and micro_batches", id="no stages"),
        pytest.param(
            {"stages": ["layer0"] * 3, "micro_batches": 2, "schedule": "zb-v"},
            "got 3 signals, wanted a multiple of the 2 chunks",
            id="signals that make no whole stages",
        ),
        pytest.param(
            {"schedule": Schedule.of([["0F0", "0B0"]]), "micro_batches": 3},
            "micro_batches: got 3, but it has 1",
            id="another number of micro-batches than the schedule's",
        ),
        pytest.param(
            {"schedule": Schedule.of([["0F0"]])},
            "has forwards alone",
            id="parameters and nothing to train with",
        ),
        pytest.param(
            {"stages": 2, "micro_batches": 2, "reduction": "max"}, "reduction: got 'max'", id="a reduction"
        ),
    ],
)
def test_options_that_do_not_go_together(options, said):
    net = mlp(layers=2)
    with pytest.raises(ff.ConfigError, match=said):
        pipeline(net.loss, net.params, **options)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            {"x": np.ones((7, 6))}, "wanted one number, a multiple of 4", id="rows that do not divide"
        ),
        pytest.param({"x": None}, "carries the batch and has no rows", id="no array"),
        pytest.param({"y": np.ones(3)}, "unknown input 'y'; it takes x, t", id="a name that is not there"),
        pytest.param({"x": np.ones((12, 5))}, "has 5 on axis 1, wanted 6", id="another width"),
        pytest.param(
            {"x": np.ones((12, 6), np.float32)}, "dtype float32, wanted float64", id="another dtype"
        ),
        pytest.param(
            {"params": [{"w": 1}]}, "got a list of 1, wanted a list of 9", id="parameters of another form"
        ),
    ],
)
def test_a_batch_that_does_not_fit(reference, change, said):
    net, batch, *_ = reference["mlp"]
    step = pipeline(net.loss, net.params, stages=2, micro_batches=M)
    with pytest.raises(ff.ConfigError, match=said):
        step(**(batch | change))


def test_a_missing_input_is_named():
    net = mlp(layers=2)
    with pytest.raises(ff.ConfigError, match="missing input 't'; it takes x, t"):
        pipeline(net.loss, net.params, stages=2, micro_batches=1)(x=np.ones((2, 6)))


# ---- what travels ------------------------------------------------------------------------------------------


def test_activations_stay_where_they_were_made():
    values = Values({"out": np.ones(3)}, {"activation": np.ones(1000)})
    there = pickle.loads(pickle.dumps(values))
    assert list(there.sent) == ["out"]
    assert there.kept == {}
    assert len(pickle.dumps(values)) < 1000 < 8000 < values.__sizeof__()


def test_the_same_call_has_the_same_keys_and_another_has_none_of_them():
    net = mlp(layers=2)
    step = pipeline(net.loss, net.params, stages=2, micro_batches=2)
    keys = [set(step(net.batch(4, seed)).__dask_graph__()) for seed in (1, 1, 2)]
    assert keys[0] == keys[1]
    assert keys[0].isdisjoint(keys[2])


def test_split_backwards_sum_their_own_gradients_and_whole_ones_have_a_task_for_it():
    net = mlp(layers=4)
    counts = {}
    for schedule in ("1f1b", "zb-h1"):
        graph = pipeline(net.loss, net.params, stages=2, micro_batches=M, schedule=schedule)(
            net.batch(4)
        ).__dask_graph__()
        names = [key[0].rpartition("-")[0] for key in graph if isinstance(key, tuple)]
        counts[schedule] = {name: names.count(name) for name in sorted(set(names))}
    assert counts == {
        "1f1b": {"backward": 8, "forward": 8, "gradient_sum": 8},
        "zb-h1": {"forward": 8, "input_grad": 8, "weight_grad": 8},
    }


def test_the_first_forwards_stand_in_line():
    step = Pipeline(sleeping(3, StageSeconds(0, 0, 0)), [0, 1, 2], known("1f1b", 3, 5))
    graph = step(np.zeros((5, 1), np.float32)).__dask_graph__()
    waits = {
        key[1:]: {k[1:] for k in task.dependencies}
        for key, task in graph.items()
        if key[0].startswith("forward")
    }
    assert [waits[0, i] for i in range(5)] == [set(), {(0, 0)}, {(0, 1)}, {(0, 0)}, {(0, 1)}]
    assert [waits[1, i] for i in range(3)] == [{(0, 0)}, {(0, 1)}, {(0, 2), (1, 0)}]


# ---- real workers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four():
    """Four worker processes of one thread each, and a client of theirs."""
    with (
        ff.LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def order_of(client, run):
    """The actions that each worker computed, in order, and the value."""
    with get_task_stream(client) as stream:
        value = run.compute()
    rows = {}
    for record in sorted(
        stream.data, key=lambda r: min(s["start"] for s in r["startstops"] if s["action"] == "compute")
    ):
        name, *numbers = record["key"] if isinstance(record["key"], tuple) else (record["key"],)
        kind = KINDS.get(name.rpartition("-")[0])
        if kind is not None:
            chunk, micro_batch = numbers
            rows.setdefault(record["worker"], []).append(Action(chunk, kind, micro_batch))
    return [tuple(rows[worker]) for worker in sorted(rows)], value


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_four_processes_keep_the_exact_order_of_the_list(four, name):
    model = sleeping(4, StageSeconds(0.1, 0.1, 0.1))
    step = Pipeline(model, list(range(4)), pipeline_of(name), edges="chain")
    order, (loss, grads) = order_of(four, step(np.arange(12, dtype=np.float32)[:, None]))
    nothing = {Action(0, "I", i) for i in range(6)}  # nobody asks for the gradient of the batch itself
    assert order == [tuple(a for a in row if a not in nothing) for row in step.schedule.stages]
    assert loss == 5.5
    assert [g.ravel().tolist() for g in grads] == [[5.0, 6.0]] * 4


@pytest.mark.cluster
def test_a_window_keeps_the_memory_of_the_list_where_a_busy_machine_leaves_its_order(four):
    step = Pipeline(sleeping(4, StageSeconds(0.01, 0.01, 0.01)), list(range(4)), pipeline_of("1f1b"))
    assert step.lowering.form == "window"
    order, _ = order_of(four, step(np.zeros((6, 1), np.float32)))
    kept = [max(accumulate({"F": 1, "B": -1}[action.kind] for action in row)) for row in order]
    assert all(k <= peak for k, peak in zip(kept, (4, 3, 2, 1), strict=True))


def pipeline_of(name):
    return known(name, 4, 6)


@pytest.mark.cluster
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_workers_give_the_bits_of_one_process(four, schedule):
    net = tied(layers=12)
    batch = net.batch(12)
    run = pipeline(net.loss, net.params, stages=4, micro_batches=M, schedule=schedule)(batch)
    wanted = run.compute(scheduler="sync")
    for result in (run.compute(), four.compute(run).result(), run.persist().compute()):
        np.testing.assert_array_equal(result[0], wanted[0])
        for name, value in wanted[1].items():
            np.testing.assert_array_equal(result[1][name], value)


@pytest.mark.cluster
def test_stages_run_on_the_workers_that_are_named(four):
    workers = sorted(four.nthreads(), reverse=True)
    step = Pipeline(sleeping(4, StageSeconds(0, 0, 0)), list(range(4)), pipeline_of("gpipe"), workers=workers)
    order, _ = order_of(four, step(np.zeros((6, 1), np.float32)))
    assert [{action.chunk for action in row} for row in order] == [{3}, {2}, {1}, {0}]
    net = mlp(layers=2)
    run = pipeline(net.loss, net.params, stages=2, micro_batches=1, workers=workers)(net.batch(2))
    with pytest.raises(ff.ConfigError, match="got 4, wanted one for each of the 2 stages"):
        run.compute()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("schedule", "in_graph"),
    [
        pytest.param("1f1b", 2 << 20, id="whole backwards"),
        pytest.param("zb-h1", 2 << 20, id="split backwards"),
        pytest.param("1f1b", 0, id="inputs that are lost and sent again"),
    ],
)
def test_a_worker_that_is_killed_in_the_middle_of_a_step_changes_nothing(
    four, monkeypatch, schedule, in_graph
):
    monkeypatch.setattr("dask_ferro.lower.pipeline_run._IN_GRAPH_BYTES", in_graph)
    net = mlp(layers=8, width=64)
    step = pipeline(net.loss, net.params, stages=4, micro_batches=24, schedule=schedule)
    run = step(net.batch(24 * 8, seed=7))
    wanted = run.compute(scheduler="sync")
    pids = four.run(os.getpid)
    victim = sorted(pids)[1]
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(run.compute, scheduler=four)
        while four.run_on_scheduler(furthest, chunk=1) < 5:
            assert not step.done()
            time.sleep(0.02)
        os.kill(pids[victim], signal.SIGKILL)
        loss, grads = step.result(timeout=60)
    assert victim not in four.nthreads()
    np.testing.assert_array_equal(loss, wanted[0])
    for got, value in zip(grads, wanted[1], strict=True):
        np.testing.assert_array_equal(got["w"], value["w"])
        np.testing.assert_array_equal(got["b"], value["b"])
    four.wait_for_workers(4, timeout=30)


def furthest(chunk, dask_scheduler):
    """The last micro-batch of a chunk of which a backward's result is there; runs in the scheduler."""
    return max(
        (
            ts.key[2]
            for ts in dask_scheduler.tasks.values()
            if ts.state == "memory" and ts.prefix.name in ("backward", "input_grad") and ts.key[1] == chunk
        ),
        default=0,
    )
