"""Losses and gradients that are not finite: what the training does, its parameters, and its checkpoints."""

from __future__ import annotations

import os

import numpy as np
import pytest

import dask_ferro as ff
from dask_ferro.errors import ConfigError
from tests.train.nets import PLANS, data, leaves, loss, params, ran, same_bits

ROWS = data(24)
SPOILED = {**ROWS, "x": np.where(np.arange(24)[:, None] == 9, np.nan, ROWS["x"]).astype("f4")}
WITHOUT = {name: np.delete(value, range(8, 16), axis=0) for name, value in ROWS.items()}
OPTIONS = {"seed": None, "epochs": 1, "optimizer": ff.optim.Adam(0.01)}


def fitted(loss, params, data, optimizer, **options):
    return ff.fit(loss, params, data, optimizer, **options)


def told(training, into):
    for step in training:
        into.append((step.index, step.is_updated, step.loss))


@pytest.mark.parametrize("plan", ["none", "data", "tensor", "pipeline"])
@pytest.mark.parametrize("where", ["here", pytest.param("workers", marks=pytest.mark.cluster)])
def test_a_batch_with_a_nan_stops_or_changes_nothing(where, plan, tmp_path, request):
    """The second batch of three; with workers all are submitted by then."""
    if where == "workers":
        request.getfixturevalue("client")
    options = {**OPTIONS, "plan": PLANS[plan]}
    first, after_one = ran(data=ROWS, steps=1, **options)
    both, after_two = ran(data=WITHOUT, **options)

    def training(nonfinite):
        given = {"batch_size": 8, "nonfinite": nonfinite, "checkpoint": tmp_path, "every": 1, **options}
        return ff.fit(loss, params(), SPOILED, given.pop("optimizer"), **given)

    seen, stops = [], training("stop")
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"loss of batch 1 of epoch 0 \(step 1\) is nan, wanted a finite"
        ):
            told(stops, seen)
    assert seen == [(0, True, first[0][4])]
    assert same_bits(stops.params, after_one)
    assert os.listdir(tmp_path) == ["step-000000000001"]

    told(skips := training("skip"), seen)
    assert [row[:2] for row in seen] == [(0, True), (1, False), (2, True)]
    assert (seen[0][2], seen[2][2]) == (both[0][4], both[1][4])
    assert same_bits(skips.params, after_two)
    assert sorted(os.listdir(tmp_path)) == ["step-000000000002", "step-000000000003"]

    with pytest.warns(
        RuntimeWarning, match="arrays .* not finite; none was written, and those before it stay"
    ):
        _, lost = ran(data=SPOILED, nonfinite="continue", checkpoint=tmp_path / "own", **options)
    assert all(np.isnan(leaf).all() for leaf in leaves(lost)[:2])
    assert os.listdir(tmp_path / "own") == []


def root(p, batch):
    return ff.mean(ff.sqrt(batch["x"] @ p["w"]))


@pytest.mark.parametrize(
    "form", [{}, {"plan": {"mesh": {"data": 2}, "inputs": {"x": 0}}}, {"micro_batches": 2}]
)
def test_gradients_that_are_not_finite_under_a_loss_that_is(form, tmp_path):
    x = np.arange(12, dtype="f4").reshape(12, 1) - 4
    x[:4] += 5
    spoiled = {"x": np.maximum(x, 0)}  # its fifth row is 0, where the root's slope is infinite
    options = {
        "params": {"w": np.ones((1, 1), "f4")},
        "data": spoiled,
        "loss": root,
        "metrics": {},
        **form,
    }
    options |= {"optimizer": ff.optim.SGD(0.1), "batch_size": 4, "seed": None}
    training = fitted(checkpoint=tmp_path, every=1, **options)
    with pytest.raises(ConfigError, match=r"have values that are not finite; none was written"):
        list(training)
    assert os.listdir(tmp_path) == ["step-000000000001"]
    steps = [(step.loss, step.is_updated) for step in fitted(nonfinite="skip", **options)]
    assert np.isfinite([loss for loss, _ in steps]).all()
    assert [updated for _, updated in steps] == [True, False, True]


def constant(p, batch):
    """A loss that is not finite, whose gradients are."""
    return ff.mean(batch["x"] * p["w"]) + ff.mean(batch["t"])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_skipped_is_told_and_counts_for_nothing(value, accumulate):
    w, x = np.ones(1, "f4"), np.ones((6, 1), "f4")
    spoiled = {"x": x, "t": np.array([0, 0, value, value, 0, 0], "f4")}
    options = {"params": {"w": w}, "loss": constant, "metrics": {}, "optimizer": ff.optim.SGD(0.1)}
    options |= {"batch_size": 2, "seed": None, "accumulate": accumulate, "patience": 1, "epochs": 3}
    skips = fitted(data=spoiled, nonfinite="skip", **options)
    losses = [step.loss for step in skips]
    assert len(losses) == 9
    np.testing.assert_equal(losses[1::3], [value] * 3)
    without = fitted(data={"x": x[:4], "t": np.zeros(4, "f4")}, **{**options, "accumulate": 1})
    list(without)
    assert same_bits(skips.params, without.params)
