"""Sums over micro-batches that stay in terms of the ranks: one reduction a step, and the numbers of one process.

plan  x  micro-batches            collectives of a step, counted along each axis, and gradients
plan  x  optimizer                collectives, and parameters after two steps
{metrics, half precision}
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

import dask_ferro.tensor as ft
from dask_ferro.graph.ir.regions import region
from dask_ferro.graph.pipeline.schedules import usual_chunks
from dask_ferro.graph.sharding.placements import Partial, Replicate
from dask_ferro.graph.sharding.spmd import RANKS
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.optim import SGD, Adam
from dask_ferro.graph.tensor.tensor import asarray, input
from dask_ferro.lower.ranks.parallel import parallelize
from tests.each import every

WIDTH, ROWS = 8, 32
ROWS_SPLIT = {"inputs": {"x": {"data": 0}, "t": {"data": 0}}}
COLUMNS_ROWS = {
    "layer0": {"shard": {"w0": {"tensor": 1}, "b0": {"tensor": 0}}},
    "layer1": {"shard": {"w1": {"tensor": 0}}},
}
WEIGHTS_SPLIT = {"layer0": {"shard": {"w0": {"data": 0}}}, "layer1": {"shard": {"w1": {"data": 0}}}}
# Plan -> collectives of each micro-batch, and of the end of a step, where there is more than one.
PLANS = {
    "data": ({"mesh": {"data": 2}, **ROWS_SPLIT}, {}, {"AllReduce": 4}),
    "tensor": ({"mesh": {"tensor": 2}, **COLUMNS_ROWS}, {"AllReduce": 1}, {}),
    "data x tensor": (
        {"mesh": {"data": 2, "tensor": 2}, **ROWS_SPLIT, **COLUMNS_ROWS},
        *({"AllReduce": 1}, {"AllReduce": 4}),
    ),
    # A gradient that is whole on each rank would be twice the part that its rank keeps.  The second weight is
    # gathered again for the backward, where it is transposed.
    "weights split over the data": (
        {"mesh": {"data": 2}, **ROWS_SPLIT, **WEIGHTS_SPLIT},
        *({"AllGather": 3, "ReduceScatter": 2}, {"AllReduce": 2}),
    ),
}
# The scalars of a step of one micro-batch that each rank has a term of: the loss.
LOSSES = {name: int("data" in plan["mesh"]) for name, (plan, *_) in PLANS.items()}
OPTIMIZERS = {
    "gradients": (None, np.float64),
    "momentum": (SGD(0.1, momentum=0.9), np.float64),
    "Adam": (Adam(0.01), np.float32),
}


def parameters(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {"w0": (WIDTH, WIDTH), "b0": (WIDTH,), "w1": (WIDTH, WIDTH), "b1": (WIDTH,)}
    return {n: asarray((rng.standard_normal(s) / 2).astype(dtype), name=n) for n, s in shapes.items()}


def outputs_of(p, dtype=np.float64, compute=lambda x: x):
    """The predictions of two layers, and the targets; `compute` casts what is multiplied."""
    x, t = (input(name, ("N", WIDTH), dtype) for name in "xt")
    with region("layer0"):
        h = nn.relu(compute(x) @ compute(p["w0"]) + compute(p["b0"]))
    with region("layer1"):
        return h @ compute(p["w1"]) + compute(p["b1"]), t


def batch_of(rows=ROWS, seed=1, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((rows, WIDTH)).astype(dtype) for name in "xt"}


def trainer(plan, m, optimizer=None, dtype=np.float64, **how):
    p = parameters(dtype)
    return parallelize(
        nn.mse_loss(*outputs_of(p, dtype)), plan, p, micro_batches=m, optimizer=optimizer, **how
    )


def counted(ranks):
    """The collectives of a graph of ranks: one in all groups of an axis at once counts as one."""
    if ranks is None:
        return Counter()
    groups = [node for node in ranks.spmd.model.graph if node.metadata_props.get(RANKS, "").startswith("0,")]
    return Counter(node.op_type for node in groups)


def collectives(step, m, rows=ROWS):
    """The collectives of a whole step."""
    each, end = map(counted, step.graphs(rows // m))
    return Counter({kind: m * count for kind, count in each.items()}) + end


def wanted_collectives(name, m, optimizer):
    _, each, end = PLANS[name]
    if m == 1 or optimizer is None:
        whole = Counter(each) + Counter(end) + Counter({"AllReduce": LOSSES[name]})
        return Counter({kind: m * count for kind, count in whole.items()})
    return Counter({kind: m * count for kind, count in each.items()}) + Counter(end)


def two_steps(step, dtype=np.float64):
    now = {}
    for seed in (1, 2):
        found = step(batch_of(seed=seed, dtype=dtype), **now).compute(scheduler="sync")
        yield found[0], found[1]
        now = {} if len(found) == 2 else {"params": found.params, "state": found.state}


@cache
def without_a_plan(name):
    optimizer, dtype = OPTIMIZERS[name]
    return list(two_steps(trainer(None, 1, optimizer, dtype), dtype))


@every(("m", "name"), [(1, "gradients"), (2, "gradients"), (2, "momentum"), (4, "Adam")])
@every("plan", PLANS)
def test_a_step_reduces_once(plan, m, name):
    optimizer, dtype = OPTIMIZERS[name]
    step = trainer(PLANS[plan][0], m, optimizer, dtype)
    assert collectives(step, m) == wanted_collectives(plan, m, optimizer)
    near = 1e-5 if dtype is np.float32 else 1e-10
    for (loss, found), (whole, wanted) in zip(two_steps(step, dtype), without_a_plan(name), strict=True):
        assert loss.dtype == dtype
        np.testing.assert_allclose(loss, whole, rtol=near)
        for parameter, value in wanted.items():
            np.testing.assert_allclose(found[parameter], value, rtol=near, atol=near)


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_lie_as_their_parameters_and_the_optimizer_reads_terms(plan):
    plain, trained = trainer(PLANS[plan][0], 2), trainer(PLANS[plan][0], 2, SGD(0.1))
    run = plain(batch_of())
    lies = {port.name: port.layout for port in plain.graphs(ROWS // 2).step.spmd.inputs}
    assert [g.port.layout for g in run.gradients.values()] == [lies[name] for name in run.gradients]
    ends = {port.layout for port in trained.graphs(ROWS // 2).end.spmd.inputs}
    assert any(Partial() in layout for layout in ends) == ("data" in plan)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipe-v"])
def test_every_schedule_adds_terms_in_the_order_of_micro_batches(schedule):
    stages = 2 // usual_chunks(schedule)
    results = [
        list(two_steps(trainer(PLANS["data"][0], 4, Adam(0.01), stages=cut, schedule=name)))
        for cut, name in ((stages, schedule), (1, "gpipe"))
    ]
    for (loss, found), (same, bits) in zip(*results, strict=True):
        assert loss == same
        for name, value in bits.items():
            np.testing.assert_array_equal(found[name], value)


def test_a_mean_is_added_in_terms_and_a_maximum_is_not():
    p = parameters()
    y, t = outputs_of(p)
    values = {"loss": nn.mse_loss(y, t), "mean": ft.abs(y).mean(), "sum": (y * y).sum(), "max": ft.max(y)}
    step = parallelize(values, PLANS["data"][0], p, micro_batches=2, reduction="sum", optimizer=SGD(0.1))
    assert counted(step.graphs(ROWS // 2).step) == {"AllReduce": 1}
    run = step(batch_of())
    terms = {name: metric.port.layout for name, metric in run.metrics.items()}
    assert terms == {"mean": (Partial("mean"),), "sum": (Partial(),), "max": (Replicate(),)}
    alone = parallelize(values, None, p, micro_batches=2, reduction="sum")(batch_of())
    for name, metric in run.metrics.items():
        np.testing.assert_allclose(
            metric.compute(scheduler="sync"), alone.metrics[name].compute(scheduler="sync"), rtol=1e-12
        )


@pytest.mark.parametrize(("m", "half"), [(1, np.float16), (2, np.float16), (2, "bfloat16")])
def test_gradients_of_half_precision_are_widened_before_they_are_added(m, half):
    """The cast of a gradient to its parameter's float32 is linear, so terms go through it, and no rank adds halves."""
    p = parameters(np.float32)
    loss = nn.mse_loss(*outputs_of(p, np.float32, lambda x: ft.astype(x, half)))
    step = parallelize(loss, PLANS["data"][0], p, micro_batches=m, optimizer=SGD(1.0))
    assert counted(step.graphs(ROWS // m).step) == ({} if m > 1 else {"AllReduce": 5})
    batch = batch_of(dtype=np.float32)
    found = step(batch).compute(scheduler="sync")
    wanted = parallelize(loss, None, p, optimizer=SGD(1.0))(batch).compute(scheduler="sync")
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=2e-2)
    for name, value in wanted.params.items():
        assert found.params[name].dtype == np.float32
        np.testing.assert_allclose(found.params[name], value, atol=2e-2)
