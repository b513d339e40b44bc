"""Gradients of graphs drawn at random, of many shapes that broadcast, against finite differences."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import to_model
from dask_ferro.graph.tensor.tensor import Tensor, argument
from tests.graph.tensor.runs import values

from .gradient_cases import whole
from .test_autodiff import differences


def steps_of(table):
    """Steps of a table, each with the numbers of the two values that it reads."""
    places = st.integers(0, 99)
    return st.lists(st.tuples(st.sampled_from(range(len(table))), places, places), min_size=1, max_size=7)


# Every shape is a part of (2, 3, 3) from the right, with some sizes 1: any two broadcast.
SHAPES = [(), (1,), (3,), (1, 3), (3, 1), (3, 3), (2, 1, 1), (1, 3, 1), (2, 3, 3)]


def _last_two(x: Tensor) -> Tensor:
    """At least a square matrix."""
    return xp.broadcast_to(x, (3, 3)) if x.ndim < 2 or (x.shape[-2:] != (3, 3) and x.ndim == 2) else x


def _product(a: Tensor, b: Tensor) -> Tensor:
    wide = (xp.broadcast_to(t, (2, 3, 3)) if t.ndim == 3 else _last_two(t) for t in (a, b))
    left, right = wide
    return left @ right / 3


STRETCHING = [
    lambda a, b: a + b,
    lambda a, b: a - xp.sin(b),
    lambda a, b: a * xp.tanh(b),
    lambda a, b: a / (1 + b * b),
    lambda a, b: xp.where(a > b, xp.cos(a), b * b),
    lambda a, b: (1.5 + xp.tanh(a)) ** xp.tanh(b),
    lambda a, b: xp.mean(a, axis=-1, keepdims=True) * b if a.ndim else a * b,
    lambda a, b: xp.sum(a, axis=0) / 3 - b if a.ndim else a - b,
    lambda a, b: xp.max(a, axis=0, keepdims=True) + b if a.ndim else a + b,
    lambda a, b: nn.softmax(a, axis=-1) * b if a.ndim else a,
    lambda a, b: xp.std(a, axis=-1, keepdims=True) + b if a.shape[-1:] == (3,) else b,
    lambda a, b: xp.broadcast_to(a, (2, 3, 3)) * b,
    lambda a, b: a.mT + b if a.ndim > 1 else a + b,
    lambda a, b: xp.flip(a, axis=-1) - b if a.ndim else a,
    lambda a, b: xp.take(a, whole(2, 0, 2), axis=-1) * b if a.shape[-1:] == (3,) else b,
    lambda a, b: a[..., 1:2] + b if a.shape[-1:] == (3,) else a,
    lambda a, b: xp.cumulative_sum(a, axis=-1) * b if a.ndim else b,
    lambda a, b: xp.expand_dims(a, axis=0) * b if a.ndim == 1 else a,
    _product,
]


@settings(max_examples=60, deadline=None)
@given(
    steps_of(STRETCHING),
    st.lists(st.sampled_from(SHAPES), min_size=2, max_size=3),
    st.integers(0, 1000),
)
def test_any_graph_of_any_shapes_equals_finite_differences(steps, shapes, seed):
    rng = np.random.default_rng(seed)
    feeds = {f"p{i}": rng.uniform(-1, 1, shape) for i, shape in enumerate(shapes)}
    params = {name: argument(name, x.shape, np.float64) for name, x in feeds.items()}
    made = list(params.values())
    for step, i, j in steps:
        made.append(STRETCHING[step](made[-1 - i % len(made)], made[j % len(made)]))
    y = xp.tanh(made[-1])
    loss = xp.sum(y * rng.standard_normal(y.shape))
    got = values({f"d_{k}": g for k, g in grad(loss, params).items()}, feeds, list(params.values()))
    wanted = differences(to_model(loss, list(params.values())), feeds, lambda out: out["y"])
    for name, slopes in wanted.items():
        assert got[f"d_{name}"].shape == slopes.shape
        np.testing.assert_allclose(got[f"d_{name}"], slopes, rtol=1e-5, atol=1e-6)
