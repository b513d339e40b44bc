"""Optimizers, losses and schedules where steps run: the numbers are those of one process without a plan.

    optimizer             x  {one rank, split weights, split rows}
    loss                  x  {split rows, split classes}
    schedule x optimizer  x  {one rank, two ranks}  x  micro-batches

Float64 gives the same bits wherever no sum is parted; sums over ranks are near.  Everything runs on Dask's synchronous
scheduler: where tasks run changes no number (`tests/lower/ranks/test_spmd`, `test_cluster`).
"""

from __future__ import annotations

import numpy as np
import pytest
from torch.nn import functional

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.regions import region
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.pipeline.schedules import NAMES, usual_chunks
from dask_ferro.graph.tensor import nn, pytree
from dask_ferro.graph.tensor.optim import SGD, Adam, AdamW
from dask_ferro.graph.tensor.tensor import asarray, input
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.lower.ranks.sharded_array import gather
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.tensor import compute
from tests.pairs import all_pairs

WIDTH, ROWS, M = 4, 8, 4
PLAN = {
    "mesh": {"tensor": 2},
    "layer0": {"shard": {"w0": {"tensor": 0}, "b0": {"tensor": 0}}},
    "layer1": {"shard": {"w1": {"tensor": 1}}},
}
RATE = input("rate", (), np.float64)
# Name -> the optimizer, and the values of the arguments that it reads.
OPTIMIZERS = {
    "SGD": (SGD(0.1), {}),
    "SGD, decay": (SGD(0.1, weight_decay=0.01), {}),
    "momentum": (SGD(0.1, momentum=0.9), {}),
    "Nesterov": (SGD(0.1, momentum=0.9, nesterov=True), {}),
    "SGD, a rate as an argument": (SGD(RATE), {"rate": np.asarray(0.1)}),
    "momentum, a rate as an argument": (SGD(RATE, momentum=0.9), {"rate": np.asarray(0.1)}),
    "Adam": (Adam(0.01), {}),
    "AdamW": (AdamW(0.01, weight_decay=0.1), {}),
    "Adam, a rate as an argument": (Adam(RATE), {"rate": np.asarray(0.01)}),
}
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


def weights():
    """The values of the parameters: two layers with biases, and one number that scales everything (0-d)."""
    rng = np.random.default_rng(0)
    shapes = {"w0": (WIDTH, WIDTH), "b0": (WIDTH,), "w1": (WIDTH, WIDTH), "b1": (WIDTH,), "scale": ()}
    return {name: np.asarray(rng.standard_normal(shape) / 2) for name, shape in shapes.items()}


def loss_of(p):
    """The loss of `x` and `t`, of parameters by name."""
    x, t = (input(name, ("N", WIDTH), np.float64) for name in "xt")
    with region("layer0"):
        h = nn.relu(nn.linear(x, p["w0"], p["b0"]))
    with region("layer1"):
        y = nn.linear(h, p["w1"], p["b1"]) * p["scale"]
    return nn.mse_loss(y, t)


def parameters():
    return {name: asarray(value, name=name) for name, value in weights().items()}


def batches(count=3):
    rng = np.random.default_rng(1)
    return [{name: rng.standard_normal((ROWS, WIDTH)) for name in "xt"} for _ in range(count)]


def named(prefix, found):
    """The leaves of a tree, by name."""
    return {f"{prefix}{'/'.join(map(str, path))}": leaf for path, (leaf,) in pytree.rows(found)}


def assert_steps(step, gradients, optimizer, extra, same, count):
    """Steps by a pipeline are those of an optimizer in one process, on the gradients of another pipeline."""
    alone, now = _Alone(optimizer), {}
    for batch in batches(count):
        found = step(batch | extra, **now).compute(scheduler="sync")
        loss, slopes = gradients(batch, params=alone.params).compute(scheduler="sync")
        alone.step(slopes, extra)
        same(found.loss, loss)
        for got, wanted in ((found.params, alone.params), (_flat(found.state), alone.state)):
            assert got.keys() == wanted.keys()
            for n, value in wanted.items():
                same(got[n], value)
                assert (got[n].shape, got[n].dtype) == (value.shape, value.dtype)
        now = {"params": found.params, "state": found.state}


# ---- optimizers --------------------------------------------------------------------------------------------


@optimizers
@pytest.mark.parametrize(
    "plan",
    [None, PLAN, {"mesh": {"data": 2}, "inputs": {"x": 0, "t": 0}}],
    ids=["one rank", "split weights", "split rows"],
)
def test_ranks_take_the_steps_of_one_process(name, plan):
    optimizer, extra = OPTIMIZERS[name]
    params = parameters()
    step = parallelize(loss_of(params), plan, params, optimizer=optimizer)
    same = np.testing.assert_array_equal if plan is None else _near
    assert_steps(step, parallelize(loss_of(params), params=params), optimizer, extra, same, 3)


def _near(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


# ---- losses ------------------------------------------------------------------------------------------------

LOSSES = {
    "mse": (nn.mse_loss, functional.mse_loss, False),
    "cross entropy": (nn.cross_entropy, functional.cross_entropy, True),
    "cross entropy, some ignored": (
        lambda x, t, **how: nn.cross_entropy(x, t, ignore_index=2, **how),
        lambda x, t, **how: functional.cross_entropy(x, t, ignore_index=2, **how),
        True,
    ),
}


@pytest.mark.parametrize(
    "plan",
    [{"mesh": {"data": 2}, "inputs": {"x": 0, "t": 0}}, {"mesh": {"tensor": 3}, "inputs": {"x": 1}}],
    ids=["rows", "classes"],
)
@pytest.mark.parametrize("name", ["cross entropy", "cross entropy, some ignored"])
def test_losses_of_split_rows_and_classes_are_the_whole_ones(name, plan):
    fn = LOSSES[name][0]
    x, t = input("x", (6, 3), np.float64), input("t", (6,), np.int64)
    loss = fn(x, t)
    outputs = {"loss": loss, "d": grad(loss, x)}
    feeds = {"x": np.random.default_rng(5).standard_normal((6, 3)), "t": np.array([0, 1, 2, 2, 0, 2])}
    plan = {**plan, "inputs": {n: {next(iter(plan["mesh"])): at} for n, at in plan["inputs"].items()}}
    found = gather(Ranks.of(apply_plan(outputs, plan))(feeds), scheduler="sync")
    for n, value in compute(outputs, feeds, scheduler="sync").items():
        _near(found[n], value)
    feeds["t"][3] = -1
    assert np.isnan(gather(Ranks.of(apply_plan(outputs, plan))(feeds), scheduler="sync")["loss"])


# ---- schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "name", "mesh", "m"), all_pairs(NAMES, ["SGD", "momentum", "Adam"], [1, 2], [1, M])
)
def test_steps_by_a_plan_are_those_of_one_process_on_its_gradients(schedule, name, mesh, m):
    """To the bit: over two ranks the gradients are those of the plan, and over one those of no plan."""
    optimizer, extra = OPTIMIZERS[name]
    params = parameters()
    stages = 2 // usual_chunks(schedule)
    made = {"stages": [["layer0"], ["layer1"]], "micro_batches": m, "schedule": schedule}
    plan = PLAN if mesh == 2 else {"mesh": {"tensor": 1}}
    step = parallelize(loss_of(params), params=params, plan=plan, optimizer=optimizer, **made)
    gradients = parallelize(
        loss_of(params), params=params, **made | ({"plan": plan} if mesh == 2 else {"stages": stages})
    )
    assert_steps(step, gradients, optimizer, extra, np.testing.assert_array_equal, 2)


class _Alone:
    """Parameters and state that an optimizer moves in one process."""

    def __init__(self, optimizer):
        self.params = weights()
        w, g = ({n: input(f"{of}.{n}", v.shape, v.dtype) for n, v in self.params.items()} for of in "wg")
        began = optimizer.init(w)
        leaves = named("", began) if began else {}
        form = pytree.unflatten(began, [input(f"s.{n}", x.shape, x.dtype) for n, x in leaves.items()])
        after, then = optimizer.step(w, g, form if leaves else began)
        self.state = {n: np.zeros(x.shape, x.dtype) for n, x in leaves.items()}
        self.outputs = {f"next w.{n}": x for n, x in after.items()}
        self.outputs |= {f"next s.{n}": x for n, x in named("", then).items()} if leaves else {}

    def step(self, gradients, extra):
        feeds = {f"w.{n}": v for n, v in self.params.items()} | {f"s.{n}": v for n, v in self.state.items()}
        feeds |= {f"g.{n}": v for n, v in gradients.items()} | extra
        found = compute(self.outputs, feeds, scheduler="sync")
        self.params = {n: found[f"next w.{n}"] for n in self.params}
        self.state = {n: found[f"next s.{n}"] for n in self.state}


def _flat(tree, above=""):
    """The arrays of a dict of dicts, named as `named` does."""
    if not isinstance(tree, dict):
        return {above: tree}
    return {n: x for key, part in tree.items() for n, x in _flat(part, f"{above}/{key}".lstrip("/")).items()}
