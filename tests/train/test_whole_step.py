"""A step as one graph: without a plan the bits of the same step in two stages; with one, few tasks."""

from __future__ import annotations

from collections import Counter
from itertools import product

import dask
import pytest
from distributed import get_task_stream

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.flow.costs import names_of
from dask_ferro.train.batches import Batch
from dask_ferro.train.program import StepInputs
from dask_ferro.train.training import next_size
from tests.each import every
from tests.train.nets import PLANS, data, distance, loss, params, ran, same_bits

OPTIMIZERS = {
    "SGD": ft.optim.SGD(0.1),
    "momentum": ft.optim.SGD(0.1, momentum=0.9),
    "AdamW": ft.optim.AdamW(0.02, weight_decay=0.1),
}
RATES = {"rate": None, "falling": lambda update: 0.1 / (1 + update)}


def rows():
    """Yield all combinations of options; the slow path is compiled for each."""
    for name, clip, accumulate in product(OPTIMIZERS, (None, 0.4), (1, 2)):
        for precision, rate in ((None, "falling"), ("float16", "rate")):
            yield name, clip, accumulate, precision, rate


@every(("name", "clip", "accumulate", "precision", "rate"), list(rows()))
def test_it_has_the_bits_of_two_stages(name, clip, accumulate, precision, rate):
    options = {
        "optimizer": OPTIMIZERS[name],
        "clip_norm": clip,
        "accumulate_steps": accumulate,
        "precision": precision,
        "lr": RATES[rate],
    }
    (told, after), (wanted, wanted_after) = ran(**options), ran(**options, stages=2)
    assert told == wanted
    assert same_bits(after, wanted_after)


@every(
    ("options", "whole"),
    [
        ({}, True),
        ({"reduction": "sum"}, True),
        ({"micro_batches": 1}, True),
        ({"micro_batches": 2}, False),
        ({"plan": PLANS["data"]}, True),
        ({"plan": PLANS["data"], "micro_batches": 2}, False),
        ({"plan": PLANS["pipeline"]}, False),
        ({"plan": {**PLANS["data"], "optimizer_state": {"data": 0}}}, True),
        ({"plan": {**PLANS["data"], "optimizer_state": {"data": 0}}, "micro_batches": 2}, False),
        ({"plan": {"enabled": False, **PLANS["pipeline"]}}, True),
        ({"plan": {**PLANS["data"], "micro_batches": 2}}, False),
        ({"plan": {"stages": 2}}, False),
        ({"stages": 2}, False),
        ({"schedule": "gpipe"}, True),
        ({"schedule": "zb-v"}, False),
    ],
)
def test_a_step_without_stages_and_micro_batches_is_one_graph(options, whole):
    training = ff.fit(loss, params(), data(), ft.optim.SGD(0.1), batch_size=4, drop_last=True, **options)
    assert (training._program.pipeline.graphs(4).end is None) == whole


def test_a_step_is_one_run_of_one_engine():
    training = ff.fit(loss, params(), data(), ft.optim.Adam(0.1), batch_size=8, clip_norm=1.0)
    bundle = training._program.pipeline._bundles[False]
    assert [engine for engine, _ in bundle.engines] == ["onnxruntime"]


def tasks_of(ranks, keys=None, **options):
    """Return the tasks of a data-parallel step of Adam over a number of ranks, with further keys of the plan."""
    plan = {"mesh": {"data": ranks}, "inputs": {"x": 0, "t": 0}, **(keys or {})}
    training = ff.fit(
        loss, params(), data(), ft.optim.Adam(0.1), batch_size=4 * ranks, drop_last=True, plan=plan, **options
    )
    program, rows = training._program, 4 * ranks
    now = training._now
    arrays = program._arrays(StepInputs(Batch.of(data(rows)), rows, 0, 0, ends=True, rate=None), now.update)
    [run] = program.pipeline.successive([arrays], now.params, now.update)
    return dict(run.__dask_graph__())


@every(
    "options",
    [{}, {"clip_norm": 0.4}, {"accumulate_steps": 2}, {"clip_norm": 0.4, "accumulate_steps": 2}],
    ids=str,
)
@every("ranks", [2, 4])
def test_a_data_parallel_step_is_two_segments_a_rank_and_one_sum(ranks, options):
    """Forward and backward, then the update; in between one message between each two ranks, and a loss."""
    tasks = tasks_of(ranks, metrics={"distance": distance}, **options)
    names = Counter(str(key[0]).rpartition("-")[0] for key in tasks)
    each = {"spmd-segment": 2 * ranks, "allreduce-terms": ranks, "allreduce-sum": ranks}
    # The loss and the metric, which are the same on each rank.
    assert names == {**each, "spmd-value": 2}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_with_split_state_gathers_parameters_after_it(ranks):
    tasks = tasks_of(ranks, {"optimizer_state": {"data": 0}}, metrics={"distance": distance})
    names = Counter(str(key[0]).rpartition("-")[0] for key in tasks)
    assert names["allgather-sum"] == ranks


@pytest.mark.cluster
@pytest.mark.parametrize("loss_scale", [None, 2.0**10])
def test_a_data_parallel_step_on_workers_has_the_bits_of_one_process(client, loss_scale):
    options = {
        "plan": PLANS["data"],
        "clip_norm": 0.4,
        "accumulate_steps": 2,
        "data": data(32),
        "loss_scale": loss_scale,
    }
    with dask.config.set(scheduler="sync"):
        wanted, wanted_after = ran(**options)
    with get_task_stream(client) as stream:
        told, after = ran(**options)
    assert told == wanted
    assert same_bits(after, wanted_after)
    names = Counter(names_of(record["key"])[0].partition(":")[0] for record in stream.data)
    # Of each group of the eight steps: two members, their parameters, and what the caller reads; parameters at the end.
    assert names.keys() - {"select_values"} == {"flow", "spmd-output"}
    assert names["spmd-output"] <= 2 * names["flow"]


@pytest.mark.cluster
def test_steps_on_a_cluster_are_bundles(client):
    """Of each group one task computes, and two pick what the loop reads, and the parameters."""
    training = ff.fit(loss, params(), data(48), ft.optim.Adam(0.1), batch_size=8, seed=None)
    with get_task_stream(client) as stream:
        assert len([step.loss for step in training]) == 6
    names = Counter(str(r["key"][0]).rpartition("-")[0].partition(":")[0] for r in stream.data)
    assert names.keys() == {"bundle", "spmd-output"}
    assert names["spmd-output"] == 2 * names["bundle"]


def test_a_group_takes_a_quarter_of_a_second_and_grows_twofold_at_most():
    assert [next_size(1, 1.0), next_size(1, 0.01), next_size(40, 0.005), next_size(100, 0.01)] == [
        1,
        2,
        50,
        25,
    ]
    assert next_size(3, 0.0) == 6
