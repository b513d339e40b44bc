"""Losses and gradients that are not finite: what the training does, its parameters, and its checkpoints."""

from __future__ import annotations

import os

import numpy as np
import pytest

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.errors import InputError
from tests.each import every
from tests.train.nets import PLANS, data, leaves, loss, params, ran, same_bits

ROWS = data(24)
SPOILED = {**ROWS, "x": np.where(np.arange(24)[:, None] == 9, np.nan, ROWS["x"]).astype("f4")}
WITHOUT = {name: np.delete(value, range(8, 16), axis=0) for name, value in ROWS.items()}
OPTIONS = {"seed": None, "epochs": 1, "optimizer": ft.optim.Adam(0.01)}


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
        given = {
            "batch_size": 8,
            "nonfinite": nonfinite,
            "checkpoint": tmp_path,
            "checkpoint_every": 1,
            **options,
        }
        return ff.fit(loss, params(), SPOILED, given.pop("optimizer"), **given)

    seen, stops = [], training("stop")
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"loss of batch 1 of epoch 0 \(step 1\) is nan, wanted a finite"
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

    with pytest.raises(InputError, match=r"arrays .* not finite; none was written, and those before it stay"):
        ran(data=SPOILED, nonfinite="continue", checkpoint=tmp_path / "own", checkpoint_every=1, **options)
    assert os.listdir(tmp_path / "own") == ["step-000000000001"]
    _, lost = ran(data=SPOILED, nonfinite="continue", **options)
    assert all(np.isnan(leaf).all() for leaf in leaves(lost)[:2])


def root(p, batch):
    """A loss whose slope is infinite where x is 0, and whose value is not finite where t is not."""
    return ft.mean(ft.sqrt(batch["x"] * p["w"])) + ft.mean(batch["t"])


PAIR = np.array([0, 0, 1, 1, 0, 0], bool)
ONES = {"x": np.ones((6, 1), "f4"), "t": np.zeros(6, "f4")}
# The array that is spoiled in the second of three batches, with what, and the loss.
SPOILT = {"a slope": ("x", 0.0, 0.0), **{str(v): ("t", v, v) for v in (np.nan, np.inf, -np.inf)}}
FORMS = {
    "one graph": {},
    "a plan": {"plan": {"mesh": {"data": 2}, "inputs": {"x": 0, "t": 0}}},
    "micro-batches": {"micro_batches": 2},
}


@every("form", FORMS)
@every("accumulate", [1, 2])
@every("name", SPOILT)
def test_a_skipped_batch_counts_for_no_update_and_no_mean(name, accumulate, form):
    spoiled, value, loss = SPOILT[name]
    options = {"batch_size": 2, "epochs": 3, "seed": None, "patience": 1, "nonfinite": "skip", **FORMS[form]}

    def trained(data, **more):
        training = ff.fit(root, {"w": np.ones(1, "f4")}, data, ft.optim.SGD(0.1), **options, **more)
        return list(training), training.params

    mask = PAIR.reshape(-1, *(1,) * (ONES[spoiled].ndim - 1))
    steps, after = trained(
        {**ONES, spoiled: np.where(mask, value, ONES[spoiled]).astype("f4")}, accumulate_steps=accumulate
    )
    np.testing.assert_equal([step.loss for step in steps][1::3], [loss] * 3)
    assert [step.is_updated for step in steps] == [accumulate == 1, accumulate == 2, True] * 3
    assert same_bits(after, trained({name: rows[:4] for name, rows in ONES.items()})[1])
