"""Layers and functions on ranks: the numbers of one process, also where a batch is split that they combine."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import to_model
from dask_ferro.graph.tensor.tensor import Tensor, input
from tests.each import every
from tests.graph.sharding.shard_run import assert_same, evaluate_sharded

from .runs import values

RNG = np.random.default_rng(43)
STATISTICS = [RNG.standard_normal(6), 0.5 + RNG.random(6)]
LABELS = RNG.integers(0, 6, 8)


def normalized(x: Tensor, w: Tensor) -> Tensor:
    y, mean, variance = nn.batch_norm_training(x, *STATISTICS, w[0], w[1])
    return y + nn.stop_gradient(mean * variance)


# A function of (8, 6) and (6, 6), whose result is weighted and summed for the gradient.
LAYERS: dict[str, Any] = {
    "batch_norm": normalized,
    "rms_norm": lambda x, w: nn.rms_norm(x @ w, (6,), w[0]),
    "rotary_embedding": lambda x, w: nn.rotary_embedding(x @ w),
    "cross_entropy": lambda x, w: nn.cross_entropy(x @ w, LABELS, label_smoothing=0.1) * x,
    "binary_cross_entropy_with_logits": lambda x, w: (
        nn.binary_cross_entropy_with_logits(x @ w, xp.astype(x > 0, np.float64)) * x
    ),
    "huber": lambda x, w: nn.huber_loss(x @ w, x) * x,
    "sort": lambda x, w: xp.sort(x @ w, axis=1),
    "roll": lambda x, w: xp.roll(x @ w, 2, axis=1) + xp.roll(x, 3, axis=0),
    "hypot and atan2": lambda x, w: xp.hypot(x, x @ w) + xp.atan2(x, x @ w),
    "remainder": lambda x, w: xp.remainder(x @ w, 0.7),
}
PLANS = {
    "the batch": {"mesh": {"data": 2}, "inputs": {"x": 0}},
    "columns": {"mesh": {"tensor": 2}, "inputs": {"w": 1}},
}


@every("plan", PLANS)
@every("name", LAYERS)
def test_ranks_give_the_numbers_of_one_process(name, plan):
    x, w = input("x", (8, 6), np.float64), input("w", (6, 6), np.float64)
    y = LAYERS[name](x, w)
    loss = (y * RNG.standard_normal(y.shape)).sum()
    outputs = {"y": y, "loss": loss, "dx": grad(loss, x), "dw": grad(loss, w)}
    feeds = {"x": RNG.standard_normal((8, 6)), "w": RNG.standard_normal((6, 6))}
    spmd = apply_plan(to_model(outputs), PLANS[plan]).spmd()
    found = evaluate_sharded(spmd, feeds)
    wanted = values(outputs, feeds)
    assert_same(found, wanted)
