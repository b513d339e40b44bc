"""The update of a batch: clipping is PyTorch's, and accumulated batches are one large batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.graph.tensor.tensor import asarray
from dask_ferro.lower.tensor import compute
from dask_ferro.train.update import clip_by_norm
from tests.train.nets import data, leaves, loss, outputs, params, ran, same_bits

numbers = st.floats(-100, 100, width=32)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(numbers, min_size=1, max_size=5), st.lists(numbers, min_size=1, max_size=5), st.floats(0.01, 50)
)
def test_clipping_is_torchs(a, b, most):
    tensors = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in (a, b)]
    for tensor, values in zip(tensors, (a, b), strict=True):
        tensor.grad = torch.tensor(values, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_(tensors, most)
    mine = compute(clip_by_norm([asarray(np.array(values, "f8")) for values in (a, b)], most))
    # PyTorch adds 1e-6 to the norm.
    for tensor, found in zip(tensors, mine, strict=True):
        np.testing.assert_allclose(found, tensor.grad.numpy(), rtol=2e-6 / most + 1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", [ft.optim.SGD(0.1), ft.optim.Adam(0.01)], ids=["SGD", "Adam"])
@pytest.mark.parametrize("clip", [None, 0.4])
def test_three_accumulated_batches_are_one_large_batch(optimizer, clip):
    """The last of the three has 4 rows, the others 8: the mean is over rows."""
    options = {"optimizer": optimizer, "clip_norm": clip, "seed": None}
    _, apart = ran(accumulate_steps=3, batch_size=8, **options)
    _, whole = ran(batch_size=20, **options)
    for mine, theirs in zip(leaves(apart), leaves(whole), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_sums_of_losses_are_accumulated_as_sums():
    def total(p, batch):
        return ft.sum((outputs(p, batch["x"]) - batch["t"]) ** 2)

    options = {"loss": total, "reduction": "sum", "seed": None, "optimizer": ft.optim.SGD(1e-3)}
    (_, apart), (_, whole) = ran(accumulate_steps=3, batch_size=8, **options), ran(batch_size=20, **options)
    for mine, theirs in zip(leaves(apart), leaves(whole), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_stay_until_the_group_is_complete():
    training = ff.fit(loss, params(), data(), ft.optim.SGD(0.1), batch_size=8, accumulate_steps=2)
    seen = [(step.is_updated, same_bits(step.params, params())) for step in training]
    # Three batches: a group of two, and one that ends with its epoch.
    assert seen == [(False, True), (True, False), (True, False)]


def test_a_batch_with_infinite_gradients_changes_nothing_and_halves_the_scale():
    spoiled = data()
    spoiled["x"][:8] = np.inf
    scale = ff.LossScaler(2.0**4, interval=2)
    training = ff.fit(
        loss,
        params(),
        spoiled,
        ft.optim.Adam(0.01),
        batch_size=8,
        seed=None,
        loss_scale=scale,
        epochs=2,
        nonfinite="continue",
    )
    seen = []
    for step in training:
        seen.append((np.isfinite(step.loss), step.is_updated, same_bits(step.params, params())))
        if step.index == 0:
            break
    assert seen == [(False, False, True)]
    # The others are as if it had not been there.
    rest = {name: value[8:] for name, value in spoiled.items()}
    for _ in training:
        pass
    wanted = ff.fit(loss, params(), rest, ft.optim.Adam(0.01), batch_size=8, seed=None, epochs=2)
    for _ in wanted:
        pass
    for mine, theirs in zip(leaves(training.params), leaves(wanted.params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("precision", "scale", "near"),
    [("float16", 2.0**8, 4e-3), ("bfloat16", None, 2e-2)],
    ids=["float16", "bfloat16"],
)
def test_half_precision_trains_as_float32_does(precision, scale, near):
    (wanted, _), (told, after) = ran(), ran(precision=precision, loss_scale=scale)
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=near)
    assert {leaf.dtype.name for leaf in leaves(after)} == {"float32"}
    assert [r[4] for r in told] != [r[4] for r in wanted]
