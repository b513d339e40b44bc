"""Gradients of expressions drawn at random, of shapes that broadcast, against PyTorch's in float64.

A step is one function of both libraries.  It is taken where PyTorch takes the shapes, and away from kinks and ties,
which rounding would decide.  Each value that no other reads is projected on a random vector, so that no step is unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from dask_ferro.graph.autodiff.grad import value_and_grad
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.tensor import input
from tests.each import each
from tests.graph.tensor.runs import values

torch = pytest.importorskip("torch")
F = torch.nn.functional

EXPRESSIONS, CHUNK = 200, 50
# From a kink or a tie; and the most elements and the largest number of a value.
GAP, ELEMENTS, LARGEST = 1e-3, 300, 30.0
EPSILON = float(np.float32(1e-5))
LAYERS = ("avg_pool2d", "conv1d", "conv2d", "gelu", "layer_norm", "log_softmax", "max_pool2d", "relu", "rms_norm",
    "scaled_dot_product_attention", "sigmoid", "silu", "softmax", "softplus")  # fmt: skip


def _reduction(function: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    return lambda x, *, axis, keepdims: function(x, dim=axis, keepdim=keepdims, **more)


OURS = SimpleNamespace(
    **{name: getattr(xp, name) for name in xp.__all__}, **{name: getattr(nn, name) for name in LAYERS}
)
# PyTorch's functions under the standard's names, and with its arguments.
SAME = ("abs", "acosh", "asinh", "atan", "atan2", "broadcast_to", "clip", "cos", "cosh", "erf", "exp", "expm1",
    "hypot", "log", "log1p", "log2", "logaddexp", "matmul", "maximum", "minimum", "relu", "reshape", "sigmoid", "sin",
    "sinh", "sqrt", "tan", "tanh", "where")  # fmt: skip
THEIRS = SimpleNamespace(
    **{name: getattr(torch, name) for name in SAME},
    **{
        name: getattr(F, name)
        for name in (
            "avg_pool2d",
            "conv1d",
            "conv2d",
            "gelu",
            "layer_norm",
            "max_pool2d",
            "rms_norm",
            "scaled_dot_product_attention",
            "silu",
            "softplus",
        )
    },
    concat=lambda arrays, *, axis: torch.cat(arrays, axis),
    cumulative_prod=lambda x, *, axis: torch.cumprod(x, axis),
    cumulative_sum=lambda x, *, axis: torch.cumsum(x, axis),
    diff=lambda x, *, axis: torch.diff(x, dim=axis),
    expand_dims=lambda x, *, axis: torch.unsqueeze(x, axis),
    flip=lambda x, *, axis: torch.flip(x, (axis,)),
    log_softmax=lambda x, *, axis: torch.log_softmax(x, axis),
    matrix_transpose=lambda x: x.mT,
    max=_reduction(torch.amax),
    mean=_reduction(torch.mean),
    min=_reduction(torch.amin),
    permute_dims=torch.permute,
    prod=_reduction(torch.prod),
    repeat=lambda x, times, *, axis: torch.repeat_interleave(x, times, axis),
    roll=lambda x, shift, *, axis: torch.roll(x, shift, axis),
    softmax=lambda x, *, axis: torch.softmax(x, axis),
    sort=lambda x, *, axis, descending: torch.sort(x, axis, descending)[0],
    squeeze=torch.squeeze,
    stack=lambda arrays, *, axis: torch.stack(arrays, axis),
    std=_reduction(torch.std, correction=0),
    sum=_reduction(torch.sum),
    take=lambda x, indices, *, axis: torch.index_select(x, axis, torch.tensor(indices)),
    take_along_axis=lambda x, indices, *, axis: torch.take_along_dim(x, torch.tensor(indices), axis),
    tensordot=lambda a, b, *, axes: torch.tensordot(a, b, axes),
    tile=torch.tile,
    tril=lambda x, *, k: torch.tril(x, k),
    triu=lambda x, *, k: torch.triu(x, k),
    var=_reduction(torch.var, correction=0),
    vecdot=torch.linalg.vecdot,
)


# ---- which arguments a step takes: keywords, or None where it does not fit; `leaves` are shapes of new operands ------

Draw = Callable[..., dict[str, Any] | None]


def anything(rng: Any, *values: Any) -> dict[str, Any]:
    return {}


def accept(function: Callable[..., Any], draw: Draw = anything) -> Draw:
    def drawn(rng: Any, *values: Any) -> dict[str, Any] | None:
        try:
            function(*values)
        except (RuntimeError, IndexError):
            return None
        return draw(rng, *values)

    return drawn


broadcasting = accept(torch.add)


def smooth(*kinks: float) -> Draw:
    return lambda rng, x: {} if all((x - kink).abs().min() > GAP for kink in kinks) else None


def apart(rng: Any, a: Any, b: Any) -> dict[str, Any] | None:
    return {} if broadcasting(rng, a, b) is not None and (a - b).abs().min() > GAP else None


def axis(rng: Any, x: Any) -> dict[str, Any] | None:
    return {"axis": int(rng.integers(-x.ndim, x.ndim))} if x.ndim else None


def axes(rng: Any, x: Any) -> dict[str, Any] | None:
    picked = rng.permutation(x.ndim)[: rng.integers(1, x.ndim + 1)] if x.ndim else ()
    return {"axis": tuple(sorted(map(int, picked))), "keepdims": flag(rng)} if x.ndim else None


def flag(rng: Any) -> bool:
    return bool(rng.integers(2))


def meeting(at: int) -> Draw:
    """Two tensors, of which the last dimension of the first and the dimension `at` of the second have one size."""
    return lambda rng, a, b: {} if a.ndim and b.ndim and a.shape[-1] == b.shape[at] else None


def distinct(draw: Draw) -> Draw:
    def drawn(rng: Any, x: Any) -> dict[str, Any] | None:
        gaps = x.flatten().sort()[0].diff()
        return draw(rng, x) if not gaps.numel() or gaps.min() > 1e-6 else None

    return drawn


def deviations(rng: Any, x: Any) -> dict[str, Any] | None:
    """Axes along which no deviation is near 0, where its slope is infinite."""
    drawn = axes(rng, x)
    return drawn if drawn and torch.std(x, drawn["axis"], correction=0).min() > 0.05 else None


def one_axis(rng: Any, x: Any) -> dict[str, Any] | None:
    drawn = axis(rng, x)
    return drawn and {**drawn, "keepdims": flag(rng)}


def alike(rng: Any, a: Any, b: Any) -> dict[str, Any] | None:
    return axis(rng, a) if a.shape == b.shape else None


def order(rng: Any, x: Any) -> dict[str, Any]:
    return {"axes": tuple(map(int, rng.permutation(x.ndim)))}


def form(rng: Any, x: Any) -> dict[str, Any]:
    return {"shape": [(-1,), tuple(x.shape)[::-1], (-1, *x.shape[2:]), (1, *x.shape)][rng.integers(4)]}


def new_axis(rng: Any, x: Any) -> dict[str, Any]:
    return {"axis": int(rng.integers(x.ndim + 1))}


def single_axis(rng: Any, x: Any) -> dict[str, Any] | None:
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    return {"axis": int(rng.choice(ones))} if ones else None


def wider(rng: Any, x: Any) -> dict[str, Any]:
    return {"shape": (*((2,) * flag(rng)), *(3 if n == 1 else n for n in x.shape))}


def indices(rng: Any, x: Any) -> dict[str, Any] | None:
    drawn = axis(rng, x)
    return drawn and {**drawn, "indices": rng.integers(0, x.shape[drawn["axis"]], 3)}


def places(rng: Any, x: Any) -> dict[str, Any] | None:
    drawn = axis(rng, x)
    shape = [2 if drawn and i == drawn["axis"] % x.ndim else n for i, n in enumerate(x.shape)]
    return drawn and {**drawn, "indices": rng.integers(0, x.shape[drawn["axis"]], shape)}


def index_of(rng: Any, x: Any) -> dict[str, Any] | None:
    kinds = [slice(None), slice(1, None), slice(None, -1), slice(None, None, 2), 0, -1]
    index = tuple(kinds[rng.integers(6)] if n > 1 else slice(None) for n in x.shape)
    return {"index": index} if index else None


def matrices(rng: Any, x: Any) -> dict[str, Any] | None:
    return {"k": int(rng.integers(-1, 2))} if x.ndim > 1 else None


def longer(rng: Any, x: Any) -> dict[str, Any] | None:
    drawn = axis(rng, x)
    return drawn if drawn and x.shape[drawn["axis"]] > 1 else None


def features(*leaves: int) -> Draw:
    """A tensor whose last dimension varies, and leaves of so many dimensions, the last of that size."""

    def drawn(rng: Any, x: Any) -> dict[str, Any] | None:
        if not x.ndim or x.shape[-1] < 2 or x.var(-1).min() < 0.01:
            return None
        return {"leaves": [(*(2,) * (rank - 1), x.shape[-1]) for rank in leaves]}

    return drawn


def images(rank: int) -> Draw:
    def drawn(rng: Any, x: Any) -> dict[str, Any] | None:
        if x.ndim != rank + 2:
            return None
        kernel = tuple(int(rng.integers(1, min(n, 3) + 1)) for n in x.shape[2:])
        steps = {"stride": int(rng.integers(1, 3)), "padding": int(rng.integers(2)), "dilation": 1}
        return {"leaves": [(2, x.shape[1], *kernel), (2,)], **steps}

    return drawn


def windows(rng: Any, x: Any) -> dict[str, Any] | None:
    return {"stride": int(rng.integers(1, 3))} if x.ndim == 4 and min(x.shape[2:]) > 1 else None


def queries(rng: Any, x: Any) -> dict[str, Any] | None:
    return {"leaves": [tuple(x.shape)] * 2, "is_causal": flag(rng)} if x.ndim > 1 else None


class Step(NamedTuple):
    """An expression of values, which both libraries write alike, and which arguments it takes."""

    apply: Callable[..., Any]
    draw: Draw = anything
    reads: int = 1


def binary(apply: Callable[..., Any], draw: Draw = broadcasting) -> Step:
    return Step(apply, draw, 2)


STEPS = {
    **{name: Step(lambda m, x, name=name: getattr(m, name)(x)) for name in (
        "tanh", "sin", "cos", "atan", "erf", "sigmoid", "softplus", "gelu", "silu", "asinh", "sinh", "cosh", "expm1")},
    "exp": Step(lambda m, x: m.exp(m.tanh(x))),
    "tan": Step(lambda m, x: m.tan(m.sin(x))),
    "acosh": Step(lambda m, x: m.acosh(1.5 + x * x)),
    "log": Step(lambda m, x: m.log(x * x + 0.5)),
    "log1p": Step(lambda m, x: m.log1p(x * x)),
    "log2": Step(lambda m, x: m.log2(1 + x * x)),
    "sqrt": Step(lambda m, x: m.sqrt(x * x + 0.1)),
    "quotient": Step(lambda m, x: 2 / (x * x + 1)),
    "cube": Step(lambda m, x: x**3 - 0.5 * x**2),
    "abs": Step(lambda m, x: m.abs(x), smooth(0.0)),
    "relu": Step(lambda m, x: m.relu(x), smooth(0.0)),
    "clip": Step(lambda m, x: m.clip(x, -0.5, 0.7), smooth(-0.5, 0.7)),
    "add": binary(lambda m, a, b: a + b),
    "subtract": binary(lambda m, a, b: 2 * a - b),
    "multiply": binary(lambda m, a, b: a * b),
    "divide": binary(lambda m, a, b: a / (1 + b * b)),
    "pow": binary(lambda m, a, b: (1.5 + m.tanh(a)) ** m.tanh(b)),
    "maximum": binary(lambda m, a, b: m.maximum(a, b), apart),
    "minimum": binary(lambda m, a, b: m.minimum(a, b), apart),
    "where": binary(lambda m, a, b: m.where(a > b, m.sin(a), b * b), apart),
    "atan2": binary(lambda m, a, b: m.atan2(a, 2 + b * b)),
    "hypot": binary(lambda m, a, b: m.hypot(a, 1 + b * b)),
    "logaddexp": binary(lambda m, a, b: m.logaddexp(a, b), apart),
    "sum": Step(lambda m, x, **drawn: m.sum(x, **drawn), axes),
    "mean": Step(lambda m, x, **drawn: m.mean(x, **drawn), axes),
    "max": Step(lambda m, x, **drawn: m.max(x, **drawn), distinct(axes)),
    "min": Step(lambda m, x, **drawn: m.min(x, **drawn), distinct(axes)),
    "var": Step(lambda m, x, **drawn: m.var(x, **drawn), axes),
    "std": Step(lambda m, x, **drawn: m.std(x, **drawn), deviations),
    "prod": Step(lambda m, x, **drawn: m.prod(x, **drawn), one_axis),
    "cumulative_sum": Step(lambda m, x, axis: m.cumulative_sum(x, axis=axis), axis),
    "cumulative_prod": Step(lambda m, x, axis: m.cumulative_prod(x, axis=axis), axis),
    "diff": Step(lambda m, x, axis: m.diff(x, axis=axis), longer),
    "sort": Step(lambda m, x, axis: m.sort(x, axis=axis, descending=axis < 0), distinct(axis)),
    "permute_dims": Step(lambda m, x, axes: m.permute_dims(x, axes), order),
    "reshape": Step(lambda m, x, shape: m.reshape(x, shape), form),
    "expand_dims": Step(lambda m, x, axis: m.expand_dims(x, axis=axis), new_axis),
    "squeeze": Step(lambda m, x, axis: m.squeeze(x, axis), single_axis),
    "broadcast_to": Step(lambda m, x, shape: m.broadcast_to(x, shape), wider),
    "flip": Step(lambda m, x, axis: m.flip(x, axis=axis), axis),
    "roll": Step(lambda m, x, axis: m.roll(x, 1, axis=axis), axis),
    "repeat": Step(lambda m, x, axis: m.repeat(x, 2, axis=axis), axis),
    "tile": Step(lambda m, x: m.tile(x, (2, 1))),
    "concat": binary(lambda m, a, b, axis: m.concat([a, b], axis=axis), alike),
    "stack": binary(lambda m, a, b, axis: m.stack([a, b], axis=axis), alike),
    "take": Step(lambda m, x, indices, axis: m.take(x, indices, axis=axis), indices),
    "take_along_axis": Step(lambda m, x, indices, axis: m.take_along_axis(x, indices, axis=axis), places),
    "index": Step(lambda m, x, index: x[index], index_of),
    "new axes": Step(lambda m, x: x[None, ..., None]),
    "tril": Step(lambda m, x, k: m.tril(x, k=k), matrices),
    "triu": Step(lambda m, x, k: m.triu(x, k=k), matrices),
    "matmul": binary(lambda m, a, b: a @ b, accept(torch.matmul)),
    "matmul, turned": binary(lambda m, a, b: a @ b.mT, accept(lambda a, b: a @ b.transpose(-1, -2))),
    "gram": Step(lambda m, x: x @ x.mT, accept(lambda x: x @ x.transpose(-1, -2))),
    "linear": Step(lambda m, x, w: x @ w.mT, features(2)),
    "tensordot": binary(lambda m, a, b: m.tensordot(a, b, axes=1), meeting(0)),
    "vecdot": binary(lambda m, a, b: m.vecdot(a, b), accept(torch.add, meeting(-1))),
    "softmax": Step(lambda m, x, axis: m.softmax(x, axis=axis), axis),
    "log_softmax": Step(lambda m, x, axis: m.log_softmax(x, axis=axis), axis),
    "layer_norm": Step(lambda m, x, w, b: m.layer_norm(x, x.shape[-1:], w, b, eps=EPSILON), features(1, 1)),
    "rms_norm": Step(lambda m, x, w: m.rms_norm(x, x.shape[-1:], w, eps=EPSILON), features(1)),
    "conv1d": Step(lambda m, x, w, b, **drawn: m.conv1d(x, w, b, **drawn), images(1)),
    "conv2d": Step(lambda m, x, w, b, **drawn: m.conv2d(x, w, b, **drawn), images(2)),
    "max_pool2d": Step(lambda m, x, stride: m.max_pool2d(x, 2, stride=stride), distinct(windows)),
    "avg_pool2d": Step(lambda m, x, stride: m.avg_pool2d(x, 2, stride=stride), windows),
    "attention": Step(lambda m, x, k, v, **drawn: m.scaled_dot_product_attention(x, k, v, **drawn), queries),
}  # fmt: skip


class Expression:
    """Values of both libraries by number, the arrays of the leaves among them, and the lines that made them."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, np.random.default_rng(seed)
        self.values: list[tuple[Any, Any]] = []
        self.leaves: dict[int, np.ndarray] = {}
        self.read: set[int] = set()
        self.lines = [f"seed {seed}:"]

    def draw(self) -> None:
        """Draw two leaves and six steps; the seed chooses the first step, so that each one is drawn."""
        sizes = (2, *map(int, self.rng.permutation([2, 3, 4])))
        for _ in range(2):
            # A part of one shape from the right, with some sizes 1: any two broadcast.
            self.leaf(tuple(n if self.rng.random() < 0.8 else 1 for n in sizes[self.rng.integers(0, 4) :]))
        names, taken = [*STEPS], 0
        first = names[self.seed % len(names)]
        # A step may fit nothing here, or make too large a value each time.
        for _ in range(60):
            if taken < 6:
                taken += self.grow(names[self.rng.integers(len(names))] if taken else first)

    def leaf(self, shape: tuple[int, ...]) -> int:
        array = self.rng.uniform(-1.5, 1.5, shape)
        number = len(self.values)
        self.leaves[number] = array
        self.add((input(f"x{number}", shape, np.float64), torch.tensor(array, requires_grad=True)), "leaf")
        return number

    def add(self, pair: tuple[Any, Any], made: str) -> None:
        self.lines.append(f"  v{len(self.values)} = {made}  # {tuple(pair[1].shape)}")
        self.values.append(pair)

    def grow(self, name: str) -> bool:
        """Take a step where it fits, and return whether it did; after many failures a new leaf may do."""
        step = STEPS[name]
        for _ in range(5):
            read = [int(self.rng.integers(len(self.values))) for _ in range(step.reads)]
            drawn = step.draw(self.rng, *(self.values[i][1].detach() for i in read))
            if drawn is not None:
                break
        else:
            full = (2, *map(int, self.rng.permutation([2, 3, 4])))
            self.leaf(full[self.rng.integers(0, 4) :])
            return False
        read += [self.leaf(shape) for shape in drawn.pop("leaves", ())]
        theirs = step.apply(THEIRS, *(self.values[i][1] for i in read), **drawn)
        if theirs.numel() > ELEMENTS or theirs.ndim > 4 or not theirs.abs().max() < LARGEST:
            return False
        given = [*(f"v{i}" for i in read), *(f"{key}={value!r}" for key, value in drawn.items())]
        made = f"{name}({', '.join(given)})"
        ours = step.apply(OURS, *(self.values[i][0] for i in read), **drawn)
        assert ours.shape == tuple(theirs.shape), (made, ours, theirs.shape)
        self.add((ours, theirs), made)
        self.read.update(read)
        return True

    def check(self) -> None:
        """Compare values, and the gradients of their projections by all leaves."""
        ends = [pair for number, pair in enumerate(self.values) if number not in self.read]
        weights = [self.rng.standard_normal(pair[0].shape) for pair in ends]
        wanted = sum(
            (y * torch.as_tensor(np.asarray(w))).sum() for (_, y), w in zip(ends, weights, strict=True)
        )
        wanted.backward()
        loss: Any = sum(xp.sum(y * w) for (y, _), w in zip(ends, weights, strict=True))
        params = [self.values[number][0] for number in self.leaves]
        loss, slopes = value_and_grad(loss, params)
        feeds = {f"x{number}": array for number, array in self.leaves.items()}
        named = {"loss": loss, **{f"d{number}": g for number, g in zip(self.leaves, slopes, strict=True)}}
        got = values(named, feeds, params)
        np.testing.assert_allclose(got["loss"], wanted.detach().numpy(), rtol=1e-6, atol=1e-9)
        for number in self.leaves:
            slope = self.values[number][1].grad.numpy()
            near = 1e-9 * max(1.0, np.abs(slope).max())
            np.testing.assert_allclose(got[f"d{number}"], slope, rtol=1e-6, atol=near, err_msg=f"v{number}")


def _check(seed: int) -> None:
    expression = Expression(seed)
    try:
        expression.draw()
        expression.check()
    except Exception as error:
        raise AssertionError("\n".join([f"{type(error).__name__}: {error}", *expression.lines])) from error


@pytest.mark.parametrize("start", range(0, EXPRESSIONS, CHUNK))
def test_gradients_of_random_expressions_equal_pytorch(start):
    each(range(start, start + CHUNK), _check, lambda seed: f"seed {seed}")
