"""Pipelines: every schedule gives the same bits, and what is wrong is refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from emulated.sleeping import sleeping
from hypothesis import given, settings

import dask_ferro as ff
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.schedules import NAMES
from dask_ferro.graph.pipeline.schedules import make_schedule as named_schedule
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.tensor import asarray, input
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.lower.ranks.pipeline import Pipeline
from tests.each import every
from tests.graph.pipeline.nets import mlp, tied, transformer, without_pipeline
from tests.graph.pipeline.schedules import feasible
from tests.graphs import mlp as onnx_mlp
from tests.graphs import mlp_reference
from tests.lower.ranks.runs import M, actions_of, check_activations, same, whole_model

NETS = {"mlp": mlp, "tied": tied, "transformer": transformer}


@pytest.fixture(scope="module")
def reference():
    """Each net's loss and gradients without a pipeline."""
    nets = {name: make() for name, make in NETS.items()}
    return {
        name: (net, net.batch(3 * M), *without_pipeline(net, net.batch(3 * M), M, whole_model))
        for name, net in nets.items()
    }


# ---- the same numbers --------------------------------------------------------------------------------------


# Two stages read a tied weight; a transformer's values are of several shapes.
@every(
    ("schedule", "name"),
    [*product(NAMES, ["tied"]), ("1f1b", "mlp"), ("interleaved", "transformer"), ("zb-h1", "transformer")],
)
def test_every_schedule_gives_the_bits_of_no_pipeline(reference, name, schedule):
    net, batch, *wanted = reference[name]
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M, schedule=schedule)
    same(step(batch).compute(scheduler="sync"), wanted)


@settings(max_examples=6, deadline=None)
@given(feasible())
def test_any_list_that_can_run_gives_the_bits_of_no_pipeline(schedule):
    net = mlp(layers=4, width=3)
    batch = net.batch(2 * schedule.micro_batches)
    wanted = without_pipeline(net, batch, schedule.micro_batches, whole_model)
    step = parallelize(net.loss, params=net.params, schedule=schedule)
    same(step(batch).compute(scheduler="sync"), wanted)


def test_a_schedule_of_ones_own(reference):
    net, batch, *wanted = reference["mlp"]
    rows = [["0F0", "0F1", "0F2", "0F3", "0B3", "0B2", "0B1", "0B0"]]
    step = parallelize(net.loss, params=net.params, schedule=Schedule.of(rows, "all back"))
    same(step(batch).compute(scheduler="sync"), wanted)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_half_precision_is_summed_in_float32_and_rounded_once(schedule):
    rng = np.random.default_rng(2)
    x = input("x", ("N", 4), np.float16)
    w = asarray(rng.standard_normal((4, 4)).astype(np.float16), name="w")
    hidden = nn.sigmoid(x @ w)
    loss = nn.mse_loss(nn.sigmoid(hidden @ w), x)
    batch, m = rng.standard_normal((96, 4)).astype(np.float16), 48
    run = whole_model({"loss": loss, "g": grad(loss, [w])[0]})
    parts = [run({"x": part}) for part in np.split(batch, m)]
    first, *rest = [{n: value.astype(np.float32) for n, value in part.items()} for part in parts]
    sums = {n: sum((part[n] for part in rest), first[n]) for n in first}
    step = parallelize(loss, params=[w], stages=2, micro_batches=m, schedule=schedule)
    value, [found] = step(batch).compute(scheduler="sync")
    assert (value.dtype, found.dtype) == (np.float16, np.float16)
    np.testing.assert_array_equal(found, (sums["g"] / m).astype(np.float16))
    np.testing.assert_array_equal(value, (sums["loss"] / m).astype(np.float16))
    narrow = sum((p["g"] for p in parts[1:]), parts[0]["g"]) / np.float16(m)
    assert (narrow != found).any()


def test_losses_are_summed_if_asked(reference):
    net, batch, loss, grads = reference["mlp"]
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M, reduction="sum")
    got, found = step(batch).compute(scheduler="sync")
    assert got == M * loss  # exact: M is a power of two
    np.testing.assert_array_equal(found[0]["w"], M * grads[0])


def test_parameters_of_a_call_take_the_place_of_the_constants(reference):
    net, batch, *_ = reference["mlp"]
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M)
    moved = [{"w": np.zeros((6, 6)), "b": np.full(6, i + 1.0)} for i in range(len(net.params))]
    loss, grads = step(batch, params=moved).compute(scheduler="sync")
    assert loss == pytest.approx(np.mean((9.0 - batch["t"]) ** 2))
    assert grads[0]["b"].tolist() == [0.0] * 6
    np.testing.assert_allclose(grads[-1]["b"], 2 * np.mean(9.0 - batch["t"], axis=0) / 6)


# ---- inference ---------------------------------------------------------------------------------------------


def test_an_onnx_model_runs_its_forwards():
    x = np.random.default_rng(0).standard_normal((8, 6), dtype=np.float32)
    step = parallelize(onnx_mlp(), stages=2, micro_batches=4, schedule="gpipe")
    assert {action.kind for row in step.schedule.stages for action in row} == {"F"}
    np.testing.assert_allclose(step(x).compute(scheduler="sync"), mlp_reference(x), rtol=1e-5)


def test_several_outputs_come_by_name_whichever_chunk_makes_them():
    x = input("x", ("N", 3), np.float64)
    early = nn.relu(x)
    late = nn.sigmoid(early @ asarray(np.ones((3, 3))))
    batch = np.random.default_rng(0).standard_normal((6, 3))
    step = parallelize({"early": early, "late": late, "size": late.sum()}, stages=3, micro_batches=2)
    got = step(batch).compute(scheduler="sync")
    np.testing.assert_array_equal(got["early"], np.maximum(batch, 0))
    assert got["late"].shape == (6, 3)
    np.testing.assert_allclose(got["size"].sum(), got["late"].sum())


def test_a_model_whose_weights_lie_in_a_file_is_cut():
    path = Path(__file__).parents[3] / "examples" / "models" / "digits_mlp.onnx"
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    [entry] = session.get_inputs()
    x = np.random.default_rng(0).random((12, *entry.shape[1:]), dtype=np.float32)
    got = parallelize(path, stages=2, micro_batches=4, schedule="gpipe")(x).compute(scheduler="sync")
    outputs = [o.name for o in session.get_outputs()]
    wanted = dict(zip(outputs, session.run(None, {entry.name: x}), strict=True))
    got = got if isinstance(got, dict) else {next(iter(wanted)): got}
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)


# ---- how it is cut and kept in order -----------------------------------------------------------------------


def test_a_stage_has_as_many_chunks_as_asked_for(reference):
    net, batch, *wanted = reference["mlp"]
    step = parallelize(
        net.loss, params=net.params, stages=2, micro_batches=M, schedule="interleaved", chunks=3
    )
    assert step.schedule.chunks == 6
    same(step(batch).compute(scheduler="sync"), wanted)
    small, how = mlp(layers=6), {"micro_batches": 4, "schedule": "interleaved", "chunks": 3}
    step = parallelize(small.loss, params=small.params, stages=[f"layer{i}" for i in range(6)], **how)
    assert (len(step.schedule.stages), step.schedule.chunks) == (2, 6)


def test_who_carries_the_batch_is_guessed_by_size_unless_it_is_said():
    x, table = input("x", (1, 3), np.float64), input("table", (1, 3), np.float64)
    y = nn.relu(x) + nn.relu(table).sum()
    options = {"stages": 2, "micro_batches": 4, "schedule": "gpipe"}
    rows = {"x": np.arange(12.0).reshape(4, 3)}
    given = rows | {"table": np.ones((1, 3))}
    with pytest.raises(ff.InputError, match=r"got rows {.*'table': 1.*batch_inputs=\[...\]"):
        parallelize({"y": y}, **options)(given)
    got = parallelize({"y": y}, batch_inputs=["x"], **options)(given).compute(scheduler="sync")
    np.testing.assert_array_equal(got, rows["x"] + 3.0)


@every("schedule", NAMES)
def test_activations_live_as_long_as_the_table_says(reference, schedule):
    net, batch, *_ = reference["mlp"]
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M, schedule=schedule)
    check_activations(step(batch), step.schedule)


# ---- what is refused ---------------------------------------------------------------------------------------


@every(
    ("options", "said"),
    [
        pytest.param({"schedule": "1f2b", "stages": 2}, "'1f2b', wanted one of gpipe.*, did you mean 1f1b",
            id="an unknown name"),
        pytest.param({"micro_batches": 0}, "micro_batches: got 0", id="no micro-batches"),
        pytest.param({"stages": ["layer0"] * 3, "micro_batches": 2, "schedule": "zb-v"},
            "got 3 regions, wanted a multiple of the 2 chunks", id="regions that make no whole stages"),
        pytest.param({"schedule": Schedule.of([["0F0", "0B0"]]), "micro_batches": 3},
            "micro_batches: got 3, but it has 1", id="another number of micro-batches than the schedule's"),
        pytest.param({"schedule": Schedule.of([["0F0"]])}, "has only forwards",
            id="parameters and nothing to train with"),
        pytest.param({"stages": 2, "micro_batches": 2, "chunks": 3}, "chunks: got 3 a stage, wanted 1",
            id="chunks where the schedule has one"),
        pytest.param({"schedule": Schedule.of([["0F0", "0B0"]]), "chunks": 2},
            "chunks: got 2, but its lists define them", id="chunks of lists"),
        pytest.param({"stages": 2, "micro_batches": 2, "batch_inputs": ["x", "y"]},
            r"batch_inputs: the model has no argument \['y'\]; it has x, t", id="a batch of what is no argument"),
        pytest.param({"stages": 2, "micro_batches": 2, "batch_inputs": []}, "batch_inputs: got no arguments",
            id="a batch of nothing"),
        pytest.param({"stages": 2, "micro_batches": 2, "reduction": "max"}, "reduction: got 'max'", id="a reduction"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(options, said):
    net = mlp(layers=2)
    with pytest.raises(ff.InputError, match=said):
        parallelize(net.loss, params=net.params, **options)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"x": np.ones((7, 6))}, r"got rows \{.*7.*\}, wanted one number; name in", id="rows that differ"),
        pytest.param({n: np.ones((3, 6)) for n in "xt"}, "got 3 rows of t, x, wanted a multiple of the 4 micro-batches",
            id="fewer rows than micro-batches"),
        pytest.param({n: np.ones((0, 6)) for n in "xt"}, "got 0 rows of t, x, wanted 1 or more", id="no rows"),
        pytest.param({n: np.ones((14, 6)) for n in "xt"}, "got 14 rows of t, x, wanted a multiple of the 4",
            id="rows that the micro-batches do not divide"),
        pytest.param({"x": None}, "carries the batch and has no rows", id="no array"),
        pytest.param({"y": np.ones(3)}, "unknown input 'y'; the model takes x.* t", id="a name that is not there"),
        pytest.param({"x": np.ones((12, 5))}, "has 5 on axis 1, wanted 6", id="another width"),
        pytest.param({"x": np.ones((12, 6), np.float32)}, "dtype float32, wanted float64", id="another dtype"),
        pytest.param({"params": [{"w": 1}]}, "got a list of 1, wanted a list of 9", id="parameters of another form"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit(reference, change, said):
    net, batch, *_ = reference["mlp"]
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M)
    with pytest.raises(ff.InputError, match=said):
        step(**(batch | change))


# ---- what travels ------------------------------------------------------------------------------------------


def test_gradients_of_a_micro_batch_are_added_by_one_task_a_stage():
    net = mlp(layers=4)
    counts = {}
    for schedule in ("1f1b", "zb-h1"):
        step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M, schedule=schedule)
        graph = step(net.batch(4)).__dask_graph__()
        names = [key[0].rpartition("-")[0] for key in graph if isinstance(key, tuple)]
        counts[schedule] = {name: names.count(name) for name in sorted({*names} - {"spmd-value"})}
    assert counts == {
        "1f1b": {"backward": 8, "forward": 8, "gradient": 9, "gradient_sum": 8},
        "zb-h1": {"forward": 8, "gradient": 9, "gradient_sum": 8, "input_grad": 4, "weight_grad": 8},
    }


def test_an_action_waits_for_the_one_before_it():
    model = sleeping(3, 0.0)
    run = Pipeline(model, named_schedule("1f1b", 3, 5), [0, 1, 2])(np.zeros((5, 1), np.float32))
    tasks = run.__dask_graph__()
    waits = {}
    actions = actions_of(run)
    for key, (action, _) in actions.items():
        if key[0].startswith("forward-"):
            others = [actions[k][0] for k in tasks[key].dependencies]
            waits[action.chunk, action.micro_batch] = {(a.chunk, a.micro_batch) for a in others}
    assert [waits[0, i] for i in range(5)] == [set(), {(0, 0)}, {(0, 1)}, {(0, 0)}, {(0, 1)}]
    assert [waits[1, i] for i in range(3)] == [{(0, 0)}, {(0, 1), (1, 0)}, {(0, 2), (1, 0)}]
