"""Networks that the tests of pipelines are made of, and what they give without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.regions import region
from dask_ferro.graph.tensor import nn, pytree
from dask_ferro.graph.tensor.tensor import Tensor, asarray, input

Arrays = dict[str, np.ndarray]


class Net(NamedTuple):
    """A loss of `x` and `t`, its parameters, and how many features they have."""

    loss: Tensor
    params: Any
    width: int

    def batch(self, rows: int, seed: int = 1) -> Arrays:
        """Inputs of so many rows."""
        rng = np.random.default_rng(seed)
        return {name: rng.standard_normal((rows, self.width)) for name in "xt"}


def _weight(rng: np.random.Generator, *shape: int, name: str | None = None) -> Tensor:
    return asarray(rng.standard_normal(shape) / 2, name=name)


def mlp(layers: int = 9, width: int = 6, seed: int = 0) -> Net:
    """Layers one after the other, each in a region of its own."""
    rng = np.random.default_rng(seed)
    h, t = input("x", ("N", width), np.float64), input("t", ("N", width), np.float64)
    params = []
    for i in range(layers):
        with region(f"layer{i}"):
            layer = {"w": _weight(rng, width, width, name=f"w{i}"), "b": _weight(rng, width, name=f"b{i}")}
            # Not `nn.linear`, whose transposed weight depends on no activation, so that its task may run ahead.
            h = nn.relu(h @ layer["w"] + layer["b"])
        params.append(layer)
    return Net(nn.mse_loss(h, t), params, width)


def tied(layers: int = 8, width: int = 5, seed: int = 3) -> Net:
    """One weight for all layers, and a skip from the first to the last: values and gradients cross several chunks."""
    rng = np.random.default_rng(seed)
    x, t = input("x", ("N", width), np.float64), input("t", ("N", width), np.float64)
    w, scale = _weight(rng, width, width, name="w"), _weight(rng, width, name="scale")
    first = h = nn.sigmoid(x @ w)
    for _ in range(layers):
        h = nn.sigmoid(h @ w)
    return Net(nn.mse_loss((h + first) * scale + x, t), {"w": w, "scale": scale}, width)


def transformer(layers: int = 3, width: int = 8, seed: int = 5) -> Net:
    """Blocks of attention and a feed-forward part, with residuals; rows are the sequence."""
    rng = np.random.default_rng(seed)
    h, t = input("x", ("N", width), np.float64), input("t", ("N", width), np.float64)
    params = []
    for i in range(layers):
        p = {name: _weight(rng, width, width) for name in ("q", "k", "v", "up", "down")}
        p["scale"] = _weight(rng, width)
        with region(f"block{i}"):
            n = nn.layer_norm(h, (width,), p["scale"])
            h = h + nn.scaled_dot_product_attention(n @ p["q"], n @ p["k"], n @ p["v"])
            h = h + nn.gelu(nn.layer_norm(h, (width,), p["scale"]) @ p["up"]) @ p["down"]
        params.append(p)
    return Net(nn.mse_loss(h, t), params, width)


def without_pipeline(
    net: Net,
    arrays: Mapping[str, np.ndarray],
    micro_batches: int,
    prepared: Callable[..., Callable[[Arrays], Arrays]],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Loss and gradients of a whole model, micro-batch after micro-batch on one worker; their mean."""
    grads = pytree.leaves(grad(net.loss, net.params))
    run = prepared({"loss": net.loss, **{f"g{i}": g for i, g in enumerate(grads)}})
    total: Arrays = {}
    rows = len(arrays["x"]) // micro_batches
    for i in range(micro_batches):
        found = run({name: a[i * rows : (i + 1) * rows] for name, a in arrays.items()})
        total = {name: total[name] + value for name, value in found.items()} if total else found
    mean = {name: value / micro_batches for name, value in total.items()}
    return mean["loss"], [mean[f"g{i}"] for i in range(len(grads))]
