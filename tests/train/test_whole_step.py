"""A step without a plan, which is one session run: the bits of the same step as tasks of a pipeline."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from distributed import get_task_stream

import dask_ferro as ff
from dask_ferro.train.whole_step import WholeStep
from tests.train.nets import data, loss, params, ran, same_bits

OPTIMIZERS = {
    "SGD": ff.optim.SGD(0.1),
    "momentum": ff.optim.SGD(0.1, momentum=0.9),
    "AdamW": ff.optim.Adam(0.02, weight_decay=0.1),
}
RATES = {"rate": None, "falling": lambda update: 0.1 / (1 + update)}


def rows():
    """Yield all combinations of options; the slow path is compiled for each."""
    for name, clip, accumulate in product(OPTIMIZERS, (None, 0.4), (1, 2)):
        for precision, rate in ((None, "falling"), ("float16", "rate")):
            yield name, clip, accumulate, precision, rate


@pytest.mark.parametrize(("name", "clip", "accumulate", "precision", "rate"), list(rows()))
def test_it_has_the_bits_of_a_pipeline_of_one_stage(name, clip, accumulate, precision, rate):
    options = {
        "optimizer": OPTIMIZERS[name],
        "clip": clip,
        "accumulate": accumulate,
        "precision": precision,
        "rate": RATES[rate],
    }
    (told, after), (wanted, wanted_after) = ran(**options), ran(**options, micro_batches=1)
    assert told == wanted
    assert same_bits(after, wanted_after)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_sums_of_losses_too(reduction, accumulate):
    options = {"reduction": reduction, "accumulate": accumulate}
    (told, after), (wanted, wanted_after) = ran(**options), ran(**options, micro_batches=1)
    assert told == wanted
    assert same_bits(after, wanted_after)


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, True),
        ({"reduction": "sum"}, True),
        ({"micro_batches": 2}, False),
        ({"plan": {"mesh": {"data": 2}, "inputs": {"x": 0, "t": 0}}}, False),
        ({"stages": 2}, False),
        ({"schedule": "gpipe"}, False),
    ],
)
def test_only_what_nothing_splits_is_one_run(options, whole):
    training = ff.fit(loss, params(), data(), ff.optim.SGD(0.1), batch_size=4, last="drop", **options)
    assert isinstance(training._program, WholeStep) == whole


def test_a_step_is_one_run_of_one_engine():
    training = ff.fit(loss, params(), data(), ff.optim.Adam(0.1), batch_size=8, clip=1.0)
    _, bundle = training._program._opened
    assert [engine for engine, _ in bundle.engines] == ["onnxruntime"]


@pytest.mark.cluster
def test_a_step_on_a_cluster_is_two_tasks(client):
    """One computes, the other picks the loss; parameters and state stay in a tuple."""
    training = ff.fit(loss, params(), data(48), ff.optim.Adam(0.1), batch_size=8, seed=None)
    with get_task_stream(client) as stream:
        assert len([step.loss for step in training]) == 6
    names = [str(record["key"][0]).rpartition("-")[0] for record in stream.data]
    assert Counter(names) == {"spmd-segment": 6, "spmd-output": 6}
