"""Whole training steps in a pipeline: the bits of no pipeline, and parameters that stay where they are."""

from __future__ import annotations

import numpy as np
import pytest

import dask_ferro as ff
from dask_ferro.graph import tree
from dask_ferro.graph.optim import SGD
from dask_ferro.graph.tensor import argument
from dask_ferro.graph.tensor_model import build
from dask_ferro.lower.pipeline import pipeline
from tests.graph.pipeline_nets import mlp
from tests.lower.pipeline_runs import OPTIMIZERS, M, equal, leaves, trained


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_give_the_bits_of_no_pipeline(optimizer):
    net = mlp(layers=4)
    batches = [net.batch(2 * M, seed) for seed in range(3)]
    step = pipeline(net.loss, net.params, stages=2, micro_batches=M, optimizer=optimizer)
    now = {}
    for batch, wanted in zip(batches, trained(net, optimizer, batches), strict=True):
        found = step(batch, **now).compute(scheduler="sync")
        equal(found, wanted)
        now = {"params": found.params, "state": found.state}


def test_an_optimizer_that_wants_all_gradients_gets_them():
    class Clipped:
        """Gradient descent; the step is as long as the rate at most."""

        def init(self, params):
            return {}

        def step(self, params, grads, state):
            norm = ff.sqrt(sum((g * g).sum() for g in tree.leaves(grads)))
            return tree.mapped(lambda w, g: w - 0.1 * g / norm, params, grads), {}

    net = mlp(layers=4)
    batch = net.batch(2 * M)
    step = pipeline(net.loss, net.params, stages=2, micro_batches=M, optimizer=Clipped())
    moved = step(batch).compute(scheduler="sync")
    before = [
        array for [array] in leaves(tree.like(net.params, [net_array(p) for p in tree.leaves(net.params)]))
    ]
    length = np.sqrt(
        sum(((a - b) ** 2).sum() for a, b in zip((x for [x] in leaves(moved.params)), before, strict=True))
    )
    assert length == pytest.approx(0.1, rel=1e-12)


def net_array(parameter):
    """The value of a constant."""
    return next(iter(build({"y": parameter + 0.0}, [parameter]).bound.values()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            {"optimizer": SGD(argument("rate", (), np.float64))}, r"argument \['rate'\]", id="a rate"
        ),
        pytest.param(
            {"twice": True, "optimizer": SGD(0.1)}, r"\['w0'\] is given twice", id="a parameter twice"
        ),
        pytest.param({"params": None, "optimizer": SGD(0.1)}, "there are no parameters", id="no parameters"),
    ],
)
def test_optimizers_that_a_pipeline_cannot_have(options, said):
    net = mlp(layers=2)
    params = [net.params, net.params[0]["w"]] if options.pop("twice", False) else net.params
    with pytest.raises(ff.ConfigError, match=said):
        pipeline(net.loss, **{"params": params, "stages": 2, "micro_batches": 1, **options})


def test_what_needs_an_optimizer_is_refused_without_one():
    net = mlp(layers=2)
    step = pipeline(net.loss, net.params, stages=2, micro_batches=1)
    with pytest.raises(ff.ConfigError, match="state: there is no optimizer"):
        step(net.batch(2), state={})
    with pytest.raises(ff.ConfigError, match="submit: it has no optimizer"):
        step(net.batch(2)).submit()
