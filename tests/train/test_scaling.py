"""The loss scale as a state machine, all of whose transitions are one table."""

from __future__ import annotations

import numpy as np
import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor.tensor import asarray
from dask_ferro.lower.tensor import compute
from dask_ferro.train.update import LossScaler, all_finite, loss_scale_of, next_scale

HOW = LossScaler(initial=2.0**10, interval=3)
# scale, finite steps in a row, whether this one is finite -> scale, finite steps in a row
TRANSITIONS = {
    "a finite step is counted": ((1024, 0, True), (1024, 1)),
    "so is the next": ((1024, 1, True), (1024, 2)),
    "the third in a row doubles the scale": ((1024, 2, True), (2048, 0)),
    "an infinite step halves it": ((1024, 0, False), (512, 0)),
    "and starts the count again": ((1024, 2, False), (512, 0)),
    "it is 1 at least": ((1, 1, False), (1, 0)),
    "it is 2^40 at most": ((2.0**40, 2, True), (2.0**40, 0)),
}


def test_the_transitions():
    before, after = zip(*TRANSITIONS.values(), strict=True)
    scale, good, finite = (np.array(column) for column in zip(*before, strict=True))
    found = next_scale(HOW, *(asarray(x.astype("f4")) for x in (scale, good)), asarray(finite))
    rows = list(zip(*(x.tolist() for x in compute(found)), strict=True))
    assert dict(zip(TRANSITIONS, rows, strict=True)) == dict(zip(TRANSITIONS, after, strict=True))


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([[1.0], [2.0, 3.0]], True),
        ([[1.0], [2.0, np.inf]], False),
        ([[np.nan], [2.0, 3.0]], False),
        ([[], [1.0]], True),
    ],
)
def test_gradients_are_finite_if_all_of_them_are(values, finite):
    assert compute(all_finite([asarray(np.array(v, "f4")) for v in values])) == finite


@pytest.mark.parametrize(
    ("asked", "precision", "scale"),
    [
        (None, None, None),
        (None, "bfloat16", None),
        (None, "float16", LossScaler()),
        ("dynamic", None, LossScaler()),
        (1024, None, LossScaler(1024.0, growth=1.0, backoff=1.0)),
        (HOW, "float16", HOW),
    ],
)
def test_the_scale_of_what_was_asked(asked, precision, scale):
    assert loss_scale_of(asked, precision) == scale


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: LossScaler(1000.0), "initial: got 1000.0, wanted a power of two from 1 to"),
        (lambda: LossScaler(0.5), "initial: got 0.5"),
        (lambda: LossScaler(growth=0.5), "growth: got 0.5, wanted a power of two from 1"),
        (lambda: LossScaler(backoff=2.0), "backoff: got 2.0"),
        (lambda: LossScaler(interval=0), "interval: got 0, wanted a number of steps of at least 1"),
        (lambda: loss_scale_of("static", None), "got 'static', wanted 'dynamic', a power of two"),
        (lambda: loss_scale_of(True, None), "got True"),
    ],
)
def test_what_is_no_scale_is_refused(wrong, message):
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        wrong()
