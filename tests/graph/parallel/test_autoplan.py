"""Proposals: what is split, what it is projected to take and hold, and that it runs with the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.bundling.partition import FLOW
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.parallel.autoplan import propose_plans
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.optim import SGD, Adam
from dask_ferro.graph.tensor.tensor import asarray, input
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.policy.estimates import Link
from tests.graph.sharding.shard_run import assert_same, evaluate, evaluate_sharded

FREE = Link(0.0, 1e15)


def mlp(width: int, *, layers: int = 4, batch: int = 64, trains: bool = False, dtype=np.float64):
    """Layers of one width with biases, and what they are bound to."""
    rng = np.random.default_rng(0)
    x = input("x", (batch, width), dtype)
    params, y = {}, x
    for i in range(layers):
        params[f"w{i}"] = asarray(
            (rng.standard_normal((width, width)) / np.sqrt(width)).astype(dtype), name=f"w{i}"
        )
        params[f"b{i}"] = asarray(rng.standard_normal(width).astype(dtype), name=f"b{i}")
        y = nn.relu(y @ params[f"w{i}"] + params[f"b{i}"])
    loss = (y * y).mean()
    gradients = {f"d_{n}": g for n, g in grad(loss, params).items()} if trains else {}
    return build({"loss": loss, "y": y, **gradients}, [x, *params.values()])


def row(found, data, tensor, stages):
    return next(r for r in found.rows if (r.data, r.tensor, r.stages) == (data, tensor, stages))


def test_columns_and_rows_take_turns_and_a_bias_goes_with_its_columns():
    given = row(propose_plans(mlp(16), 2), 1, 2, 1).inputs
    assert given == {
        "w0": {"tensor": 1}, "b0": {"tensor": 0}, "w1": {"tensor": 0},
        "w2": {"tensor": 1}, "b2": {"tensor": 0}, "w3": {"tensor": 0},
    }  # fmt: skip


def test_what_does_not_fit_is_not_proposed():
    small = propose_plans(mlp(64, trains=True), 4)
    least = min(r.memory for r in small.rows)
    assert propose_plans(mlp(64, trains=True), 4, memory=least).best.memory == least
    with pytest.raises(InputError, match="smallest plan takes") as error:
        _ = propose_plans(mlp(64, trains=True), 4, memory=1000).best
    assert f"a worker has {1000 / 2**20:.4g} MiB, and the smallest plan takes {least / 2**20:.4g}" in str(
        error.value
    )


def test_it_is_printed_with_seconds_and_memory_and_the_best_is_marked():
    found = propose_plans(mlp(16), 2)
    head, *lines = str(found).splitlines()
    assert head.split()[-3:] == ["MiB", "a", "worker"]
    assert [line for line in lines if line.startswith("*")] == [lines[found.rows.index(found.best)]]


@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2), (2, 2)])
def test_a_proposal_is_a_plan_that_runs_with_the_same_numbers(data, tensor):
    built = mlp(8, batch=8, trains=True)
    proposal = row(propose_plans(built, 4), data, tensor, 1)
    applied = apply_plan(built, proposal.as_plan())
    assert applied.mesh.ranks == data * tensor
    feeds = {"x": np.random.default_rng(1).standard_normal((8, 8)), **built.bound}
    assert_same(evaluate_sharded(applied.spmd(), feeds), evaluate(ir.to_proto(built.model), feeds))


def test_a_proposal_in_stages_is_a_plan_with_its_schedule():
    loss, params = training(rows="N")
    proposal = row(propose_plans(loss, 4, params=params, dims={"N": 8}), 2, 1, 2)
    given = {"schedule": "1f1b", "stages": 2, "micro_batches": proposal.micro_batches}
    assert proposal.as_plan() == {"mesh": {"data": 2}, "inputs": {"x": {"data": 0}}, **given}
    step = parallelize(loss, proposal.as_plan(), params)
    assert (len(step.schedule.stages), step.schedule.micro_batches) == (2, proposal.micro_batches)
    batch = {"x": np.random.default_rng(2).standard_normal((8, 16)).astype(np.float32)}
    found, wanted = (one(batch).compute(scheduler="sync") for one in (step, parallelize(loss, params=params)))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    # A keyword overrides the plan.
    assert parallelize(loss, proposal.as_plan(), params, micro_batches=1).schedule.micro_batches == 1
    chunks = parallelize(loss, {**given, "schedule": "interleaved", "chunks": 3}, params).schedule.chunks
    assert chunks == 6


def test_one_worker_needs_no_plan():
    assert row(propose_plans(mlp(8), 1), 1, 1, 1).as_plan() == {}
    assert apply_plan(mlp(8), {}).mesh == Mesh({"tensor": 1})


@pytest.mark.parametrize("workers", [0, -1, 2.0, True])
def test_a_number_of_workers_is_one_at_least(workers):
    with pytest.raises(InputError, match="wanted a number of at least 1"):
        propose_plans(mlp(8), workers)


# ---- gradients and the optimizer's state -------------------------------------------------------------------


def training(width: int = 16, rows: int | str = 8):
    """A loss of two layers and its parameters: of the last one, ranks divide only the rows."""
    shapes = {"w0": (width, width), "b0": (width,), "w1": (width, 7), "b1": (7,)}
    params = {name: asarray(np.ones(shape, np.float32), name=name) for name, shape in shapes.items()}
    y = nn.relu(input("x", (rows, width), np.float32) @ params["w0"] + params["b0"]) @ params["w1"]
    return ((y + params["b1"]) ** 2).mean(), params


WEIGHTS = 4 * (16 * 16 + 16 + 16 * 7 + 7)
SPLIT = 4 * (16 * 16 + 16 + 16 * 7)  # those that two ranks divide


def split_row(found, data, tensor, stages):
    return next(
        r for r in found.rows if (r.data, r.tensor, r.stages) == (data, tensor, stages) and r.optimizer_state
    )


@pytest.mark.parametrize(
    ("optimizer", "state", "split"),
    [
        pytest.param(None, 0, None, id="no optimizer"),
        pytest.param(SGD(0.1), 0, None, id="no state"),
        pytest.param(SGD(0.1, momentum=0.9), WEIGHTS, WEIGHTS - SPLIT / 2, id="velocities"),
        pytest.param(Adam(0.1), 2 * WEIGHTS + 4, 2 * WEIGHTS + 4 - SPLIT, id="two moments and a count"),
    ],
)
def test_each_kind_of_bytes_is_counted(optimizer, state, split):
    loss, params = training()
    found = propose_plans(loss, 2, params=params, optimizer=optimizer)
    for proposal in (row(found, 1, 1, 1), row(found, 2, 1, 1)):
        # Constants of the expression, such as an exponent, are weights without gradients.
        constants = proposal.parameters - WEIGHTS
        assert 0 <= constants < 100
        assert (proposal.gradients, proposal.state) == (WEIGHTS, state)
        assert proposal.memory == 2 * WEIGHTS + constants + state + proposal.activations
    assert row(found, 1, 1, 2).state == state / 2
    assert row(found, 2, 1, 1).activations < row(found, 1, 1, 1).activations
    splits = [r for r in found.rows if r.optimizer_state]
    assert [(r.data, r.tensor, r.stages, r.state) for r in splits] == (
        [] if split is None else [(2, 1, 1, split)]
    )


def test_state_is_split_where_only_that_fits():
    # One weight has no columns and rows in turn, so ranks split only the batch.
    w = asarray(np.ones((1024, 1024), np.float32), name="w")
    loss = ((input("x", (16384, 1024), np.float32) @ w) ** 2).mean()
    found = propose_plans(loss, 4, batch_inputs=["x"], params=[w], optimizer=Adam(0.1), link=FREE)
    usual, split = row(found, 4, 1, 1), split_row(found, 4, 1, 1)
    assert found.best is usual
    assert split.seconds == pytest.approx(usual.seconds + FLOW.way_s)  # a hop more
    tight = replace(found, memory=(split.memory + usual.memory) / 2)
    assert tight.best is split
    assert all(r.memory > tight.memory for r in found.rows[: found.rows.index(split)])
    assert split.as_plan() == {**usual.as_plan(), "optimizer_state": {"data": 0}}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param({"optimizer": SGD(0.1)}, "there are no parameters", id="an optimizer alone"),
        pytest.param({"graph": {"y": 1}, "params": []}, "wanted a Tensor, the loss", id="no loss"),
    ],
)
def test_what_is_no_training_step_is_refused(given, says):
    loss, _ = training()
    with pytest.raises(InputError, match=says):
        propose_plans(given.pop("graph", loss), 2, **given)
