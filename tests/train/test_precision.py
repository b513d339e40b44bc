"""Half precision beside float32: operators that it does not have, loaded models, and both by plans.

operator that ONNX has not in bfloat16  x  plan
loaded model  x  precision  x  plan          the transformer by plans, whose graphs take seconds, in `make soak`
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import dask_ferro as ff
import dask_ferro.tensor as ft
from tests.each import every
from tests.graph.tensor.imported.nets import NETS, batch, path
from tests.train.nets import PLANS

RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.standard_normal((6, 6)).astype("f4") / 3,
    "c": RNG.standard_normal((4, 1, 3, 3)).astype("f4") / 3,
    "gates": RNG.standard_normal((12, 3)).astype("f4") / 3,
}
ROWS = {
    "x": RNG.standard_normal((8, 6)).astype("f4"),
    "image": RNG.standard_normal((8, 1, 6, 6)).astype("f4"),
}


def product(p, b):
    return b["x"] @ p["w"]


def convolved(p, b):
    return ft.nn.conv2d(b["image"], p["c"])


# Losses with an operator, or its gradient, that ONNX's operator set 21 has not in bfloat16.
LOSSES = {
    "Conv": lambda p, b: ft.mean(convolved(p, b) ** 2),
    "MaxPool of Conv": lambda p, b: ft.mean(ft.nn.max_pool2d(convolved(p, b), 2) ** 2),
    "AveragePool of Conv": lambda p, b: ft.mean(ft.nn.avg_pool2d(convolved(p, b), 2) ** 2),
    "LSTM": lambda p, b: ft.mean(
        ft.nn.lstm(ft.reshape(b["x"], (-1, 2, 3)), p["gates"], p["gates"], batch_first=True)[0] ** 2
    ),
    "Sin": lambda p, b: ft.mean(ft.sin(product(p, b))),
    "Sinh": lambda p, b: ft.mean(ft.sinh(product(p, b))),
    "Round": lambda p, b: ft.mean(ft.round(product(p, b)) + product(p, b) ** 2),
    "TopK": lambda p, b: ft.mean(ft.sort(product(p, b), axis=1)[:, :2] ** 2),
}


@cache
def bare(name, precision, split=None):
    plan = {"mesh": {"data": 2}, "inputs": {split: 0}} if split else None
    options = {"epochs": 3, "batch_size": 8, "seed": None, "precision": precision, "plan": plan}
    return [step.loss for step in ff.fit(LOSSES[name], PARAMS, ROWS, ft.optim.SGD(0.05), **options)]


@every("name", LOSSES)
def test_what_bfloat16_has_not_is_computed_in_float32(name):
    np.testing.assert_allclose(bare(name, "bfloat16"), bare(name, None), rtol=4e-2)


@pytest.mark.parametrize(("name", "split"), [("Conv", "image"), ("TopK", "x")])
def test_by_a_plan_too(name, split):
    np.testing.assert_allclose(bare(name, "bfloat16", split), bare(name, None), rtol=4e-2)


# ---- loaded models -----------------------------------------------------------------------------------------

BY_PLAN = {
    "convolutional": {
        "layer2.0.weight": {"tensor": 0},
        "layer2.0.bias": {"tensor": 0},
        "classifier.weight": {"tensor": 1},
    },
    "transformer": {
        "encoder.layers.?.linear1.weight": {"tensor": 1},
        "encoder.layers.?.linear1.bias": {"tensor": 0},
        "encoder.layers.?.linear2.weight": {"tensor": 0},
    },
}
NEAR = {"float16": 2e-3, "bfloat16": 5e-3}


def plan_of(name, plan):
    return {"mesh": {"tensor": 2}, "*": {"shard": BY_PLAN[name]}} if plan == "tensor" else PLANS[plan]


@cache
def loaded(name, precision, plan):
    """Losses of 20 steps, and the parameters after them."""
    model = ff.load_trainable(path(name, "dynamo"))

    def loss(params, b):
        return ft.nn.cross_entropy(model(b["x"], params=params), b["t"])

    rows = {"x": batch(name, 8).numpy(), "t": np.arange(8) % 5}
    training = ff.fit(
        loss,
        model.parameters(),
        rows,
        ft.optim.SGD(0.05, momentum=0.9),
        plan=plan_of(name, plan),
        epochs=20,
        batch_size=8,
        seed=None,
        precision=precision,
        loss_scale=2.0**8 if precision == "float16" else None,
    )
    losses = [step.loss for step in training]
    return losses, {name: np.asarray(value) for name, value in training.params.items()}


def rows():
    for name in NETS:
        for precision in NEAR:
            for plan in ("none", "data", "tensor"):
                slow = plan != "none" and (name, precision, plan) != ("convolutional", "float16", "tensor")
                marks = [pytest.mark.soak] if slow else []
                yield pytest.param(name, precision, plan, id=f"{name}, {precision}, {plan}", marks=marks)


@pytest.mark.parametrize(("name", "precision", "plan"), list(rows()))
def test_a_loaded_model_trains_as_in_float32(name, precision, plan):
    (losses, params), (wanted, wanted_params) = (
        loaded(name, precision, plan),
        loaded(name, None, "none"),
    )
    assert losses != wanted
    assert wanted[-1] < 0.85 * wanted[0]
    np.testing.assert_allclose(losses, wanted, rtol=NEAR[precision])
    for key, value in params.items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, wanted_params[key], atol=4 * NEAR[precision])
