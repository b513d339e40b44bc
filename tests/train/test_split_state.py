"""Trainings whose optimizer's state is split further than the parameters: the losses of no plan, and resumption.

    plan  x  optimizer  x  options       all of them in `make soak`, some of each in `make test`

`tests/lower/ranks/test_split_state` has the parts, the bytes and the collectives.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from tests.train.nets import PLANS, data, leaves, ran
from tests.train.test_plans import CLIP, OPTIMIZERS, assert_resumed_alike

OVER_DATA = {"mesh": {"data": 2}, "inputs": {"x": 0, "t": 0, "*weight": {"data": 0}}}
SPLIT = {
    "data": {**PLANS["data"], "optimizer_state": {"data": 0}},
    "tensor": {**PLANS["tensor"], "optimizer_state": {"tensor": 0}},
    "data x tensor": {**PLANS["data x tensor"], "optimizer_state": {"data": 0}},
    "weights over data": {**OVER_DATA, "optimizer_state": {"data": 0}},
    "pipeline of data ranks": {**PLANS["data"], **PLANS["pipeline"], "optimizer_state": {"data": 0}},
}
OPTIONS = {
    "plain": {},
    "clip": {"clip_norm": CLIP},
    "accumulate": {"accumulate_steps": 2},
    "loss scale": {"loss_scale": 2.0**10},
}
# The plans whose graphs are made in less than half a second have all optimizers in every run of the suite.
QUICK = ("data",)


@cache
def trained(plan, optimizer, options):
    """Three batches: with two of them a group, one is left."""
    plans = {"none": None, **SPLIT}
    return ran(plan=plans[plan], data=data(24), epochs=1, optimizer=OPTIMIZERS[optimizer], **OPTIONS[options])


def rows():
    """Yield all combinations; of each plan, one or all pairs of an optimizer and options are in every run."""
    for i, plan in enumerate(SPLIT):
        for (j, optimizer), (k, options) in product(enumerate(OPTIMIZERS), enumerate(OPTIONS)):
            usual = (j + k) % 4 == i % 4 and (plan in QUICK or j == (i + 2) % 4)
            marks = [] if usual else [pytest.mark.soak]
            yield pytest.param(plan, optimizer, options, id=f"{plan}, {optimizer}, {options}", marks=marks)


@pytest.mark.parametrize(("plan", "optimizer", "options"), list(rows()))
def test_losses_and_parameters_are_those_without_a_plan(plan, optimizer, options):
    (told, params), (wanted, after) = (trained(name, optimizer, options) for name in (plan, "none"))
    assert [row[:4] for row in told] == [row[:4] for row in wanted]
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(leaves(params), leaves(after), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_half_precision_has_the_losses_of_no_plan_but_for_its_rounding():
    options = {"data": data(24), "epochs": 1, "precision": "float16", "accumulate_steps": 2}
    (told, _), (wanted, _) = (ran(plan=plan, **options) for plan in (SPLIT["data"], None))
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=5e-3)


def test_a_resumed_training_has_the_same_bits(tmp_path):
    assert_resumed_alike(tmp_path, steps=2, plan=SPLIT["data"], epochs=1)
