"""Gradients of ReLU, pooling and convolutions against PyTorch's, by the sessions and by the array kernels.

The arrays are as large as those whose gradients a session computes by other nodes (`faster_nodes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from dask_ferro.engines.onnxruntime.session import DEFAULTS
from dask_ferro.engines.onnxruntime.session_model import session_of
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.model.embedding import content
from dask_ferro.graph.model.load import load
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.tensor import Tensor, input
from tests.graph.tensor.runs import computed

torch = pytest.importorskip("torch")

INF, NAN = np.inf, np.nan
Arrays = Mapping[str, np.ndarray]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def by_session(outputs: Mapping[str, Tensor], feeds: Arrays) -> dict[str, np.ndarray]:
    model = load(content(build(outputs).model), outputs=None).model
    nodes = list(model.graph)
    names, wanted = [str(v.name) for v in model.graph.inputs], [str(v.name) for v in model.graph.outputs]
    run = session_of(model, nodes, names, wanted, model.opset_imports[""], DEFAULTS)
    return dict(zip(wanted, run(*(feeds[name] for name in names)), strict=True))


def by_array_kernels(outputs: Mapping[str, Tensor], feeds: Arrays) -> dict[str, np.ndarray]:
    return computed(build(outputs).model, feeds)


ENGINES = {"session": by_session, "array kernels": by_array_kernels}
ENGINE = pytest.mark.parametrize("engine", ENGINES)

# ---- ReLU: what is 0, infinite or NaN --------------------------------------------------------------------

X = np.tile([1.0, -1.0, 0.0, -0.0, NAN, INF, -INF, 2.0], (64, 8))
INCOMING = {"1": 1.0, "a negative number": -2.0, "infinity": INF, "NaN": NAN}


@ENGINE
@pytest.mark.parametrize("g", INCOMING)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_relu_passes_or_stops_a_gradient_as_pytorch_does(engine, g, dtype):
    x, incoming = X.astype(dtype), np.full(X.shape, INCOMING[g], dtype)
    t, s = input("x", x.shape, dtype), input("g", x.shape, dtype)
    found = ENGINES[engine]({"d": grad((nn.relu(t) * s).sum(), t)}, {"x": x, "g": incoming})["d"]
    theirs = torch.tensor(x, requires_grad=True)
    torch.relu(theirs).backward(torch.tensor(incoming))
    np.testing.assert_array_equal(found, theirs.grad.numpy(), strict=True)


def test_relu_of_halves_passes_or_stops_a_gradient_too():
    x, incoming = X.astype(np.float16), normal(*X.shape).astype(np.float16)
    t, s = input("x", x.shape, np.float16), input("g", x.shape, np.float16)
    found = by_array_kernels({"d": grad((nn.relu(t) * s).sum(), t)}, {"x": x, "g": incoming})["d"]
    np.testing.assert_array_equal(found, np.where(x <= 0, 0, incoming), strict=True)


# ---- pooling and convolutions ----------------------------------------------------------------------------

Ours = Callable[..., Tensor]
# id -> ours, PyTorch's, arrays.
LAYERS: dict[str, tuple[Ours, Any, tuple[np.ndarray, ...]]] = {
    "pool with ties": (
        lambda x: nn.max_pool2d(nn.relu(x), 2),
        lambda f, x: f.max_pool2d(f.relu(x), 2),
        (np.round(normal(4, 3, 16, 12)),),
    ),
    "pool that leaves a rest": (
        lambda x: nn.max_pool2d(x, 2),
        lambda f, x: f.max_pool2d(x, 2),
        (normal(4, 3, 17, 13),),
    ),
    "pool of rectangles": (
        lambda x: nn.max_pool2d(x, (3, 1)),
        lambda f, x: f.max_pool2d(x, (3, 1)),
        (normal(4, 3, 15, 12),),
    ),
    "pool whose windows overlap": (
        lambda x: nn.max_pool2d(x, 3, stride=2, padding=1),
        lambda f, x: f.max_pool2d(x, 3, 2, 1),
        (normal(4, 3, 15, 12),),
    ),
    "convolution": (
        lambda x, w: nn.conv2d(x, w, padding=1),
        lambda f, x, w: f.conv2d(x, w, padding=1),
        (normal(4, 3, 12, 10), normal(5, 3, 3, 3)),
    ),
    "convolution with strides": (
        lambda x, w: nn.conv2d(x, w, stride=2, padding=1),
        lambda f, x, w: f.conv2d(x, w, stride=2, padding=1),
        (normal(4, 3, 12, 10), normal(5, 3, 3, 3)),
    ),
    "convolution with holes": (
        lambda x, w: nn.conv2d(x, w, dilation=2),
        lambda f, x, w: f.conv2d(x, w, dilation=2),
        (normal(4, 3, 12, 10), normal(5, 3, 3, 3)),
    ),
    "convolution in groups": (
        lambda x, w: nn.conv2d(x, w, groups=2),
        lambda f, x, w: f.conv2d(x, w, groups=2),
        (normal(4, 4, 12, 10), normal(6, 2, 3, 3)),
    ),
    "a network": (
        lambda x, w, v: nn.max_pool2d(nn.relu(nn.conv2d(nn.relu(nn.conv2d(x, w, padding=1)), v)), 2),
        lambda f, x, w, v: f.max_pool2d(f.relu(f.conv2d(f.relu(f.conv2d(x, w, padding=1)), v)), 2),
        (normal(4, 3, 12, 10), normal(8, 3, 3, 3), normal(4, 8, 3, 3)),
    ),
}
LAYER = pytest.mark.parametrize("name", LAYERS)


def arguments(arrays: tuple[np.ndarray, ...], batch: str | int) -> tuple[dict[str, Tensor], Arrays]:
    """Return an argument for each array, with the batch of the first."""
    feeds = {f"a{i}": array.astype(np.float32) for i, array in enumerate(arrays)}
    shapes = {name: array.shape for name, array in feeds.items()} | {"a0": (batch, *arrays[0].shape[1:])}
    return {name: input(name, shape, np.float32) for name, shape in shapes.items()}, feeds


@ENGINE
@LAYER
def test_gradients_of_a_layer_are_pytorchs(engine, name):
    ours, theirs, arrays = LAYERS[name]
    given, feeds = arguments(arrays, "batch")
    slopes = grad((ours(*given.values()) ** 2).sum(), given)
    found = ENGINES[engine]({f"d {label}": slope for label, slope in slopes.items()}, feeds)
    leaves = [torch.tensor(array, requires_grad=True) for array in feeds.values()]
    (theirs(torch.nn.functional, *leaves) ** 2).sum().backward()
    for label, leaf in zip(given, leaves, strict=True):
        near = 2e-5 * float(leaf.grad.abs().max())
        np.testing.assert_allclose(
            found[f"d {label}"], leaf.grad.numpy(), rtol=2e-4, atol=near, err_msg=label
        )
