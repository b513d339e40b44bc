"""Batches that the micro-batches do not divide: loss, gradients and steps are those of one batch.

    schedule  x  {gradients, optimizers}      rows  x  micro-batches      {no plan, split weights, split rows}

In float64, to 1e-12; all schedules give the same bits, as sums are in the order of micro-batches.
"""

from __future__ import annotations

from functools import cache

import dask.array as da
import numpy as np
import pytest

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.regions import signal
from dask_ferro.graph.pipeline.named import NAMES, usual_chunks
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.optim import SGD, Adam
from dask_ferro.graph.tensor.tensor import argument, asarray
from dask_ferro.lower.pipeline.batch import cut_rows, shares
from dask_ferro.lower.pipeline.parallel import parallel
from dask_ferro.lower.tensor import compute
from tests.each import every

WIDTH, ROWS, M = 4, 11, 4
OPTIMIZERS = {"gradients": None, "SGD": SGD(0.1), "momentum": SGD(0.1, momentum=0.9), "Adam": Adam(0.01)}


def parameters(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {"w0": (WIDTH, WIDTH), "b0": (WIDTH,), "w1": (WIDTH, WIDTH), "b1": (WIDTH,)}
    values = {name: (rng.standard_normal(shape) / 2).astype(dtype) for name, shape in shapes.items()}
    return {name: asarray(value, name=name) for name, value in values.items()}


def loss_of(p, dtype=np.float64):
    x, t = (argument(name, ("N", WIDTH), dtype) for name in "xt")
    with signal("layer0"):
        h = nn.relu(nn.linear(x, p["w0"], p["b0"]))
    with signal("layer1"):
        return nn.mse_loss(nn.linear(h, p["w1"], p["b1"]), t)


def batch_of(rows, seed=1, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((rows, WIDTH)).astype(dtype) for name in "xt"}


def stepping(optimizer, stages=1, micro_batches=1, **how):
    """The loss and the results of two steps, the second one from the first one's parameters."""
    params = parameters()
    given = {} if optimizer is None else {"optimizer": optimizer}
    step = parallel(
        loss_of(params), params=params, stages=stages, micro_batches=micro_batches, **given, **how
    )
    now = {}
    for seed in (1, 2):
        found = step(batch_of(ROWS, seed), **now).compute(scheduler="sync")
        yield found[0], found[1]
        now = {} if optimizer is None else {"params": found.params, "state": found.state}


@cache
def one_batch(name):
    return list(stepping(OPTIMIZERS[name]))


@cache
def in_order(name):
    return list(stepping(OPTIMIZERS[name], stages=1, micro_batches=M, schedule="gpipe"))


def near(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@every("name", OPTIMIZERS)
@every("schedule", NAMES)
def test_every_schedule_gives_the_step_of_one_batch(schedule, name):
    cut = {"stages": 2 // usual_chunks(schedule), "micro_batches": M, "schedule": schedule}
    steps = zip(stepping(OPTIMIZERS[name], **cut), one_batch(name), in_order(name), strict=True)
    for (loss, found), (whole, wanted), (same, bits) in steps:
        near(loss, whole)
        np.testing.assert_array_equal(loss, same)
        for n, value in wanted.items():
            near(found[n], value)
            np.testing.assert_array_equal(found[n], bits[n])


@every(("rows", "m"), [(5, 4), (7, 2), (4, 4), (13, 8), (10, 3), (1, 1), (9, 5)])
@every("reduction", ["mean", "sum"])
def test_the_loss_of_any_rows_is_that_of_one_batch(rows, m, reduction):
    """Whatever micro-batches have one row more, each row counts once."""
    p, batch = parameters(), batch_of(rows)
    x, t = (argument(name, ("N", WIDTH), np.float64) for name in "xt")
    y = nn.linear(nn.relu(nn.linear(x, p["w0"], p["b0"])), p["w1"], p["b1"])
    loss = nn.mse_loss(y, t, reduction=reduction)
    slopes = dict(zip(p, grad(loss, list(p.values())), strict=True))
    wanted = compute({"loss": loss, **slopes}, batch, scheduler="sync")
    step = parallel(loss, params=p, stages=2, micro_batches=m, reduction=reduction)
    run = step(batch)
    value, found = run.compute(scheduler="sync")
    assert run.rows == rows
    near(value, wanted["loss"])
    for n in p:
        near(found[n], wanted[n])


@pytest.mark.parametrize(
    "plan", [None, {"mesh": {"data": 2}, "inputs": {"x": {"data": 0}}}], ids=["no plan", "split rows"]
)
@pytest.mark.parametrize("lazy", [False, True], ids=["numpy", "dask"])
def test_forwards_alone_give_all_rows_in_order(lazy, plan):
    x = argument("x", ("N", WIDTH), np.float64)
    with signal("first"):
        h = nn.relu(x)
    with signal("second"):
        y = nn.relu(h @ asarray(np.eye(WIDTH)))
    rows = batch_of(10)["x"]
    given = da.from_array(rows, chunks=(5, WIDTH)) if lazy else rows
    run = parallel({"y": y}, stages=["first", "second"], micro_batches=M, plan=plan)(given)
    found = run.compute(scheduler="sync")
    np.testing.assert_array_equal(found, np.maximum(rows, 0))
    assert "of 10 rows" in repr(run)


def test_half_precision_is_weighted_in_float32_and_rounded_once():
    p, batch = parameters(np.float16), batch_of(7, dtype=np.float16)
    step = parallel(loss_of(p, np.float16), params=p, stages=2, micro_batches=3)
    loss, _ = step(batch).compute(scheduler="sync")
    cut = [{n: a[part] for n, a in batch.items()} for part in (slice(0, 3), slice(3, 5), slice(5, 7))]
    one = parallel(loss_of(p, np.float16), params=p, stages=1, micro_batches=1)
    each = [np.float32(one(part).compute(scheduler="sync")[0]) for part in cut]
    assert loss.dtype == np.float16
    assert loss == np.float16((each[0] * 3 + each[1] * 2 + each[2] * 2) / np.float32(7))


def test_even_micro_batches_have_the_keys_and_bits_of_an_unweighted_sum():
    assert shares((2,) * M, "mean") == shares((5,) * M, "mean") == ((1,) * M, M)
    assert shares((3, 3, 3, 2), "mean") == ((3, 3, 3, 2), 11)
    assert shares((3, 3, 3, 2), "sum") == ((1,) * M, 1)


@pytest.mark.parametrize(
    ("rows", "m", "unit", "each"),
    [
        (8, 4, 1, (2, 2, 2, 2)),
        (10, 4, 1, (3, 3, 2, 2)),
        (4, 4, 1, (1,) * 4),
        (0, 1, 1, (0,)),
        (12, 5, 2, (4, 2, 2, 2, 2)),
        (13, 3, 4, (4, 4, 5)),
    ],
)
def test_rows_are_dealt_out(rows, m, unit, each):
    assert cut_rows(rows, m, unit) == each
