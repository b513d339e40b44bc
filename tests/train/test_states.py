"""Rates by step, early stopping, and manifests: pure values."""

from __future__ import annotations

import math

import pytest

from dask_ferro.errors import ConfigError
from dask_ferro.lines import sealed
from dask_ferro.train.rates import CosineRate, rate_at
from dask_ferro.train.saved.manifest import (
    Manifest,
    Position,
    differences,
    mismatches,
)
from dask_ferro.train.stopping import EarlyStopping

# ---- rates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "rate"), [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (8, 0.55), (12, 0.1), (1000, 0.1)]
)
def test_a_cosine_rises_to_its_peak_and_falls_to_the_last_rate(update, rate):
    assert CosineRate(1.0, updates=12, warmup=4, last=0.1)(update) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: CosineRate(-1.0, 5), "peak: got -1.0"),
        (lambda: CosineRate(1.0, 5, last=math.nan), "last: got nan"),
        (lambda: CosineRate(1.0, 5, warmup=5), "warm-up of 5 of 5 updates"),
        (lambda: rate_at(lambda update: -0.1, 7), r"lr\(7\): got -0.1, wanted a finite number from 0 on"),
        (lambda: rate_at(lambda update: math.inf, 0), "got inf"),
    ],
)
def test_rates_out_of_range_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        wrong()


# ---- early stopping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("means", "epochs"),
    [
        pytest.param([3, 2, 1, 0], 4, id="it goes on while the value falls"),
        pytest.param([3, 2, 2, 2, 1], 4, id="an equal value is no improvement"),
        pytest.param([3, 4, 2, 4, 1], 5, id="one bad epoch is borne, again and again"),
        pytest.param([1, math.nan, math.nan, 0], 3, id="a NaN is no improvement"),
        pytest.param([math.nan, math.nan], 2, id="not even the first"),
    ],
)
def test_it_stops_after_two_epochs_without_an_improvement(means, epochs):
    state, done = EarlyStopping(2), 0
    for mean in means:
        if state.is_over:
            break
        # Batches of 3 rows and of 1: the mean is over rows.
        state = state.seen(mean + 1, 1).seen(mean - 1 / 3, 3).ended()
        done += 1
    assert done == epochs


@pytest.mark.parametrize(
    ("now", "after"),
    [
        pytest.param(EarlyStopping(5), EarlyStopping(5, "loss", 0.5, 1, 3.0, 9), id="more patience"),
        pytest.param(EarlyStopping(), EarlyStopping(None, "loss", 0.5, 1, 3.0, 9), id="none any more"),
        pytest.param(EarlyStopping(2, "error"), EarlyStopping(2, "error"), id="another value starts anew"),
    ],
)
def test_it_goes_on_from_a_checkpoint(now, after):
    assert now.after(EarlyStopping(2, "loss", 0.5, 1, 3.0, 9)) == after


# ---- manifests ---------------------------------------------------------------------------------------------

W = {"file": "rank-0.safetensors", "key": "params.w[0:4, 0:1]", "start": [0, 0], "stop": [4, 1]}
MANIFEST = Manifest(
    Position(1, 2, 12, 6, "d1gest"),
    EarlyStopping(3, "distance", 0.1 + 0.2, 1, 1 / 3, 7),
    {"seed": 0, "rows": 10, "chunks": [5, 5]},
    {"rank-0.safetensors": "ab"},
    {
        "params.w": {"dtype": "bfloat16", "shape": [4, 2], "parts": [W]},
        "state.step": {"dtype": "float32", "shape": [], "parts": []},
    },
)


def test_a_manifest_is_read_as_it_was_written():
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(MANIFEST.to_bytes()[:-20], "checksum is wrong", id="cut short"),
        pytest.param(MANIFEST.to_bytes().replace(b"float32", b"float64"), "checksum is wrong", id="changed"),
        pytest.param(b"", "checksum is wrong", id="empty"),
        pytest.param(
            sealed({"format": "dask_ferro checkpoint 3"}),
            "format '.* 3', and .* reads '.* 2'; go on",
            id="newer",
        ),
    ],
)
def test_another_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Manifest.from_bytes(text)


def test_facts_that_differ_are_told():
    was = {"seed": 0, "rows": 10, "source": "arrays"}
    assert differences(was, was) == []
    assert differences(was, {"seed": 1, "rows": 10, "last": "keep"}) == [
        "seed: was 0, is 1",
        "source: was 'arrays', is None",
        "last: was None, is 'keep'",
    ]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"params.w": ("bfloat16", (4, 2)), "state.step": ("float32", ())}, []),
        ({"params.w": ("bfloat16", (4, 2))}, ["state.step: was ('float32', ()), is None"]),
        (
            {"params.w": ("float32", (4, 2)), "state.step": ("float32", ()), "b": ("float32", (2,))},
            [
                "params.w: was ('bfloat16', (4, 2)), is ('float32', (4, 2))",
                "b: was None, is ('float32', (2,))",
            ],
        ),
    ],
)
def test_arrays_that_differ_are_told(wanted, told):
    assert mismatches(MANIFEST.arrays, wanted) == told
