"""Whole training steps in a pipeline: the bits of no pipeline, and parameters that stay where they are."""

from __future__ import annotations

import numpy as np
import pytest

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.errors import InputError
from dask_ferro.graph.tensor.optim import SGD
from dask_ferro.graph.tensor.tensor import input
from dask_ferro.lower.ranks.parallel import parallelize
from tests.each import every
from tests.graph.pipeline.nets import mlp
from tests.lower.ranks.runs import OPTIMIZERS, M, equal, leaves, trained


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_give_the_bits_of_no_pipeline(optimizer):
    net = mlp(layers=4)
    batches = [net.batch(2 * M, seed) for seed in range(3)]
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M, optimizer=optimizer)
    now = {}
    for batch, wanted in zip(batches, trained(net, optimizer, batches), strict=True):
        found = step(batch, **now).compute(scheduler="sync")
        equal(found, wanted)
        now = {"params": found.params, "state": found.state}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"optimizer": SGD(input("t", (), np.float64))}, r"argument \['t'\], which carries the batch",
            id="what comes in micro-batches"),
        pytest.param({"optimizer": SGD(input("w0", (), np.float64))}, "two arguments are named 'w0'",
            id="a name that is taken"),
        pytest.param({"twice": True, "optimizer": SGD(0.1)}, r"\['w0'\] occurs twice", id="a parameter twice"),
        pytest.param({"params": None, "optimizer": SGD(0.1)}, "there are no parameters", id="no parameters"),
    ],
)  # fmt: skip
def test_optimizers_that_a_pipeline_cannot_have(options, said):
    net = mlp(layers=2)
    params = [net.params, net.params[0]["w"]] if options.pop("twice", False) else net.params
    with pytest.raises(ff.InputError, match=said):
        parallelize(net.loss, **{"params": params, "stages": 2, "micro_batches": 1, **options})


def test_a_rate_may_change_from_step_to_step():
    net = mlp(layers=4)
    rate = input("rate", (), np.float64)
    made = {"params": net.params, "stages": 2, "micro_batches": M}
    step = parallelize(net.loss, **made, optimizer=SGD(rate, momentum=0.9))
    assert step.inputs == ("x", "t", "rate")
    now, wanted = {}, {}
    for seed, value in enumerate((0.25, 0.1)):
        batch = net.batch(2 * M, seed)
        found = step(batch, rate=value, **now).compute(scheduler="sync")
        fixed = parallelize(net.loss, **made, optimizer=SGD(value, momentum=0.9))
        other = fixed(batch, **wanted).compute(scheduler="sync")
        for [got], [want] in zip(leaves(found.params), leaves(other.params), strict=True):
            np.testing.assert_array_equal(got, want)
        now = {"params": found.params, "state": found.state}
        wanted = {"params": other.params, "state": other.state}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param({}, "missing input 'rate'; the model takes x.* t.* rate", id="missing"),
        pytest.param({"rate": np.ones(3)}, r"input 'rate' has shape \(3,\)", id="of another shape"),
    ],
)
def test_settings_of_an_optimizer_that_do_not_fit(given, said):
    net = mlp(layers=2)
    optimizer = SGD(input("rate", (), np.float64))
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=1, optimizer=optimizer)
    with pytest.raises(ff.InputError, match=said):
        step(net.batch(2), **given)


# ---- metrics -----------------------------------------------------------------------------------------------


def bits(result):
    """The bytes of all arrays of a result, in its form."""
    if isinstance(result, dict):
        return {name: bits(part) for name, part in result.items()}
    return [*map(bits, result)] if isinstance(result, tuple | list) else result.tobytes()


def measured(net, **others):
    """The loss, and twice of it as a metric."""
    return {"twice": net.loss * 2.0, "loss": net.loss, **others}


@every("optimizer", [None, SGD(0.1)], ids=["gradients", "a step"])
@every("schedule", ["gpipe", "1f1b", "zb-h1"])
@every("reduction", ["mean", "sum"])
def test_metrics_are_combined_as_the_loss_is_and_change_nothing(schedule, reduction, optimizer):
    net = mlp(layers=4)
    batch = net.batch(2 * M)
    options = {
        "stages": 2,
        "micro_batches": M,
        "schedule": schedule,
        "reduction": reduction,
        "optimizer": optimizer,
    }
    plain = parallelize(net.loss, params=net.params, **options)(batch)
    run = parallelize(measured(net), params=net.params, **options)(batch)
    assert list(run.metrics) == ["twice"]
    assert bits(run.compute(scheduler="sync")[:3]) == bits(plain.compute(scheduler="sync")[:3])
    assert run.metrics["twice"].compute(scheduler="sync") == 2 * plain.loss.compute(scheduler="sync")


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (lambda net: {"twice": net.loss}, "a mapping with 'loss', got a mapping of twice"),
        (lambda net: [net.loss], "wanted a Tensor, the loss, or a mapping with 'loss', got list"),
        (
            lambda net: measured(net, row=ft.expand_dims(net.loss, axis=0)),
            "'row': got .*, wanted a floating point scalar",
        ),
        (
            lambda net: measured(net, count=ft.astype(net.loss, "int64")),
            "'count': got .*, wanted a floating point scalar",
        ),
        (lambda net: measured(net, one=1.0), "'one': got 1.0, wanted a floating point scalar"),
    ],
    ids=["no loss", "a list", "a row", "an integer", "a number"],
)
def test_what_is_no_metric_is_refused(graph, said):
    net = mlp(layers=4)
    with pytest.raises(InputError, match=said):
        parallelize(graph(net), params=net.params, stages=2, micro_batches=M)
