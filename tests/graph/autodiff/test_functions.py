"""Functions of tensors that are compositions: their values and gradients against PyTorch's, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.tensor import input
from tests.each import every
from tests.graph.tensor.runs import values

from .against_torch import compare

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(31)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


A, B, CUBE = normal(3, 4), normal(3, 4), normal(2, 3, 4)
# Both axes, both diagonals, and all quadrants; not the origin.
X, Y = np.array([1.0, -1, 0, 0, 2, -2, 2, -2, 1e300]), np.array([0.0, 0, 1, -1, 2, 2, -2, -1, 1e300])

# name -> (our function of tensors, PyTorch's, the arrays)
ROWS: dict[str, tuple[Any, Any, tuple[np.ndarray, ...]]] = {
    "remainder": (xp.remainder, torch.remainder, (A, np.where(B > 0, B + 0.5, B - 0.5))),
    "remainder of multiples": (lambda x: xp.remainder(x, 2.0), lambda x: torch.remainder(x, 2.0),
        (np.array([-4.0, -3.0, 0.0, 2.0, 5.0]),)),
    "floor_divide": (lambda x: x // 0.3 + x, lambda x: (x.detach() // 0.3) + x, (A,)),
    "trunc": (lambda x: xp.trunc(3 * x) * x, lambda x: torch.trunc(3 * x) * x, (A,)),
    "atan2 on axes and diagonals": (xp.atan2, torch.atan2, (Y[:-1], X[:-1])),
    "hypot on axes, diagonals, and far out": (xp.hypot, torch.hypot, (Y, X)),
    "logaddexp of equal and far numbers": (xp.logaddexp, torch.logaddexp,
        (np.array([1.0, 1e3, -1e3]), np.array([1.0, -1e3, 1e3]))),
    "copysign": (lambda x: xp.copysign(x, B), lambda x: torch.copysign(x, torch.tensor(B)), (A,)),
    "log10": (lambda x: xp.log10(x * x), lambda x: torch.log10(x * x), (A,)),
    "cumulative_prod, from 1": (lambda x: xp.cumulative_prod(x, axis=0, include_initial=True),
        lambda x: torch.cat([torch.ones(1, 4, dtype=torch.float64), torch.cumprod(x, 0)]), (A,)),
    "unstack": (lambda x: xp.unstack(x, axis=1)[2], lambda x: torch.unbind(x, 1)[2], (A,)),
    "meshgrid": (lambda x: xp.meshgrid(x, x * x)[1], lambda x: torch.meshgrid(x, x * x, indexing="xy")[1], (A[0],)),
    "broadcast_arrays": (lambda x: xp.broadcast_arrays(x[:1], CUBE)[0],
        lambda x: torch.broadcast_tensors(x[:1], torch.tensor(CUBE))[0], (A,)),
    "variance of a sample": (lambda x: xp.var(x, axis=1, correction=1), lambda x: torch.var(x, 1), (A,)),
    "deviation of a sample": (lambda x: xp.std(x, correction=1), lambda x: torch.std(x), (A,)),
    "concat of all": (lambda x, y: xp.concat([x, y], axis=None), lambda x, y: torch.cat([x.ravel(), y.ravel()]),
        (A, CUBE)),
    "moveaxis": (lambda x: xp.moveaxis(x, (0, 2), (2, 1)), lambda x: torch.moveaxis(x, (0, 2), (2, 1)), (CUBE,)),
}  # fmt: skip


@every("name", ROWS)
def test_a_function_and_its_gradient_equal_pytorch(name):
    compare(*ROWS[name])


def test_the_gradient_of_hypot_at_the_origin_is_0():
    x, y = input("x", (1,), np.float64), input("y", (1,), np.float64)
    slopes = dict(zip("ab", grad(xp.hypot(x, y).sum(), [x, y]), strict=True))
    found = values(slopes, {"x": np.zeros(1), "y": np.zeros(1)}, [x, y])
    assert [float(g[0]) for g in found.values()] == [0.0, 0.0]
