"""Every optimizer, loss, dtype and schedule where steps run: the numbers are those of one process without a plan.

    optimizer  x  {one model, ranks, pipeline, pipeline with a plan}
    loss       x  dtype                                               against PyTorch
    schedule   x  {gradients, optimizer, plan, both}

Float64 gives the same bits wherever no sum is parted; sums over ranks are near.  Everything runs on Dask's synchronous
scheduler: where tasks run changes no number (`tests/lower/ranks/test_spmd`, `test_cluster`).
"""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn import functional

import dask_ferro as ff
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.regions import signal
from dask_ferro.graph.parallel.apply import apply
from dask_ferro.graph.pipeline.named import NAMES, usual_chunks
from dask_ferro.graph.tensor import nn, pytree
from dask_ferro.graph.tensor.optim import SGD, Adam, AdamW
from dask_ferro.graph.tensor.tensor import Tensor, argument, asarray
from dask_ferro.lower.pipeline.pipeline import pipeline
from dask_ferro.lower.ranks.sharded import gather
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.tensor import compute
from tests.each import each
from tests.pairs import all_pairs

WIDTH, ROWS, M = 4, 8, 4
PLAN = {
    "mesh": {"tensor": 2},
    "layer0": {"shard": {"w0": {"tensor": 0}, "b0": {"tensor": 0}}},
    "layer1": {"shard": {"w1": {"tensor": 1}}},
}
RATE = argument("rate", (), np.float64)
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
    x, t = (argument(name, ("N", WIDTH), np.float64) for name in "xt")
    with signal("layer0"):
        h = nn.relu(nn.linear(x, p["w0"], p["b0"]))
    with signal("layer1"):
        y = nn.linear(h, p["w1"], p["b1"]) * p["scale"]
    return nn.mse(y, t)


def parameters():
    return {name: asarray(value, name=name) for name, value in weights().items()}


def batches(count=3):
    rng = np.random.default_rng(1)
    return [{name: rng.standard_normal((ROWS, WIDTH)) for name in "xt"} for _ in range(count)]


def named(prefix, found):
    """The leaves of a tree, by name."""
    return {f"{prefix}{'/'.join(map(str, path))}": leaf for path, (leaf,) in pytree.rows(found)}


class Step:
    """A training step as one graph: parameters and state in, loss, parameters and state out."""

    def __init__(self, optimizer):
        values = weights()
        self.form = {n: argument(n, v.shape, v.dtype) for n, v in values.items()}
        began = optimizer.init(self.form)
        kept = {f"state.{i}": leaf for i, leaf in enumerate(pytree.leaves(began) if began else [])}
        fed = {n: argument(n, leaf.shape, leaf.dtype) for n, leaf in kept.items()}
        loss = loss_of(self.form)
        state = pytree.like(began, list(fed.values())) if kept else began
        after, then = optimizer.step(self.form, grad(loss, self.form), state)
        self.outputs = {"loss": loss, **{f"next {n}": w for n, w in after.items()}}
        if kept:
            ordered = pytree.leaves(pytree.mapped(lambda _, now: now, began, then))
            self.outputs |= {f"next {n}": leaf for n, leaf in zip(fed, ordered, strict=True)}
        self.now = values | {n: np.zeros(leaf.shape, leaf.dtype) for n, leaf in kept.items()}

    def run(self, call, extra):
        """Yield the results of each batch, all from the same parameters."""
        now = dict(self.now)
        for batch in batches():
            found = call(now | batch | extra)
            now = {n.removeprefix("next "): v for n, v in found.items() if n != "loss"}
            yield found


def alone(step):
    return lambda feeds: compute(step.outputs, feeds, scheduler="sync")


# ---- optimizers --------------------------------------------------------------------------------------------


@optimizers
def test_steps_are_torchs(name):
    optimizer, extra = OPTIMIZERS[name]
    step = Step(optimizer)
    held = {n: torch.tensor(v, requires_grad=True) for n, v in weights().items()}
    theirs = _torchs(optimizer, float(extra.get("rate", 0)), list(held.values()))
    for batch, found in zip(batches(), step.run(alone(step), extra), strict=True):
        theirs.zero_grad()
        x, t = (torch.tensor(batch[n]) for n in "xt")
        y = (torch.relu(x @ held["w0"].T + held["b0"]) @ held["w1"].T + held["b1"]) * held["scale"]
        loss = functional.mse_loss(y, t)
        loss.backward()
        theirs.step()
        np.testing.assert_allclose(found["loss"], loss.item(), rtol=1e-12)
        for n, w in held.items():
            np.testing.assert_allclose(found[f"next {n}"], w.detach().numpy(), rtol=1e-6, atol=1e-9)


def _torchs(optimizer, rate, held):
    rate = rate if isinstance(optimizer.rate, Tensor) else optimizer.rate
    if isinstance(optimizer, Adam):
        options = {"betas": optimizer.betas, "eps": optimizer.epsilon, "weight_decay": optimizer.weight_decay}
        return torch.optim.AdamW(held, lr=rate, **options)
    options = {
        "momentum": optimizer.momentum,
        "nesterov": optimizer.nesterov,
        "weight_decay": optimizer.weight_decay,
    }
    return torch.optim.SGD(held, lr=rate, **options)


@optimizers
@pytest.mark.parametrize(
    "plan",
    [None, PLAN, {"mesh": {"data": 2}, "inputs": {"x": 0, "t": 0}}],
    ids=["one rank", "split weights", "split rows"],
)
def test_ranks_take_the_steps_of_one_process(name, plan):
    optimizer, extra = OPTIMIZERS[name]
    step = Step(optimizer)
    ranks = Ranks.of(apply(step.outputs, plan), dims={"N": ROWS})
    in_ranks = step.run(lambda feeds: gather(ranks(feeds), scheduler="sync"), extra)
    for found, wanted in zip(in_ranks, step.run(alone(step), extra), strict=True):
        assert found.keys() == wanted.keys()
        for n, value in wanted.items():
            same = np.testing.assert_array_equal if plan is None else _near
            same(found[n], value)
            assert (found[n].shape, found[n].dtype) == (value.shape, value.dtype)


def _near(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@optimizers
def test_a_pipeline_takes_the_steps_of_one_of_one_stage(name):
    optimizer, extra = OPTIMIZERS[name]
    made = {"micro_batches": M, "optimizer": optimizer}
    params = parameters()
    steps = [pipeline(loss_of(params), params, stages=stages, **made) for stages in (2, 1)]
    now = [{}, {}]
    whole = Step(optimizer).run(alone(Step(optimizer)), extra)
    for batch, wanted in zip(batches(), whole, strict=True):
        found = [s(batch, **extra, **n).compute(scheduler="sync") for s, n in zip(steps, now, strict=True)]
        now = [{"params": one.params, "state": one.state} for one in found]
        assert found[0].loss == found[1].loss
        for n, value in found[0].params.items():
            np.testing.assert_array_equal(value, found[1].params[n])
            np.testing.assert_allclose(value, wanted[f"next {n}"], rtol=1e-6, atol=1e-9)


@optimizers
def test_a_pipeline_with_a_plan_takes_the_steps_of_ranks_on_its_gradients(name):
    """The step as a graph of its own, in ranks, on the gradients of a pipeline without an optimizer: the same bits."""
    optimizer, extra = OPTIMIZERS[name]
    params = parameters()
    made = {"stages": 2, "micro_batches": M}
    gradients = pipeline(loss_of(params), params, plan=PLAN, **made)
    plain = pipeline(loss_of(params), params, **made)
    whole = pipeline(loss_of(params), params, plan=PLAN, optimizer=optimizer, **made)
    batch = batches(1)[0]
    step = whole(batch | extra).compute(scheduler="sync")
    (loss, found), (wanted_loss, wanted) = (p(batch).compute(scheduler="sync") for p in (gradients, plain))
    assert step.loss == loss
    _near(loss, wanted_loss)
    moved = [_moved(optimizer, parts, extra, plan) for parts, plan in ((found, PLAN), (wanted, None))]
    for n, value in moved[1].items():
        np.testing.assert_array_equal(step.params[n.removeprefix("next ")], moved[0][n])
        _near(moved[0][n], value)


def _moved(optimizer, gradients, extra, plan):
    """Parameters after a first step of ranks on gradients."""
    values = weights()
    w, g = ({n: argument(f"{kind}{n}", v.shape, v.dtype) for n, v in values.items()} for kind in ("", "d"))
    after, _ = optimizer.step(w, g, optimizer.init(w))
    split = None
    if plan is not None:
        places = {"w0": {"tensor": 0}, "b0": {"tensor": 0}, "w1": {"tensor": 1}}
        split = {"mesh": plan["mesh"], "inputs": places | {f"d{n}": at for n, at in places.items()}}
    ranks = Ranks.of(apply({f"next {n}": x for n, x in after.items()}, split))
    feeds = values | {f"d{n}": np.asarray(v) for n, v in gradients.items()} | extra
    return gather(ranks(feeds), scheduler="sync")


# ---- losses ------------------------------------------------------------------------------------------------

LOSSES = {
    "mse": (nn.mse, functional.mse_loss, False),
    "cross entropy": (nn.cross_entropy, functional.cross_entropy, True),
    "cross entropy, some ignored": (
        lambda x, t, **how: nn.cross_entropy(x, t, ignore_index=2, **how),
        lambda x, t, **how: functional.cross_entropy(x, t, ignore_index=2, **how),
        True,
    ),
}


# Each reduction and each number of rows once in the suite, with every loss and dtype; all pairs in `make soak`.
OFTEN = (("mean", 1), ("sum", 300), ("none", 7), ("mean", 300))
REDUCTIONS = [
    pytest.param(*pair, marks=() if pair in OFTEN else pytest.mark.soak)
    for pair in product(("mean", "sum", "none"), (1, 7, 300))
]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("reduction", "rows"), REDUCTIONS)
def test_losses_and_their_gradients_are_torchs(name, reduction, rows):
    dtypes = ("float64", "float32", "float16", "bfloat16")
    each(dtypes, lambda dtype: _check_loss(name, reduction, dtype, rows))


def _check_loss(name, reduction, dtype, rows):
    fn, theirs, labelled = LOSSES[name]
    rng = np.random.default_rng(rows)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    scores = rng.standard_normal((rows, 3)).astype(kind)
    target = np.arange(rows) % 3 if labelled else rng.standard_normal((rows, 3)).astype(kind)
    x, t = argument("x", scores.shape, kind), argument("t", target.shape, target.dtype)
    loss = fn(x, t, reduction=reduction)
    found = compute({"y": loss, "d": grad(loss.sum(), x)}, {"x": scores, "t": target}, scheduler="sync")
    exact = torch.tensor(scores.astype(float), requires_grad=True)
    labels = torch.tensor(target if labelled else target.astype(float))
    wanted = theirs(exact, labels, reduction=reduction)
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    error = 8 * float(ml_dtypes.finfo(kind).eps)
    assert found["y"].dtype == kind
    np.testing.assert_allclose(found["y"].astype(float), wanted.detach().numpy(), rtol=error, atol=error)
    np.testing.assert_allclose(found["d"].astype(float), slope.numpy(), rtol=error, atol=error)


@pytest.mark.parametrize(
    "plan",
    [{"mesh": {"data": 2}, "inputs": {"x": 0, "t": 0}}, {"mesh": {"tensor": 3}, "inputs": {"x": 1}}],
    ids=["rows", "classes"],
)
@pytest.mark.parametrize("name", ["cross entropy", "cross entropy, some ignored"])
def test_losses_of_split_rows_and_classes_are_the_whole_ones(name, plan):
    fn = LOSSES[name][0]
    x, t = argument("x", (6, 3), np.float64), argument("t", (6,), np.int64)
    loss = fn(x, t)
    outputs = {"loss": loss, "d": grad(loss, x)}
    feeds = {"x": np.random.default_rng(5).standard_normal((6, 3)), "t": np.array([0, 1, 2, 2, 0, 2])}
    plan = {**plan, "inputs": {n: {next(iter(plan["mesh"])): at} for n, at in plan["inputs"].items()}}
    found = gather(Ranks.of(apply(outputs, plan))(feeds), scheduler="sync")
    for n, value in compute(outputs, feeds, scheduler="sync").items():
        _near(found[n], value)
    feeds["t"][3] = -1
    assert np.isnan(gather(Ranks.of(apply(outputs, plan))(feeds), scheduler="sync")["loss"])


# ---- schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "gives", "split"), all_pairs(NAMES, ["gradients", "optimizer"], ["no plan", "plan"])
)
def test_every_schedule_gives_the_same(schedule, gives, split):
    optimizer, plan = Adam(0.01) if gives == "optimizer" else None, PLAN if split == "plan" else None
    stages = 2 // usual_chunks(schedule)
    params = parameters()
    cut = [["layer0"], ["layer1"]] if plan is not None else stages
    made = {"stages": cut, "micro_batches": M, "schedule": schedule, "plan": plan}
    batch = batches(1)[0]
    given = {} if optimizer is None else {"optimizer": optimizer}
    found = pipeline(loss_of(params), params, **given, **made)(batch).compute(scheduler="sync")
    plain = pipeline(loss_of(params), params, stages=1, micro_batches=M, schedule="gpipe", **given)
    wanted = plain(batch).compute(scheduler="sync")
    same = np.testing.assert_array_equal if plan is None else _near
    same(found[0], wanted[0])
    for n, value in wanted[1].items():
        same(found[1][n], value)


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
    step = pipeline(loss_of(params), params, plan=plan, optimizer=optimizer, **made)
    gradients = pipeline(
        loss_of(params), params, **made | ({"plan": plan} if mesh == 2 else {"stages": stages})
    )
    alone, now = _Alone(optimizer), {}
    for batch in batches(2):
        found = step(batch | extra, **now).compute(scheduler="sync")
        loss, slopes = gradients(batch, params=alone.params).compute(scheduler="sync")
        alone.step(slopes, extra)
        np.testing.assert_array_equal(found.loss, loss)
        for got, wanted in ((found.params, alone.params), (_flat(found.state), alone.state)):
            assert got.keys() == wanted.keys()
            for n, value in wanted.items():
                np.testing.assert_array_equal(got[n], value)
                assert (got[n].shape, got[n].dtype) == (value.shape, value.dtype)
        now = {"params": found.params, "state": found.state}


class _Alone:
    """Parameters and state that an optimizer moves in one process."""

    def __init__(self, optimizer):
        self.params = weights()
        w, g = ({n: argument(f"{of}.{n}", v.shape, v.dtype) for n, v in self.params.items()} for of in "wg")
        began = optimizer.init(w)
        leaves = named("", began) if began else {}
        form = pytree.like(began, [argument(f"s.{n}", x.shape, x.dtype) for n, x in leaves.items()])
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


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("plan", [None, PLAN], ids=["no plan", "plan"])
def test_fewer_rows_than_micro_batches_are_refused(rows, plan):
    params = parameters()
    cut = {"stages": [["layer0"], ["layer1"]]}
    batch = {n: np.zeros((rows, WIDTH)) for n in "xt"}
    with pytest.raises(ff.ConfigError, match="a row or more for each of the 4 micro-batches; pass more rows"):
        pipeline(loss_of(params), params, micro_batches=M, plan=plan, **cut)(batch).compute(scheduler="sync")
