"""Rates by step, and early stopping: pure values."""

from __future__ import annotations

import math

import pytest

from dask_ferro.errors import InputError
from dask_ferro.train.rates import CosineDecay, rate_at
from dask_ferro.train.state import EarlyStopping, TrainingState

# ---- rates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "rate"), [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (8, 0.55), (12, 0.1), (1000, 0.1)]
)
def test_a_cosine_rises_to_its_peak_and_falls_to_the_last_rate(update, rate):
    assert CosineDecay(1.0, updates=12, warmup=4, final=0.1)(update) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: CosineDecay(-1.0, 5), "peak: got -1.0"),
        (lambda: CosineDecay(1.0, 5, final=math.nan), "final: got nan"),
        (lambda: CosineDecay(1.0, 5, warmup=5), "warm-up of 5 of 5 updates"),
        (lambda: rate_at(lambda update: -0.1, 7), r"lr\(7\): got -0.1, wanted a finite number of at least 0"),
        (lambda: rate_at(lambda update: math.inf, 0), "got inf"),
    ],
)
def test_rates_out_of_range_are_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        wrong()


# ---- early stopping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("means", "waited"),
    [
        pytest.param([3, 2, 1, 0], 0, id="the value falls"),
        pytest.param([3, 2, 2, 2], 2, id="an equal value is no improvement"),
        pytest.param([3, 4, 2, 4, 1], 0, id="one bad epoch is borne, again and again"),
        pytest.param([1, math.nan, math.nan], 2, id="a NaN is no improvement"),
        pytest.param([math.nan, math.nan], 2, id="not even the first"),
    ],
)
def test_epochs_without_an_improvement_are_counted(means, waited):
    state = EarlyStopping()
    for mean in means:
        # Batches of 3 rows and of 1: the mean is over rows.
        state = state.after_batch(mean + 1, 1).after_batch(mean - 1 / 3, 3).after_epoch()
    assert state.waited == waited


@pytest.mark.parametrize("monitor", ["loss", "error"])
def test_a_state_is_restored_but_for_another_monitored_value(monitor):
    saved = TrainingState({}, {}, EarlyStopping("loss", 0.5, 1, 3.0, 9), 1, 2, 12, 6, "d1gest")
    restored = TrainingState({}, {}, EarlyStopping(monitor)).restored(saved.to_json(), {})
    stopping = saved.stopping if monitor == "loss" else EarlyStopping("error")
    assert restored == TrainingState({}, {}, stopping, 1, 2, 12, 6, "d1gest")
