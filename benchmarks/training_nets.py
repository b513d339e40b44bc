"""Networks of `training.py`, each written twice with the same weights: for dask_ferro and for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as f

import dask_ferro.tensor as ft

Loss = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]


class Net(NamedTuple):
    """Initial parameters, the data of some batches, and the loss of both libraries.

    Attributes
    ----------
    params : mapping of str to float32 array
    data : mapping of str to array
        `batches` times `rows` rows.
    rows : int
        Rows of a batch.
    ferro, eager : callable
        `loss(params, batch)`, a scalar.
    """

    params: Mapping[str, np.ndarray]
    data: Mapping[str, np.ndarray]
    rows: int
    ferro: Loss
    eager: Loss

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(value.size for value in self.params.values())


def _normal(rng: np.random.Generator, *shape: int, scale: float) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def mlp(batches: int, rows: int = 336, width: int = 64) -> Net:
    """Return the network of the example: 64 pixels, one hidden layer, 10 classes."""
    rng = np.random.default_rng(0)
    params = {
        "hidden": _normal(rng, 64, width, scale=0.18),
        "hidden_bias": np.zeros(width, np.float32),
        "scores": _normal(rng, width, 10, scale=0.18),
        "scores_bias": np.zeros(10, np.float32),
    }
    data = {"x": rng.random((batches * rows, 64), np.float32), "y": rng.integers(0, 10, batches * rows)}

    def ferro(w: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        hidden = ft.nn.relu(batch["x"] @ w["hidden"] + w["hidden_bias"])
        return ft.nn.cross_entropy(hidden @ w["scores"] + w["scores_bias"], batch["y"])

    def eager(w: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        hidden = torch.relu(batch["x"] @ w["hidden"] + w["hidden_bias"])
        return f.cross_entropy(hidden @ w["scores"] + w["scores_bias"], batch["y"])

    return Net(params, data, rows, ferro, eager)


def convolutions(batches: int, rows: int = 64) -> Net:
    """Return two convolutions with pooling on images of 28 by 28, and a layer of 10 classes."""
    rng = np.random.default_rng(0)
    params = {
        "first": _normal(rng, 16, 1, 3, 3, scale=0.3),
        "second": _normal(rng, 32, 16, 3, 3, scale=0.1),
        "scores": _normal(rng, 32 * 7 * 7, 10, scale=0.02),
    }
    images = rng.random((batches * rows, 1, 28, 28), np.float32)
    data = {"x": images, "y": rng.integers(0, 10, batches * rows)}

    def ferro(w: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        x = ft.nn.max_pool2d(ft.nn.relu(ft.nn.conv2d(batch["x"], w["first"], padding=1)), 2)
        x = ft.nn.max_pool2d(ft.nn.relu(ft.nn.conv2d(x, w["second"], padding=1)), 2)
        return ft.nn.cross_entropy(ft.reshape(x, (-1, 32 * 7 * 7)) @ w["scores"], batch["y"])

    def eager(w: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        x = f.max_pool2d(f.relu(f.conv2d(batch["x"], w["first"], padding=1)), 2)
        x = f.max_pool2d(f.relu(f.conv2d(x, w["second"], padding=1)), 2)
        return f.cross_entropy(x.reshape(-1, 32 * 7 * 7) @ w["scores"], batch["y"])

    return Net(params, data, rows, ferro, eager)


def block(batches: int, rows: int = 4, tokens: int = 64, width: int = 512, heads: int = 8) -> Net:
    """Return a transformer block, with its output's squared distance from another sequence."""
    rng = np.random.default_rng(0)
    scale = width**-0.5
    params = {name: _normal(rng, width, width, scale=scale) for name in ("q", "k", "v", "o")}
    params |= {
        "up": _normal(rng, width, 4 * width, scale=scale),
        "down": _normal(rng, 4 * width, width, scale=0.5 * scale),
    }
    for name in ("first", "second"):
        params |= {name: np.ones(width, np.float32), f"{name}_bias": np.zeros(width, np.float32)}
    shape = (batches * rows, tokens, width)
    data = {name: rng.standard_normal(shape, np.float32) for name in ("x", "y")}
    split, joined = (-1, tokens, heads, width // heads), (-1, tokens, width)

    def ferro(w: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        x = batch["x"]
        h = ft.nn.layer_norm(x, (width,), w["first"], w["first_bias"])
        q, k, v = (ft.permute_dims(ft.reshape(h @ w[name], split), (0, 2, 1, 3)) for name in "qkv")
        a = ft.permute_dims(ft.nn.scaled_dot_product_attention(q, k, v), (0, 2, 1, 3))
        x = x + ft.reshape(a, joined) @ w["o"]
        h = ft.nn.layer_norm(x, (width,), w["second"], w["second_bias"])
        return ft.nn.mse_loss(x + ft.nn.gelu(h @ w["up"]) @ w["down"], batch["y"])

    def eager(w: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        x = batch["x"]
        h = f.layer_norm(x, (width,), w["first"], w["first_bias"])
        q, k, v = ((h @ w[name]).reshape(split).permute(0, 2, 1, 3) for name in "qkv")
        a = f.scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3)
        x = x + a.reshape(joined) @ w["o"]
        h = f.layer_norm(x, (width,), w["second"], w["second_bias"])
        return f.mse_loss(x + f.gelu(h @ w["up"]) @ w["down"], batch["y"])

    return Net(params, data, rows, ferro, eager)


def wide(batches: int, size: int, rows: int = 64) -> Net:
    """Return layers of at most 1024 by 1024, with about `size` parameters in all."""
    rng = np.random.default_rng(0)
    width = min(1024, max(8, round(size**0.5)))
    count = max(1, round(size / width**2))
    params = {f"layer{i}": _normal(rng, width, width, scale=width**-0.5) for i in range(count)}
    data = {name: rng.standard_normal((batches * rows, width), np.float32) for name in ("x", "y")}

    def ferro(w: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        x = batch["x"]
        for i in range(count):
            x = ft.nn.relu(x @ w[f"layer{i}"])
        return ft.nn.mse_loss(x, batch["y"])

    def eager(w: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        x = batch["x"]
        for i in range(count):
            x = torch.relu(x @ w[f"layer{i}"])
        return f.mse_loss(x, batch["y"])

    return Net(params, data, rows, ferro, eager)


class Torch:
    """A training of a network in eager PyTorch on one thread, with SGD.

    Parameters
    ----------
    net : Net
    rate : float
    rank, ranks : int
        With several ranks, the part of each batch that this process has.
    """

    def __init__(self, net: Net, rate: float, rank: int = 0, ranks: int = 1) -> None:
        torch.set_num_threads(1)
        module = torch.nn.Module()
        names = list(net.params)
        module.values = torch.nn.ParameterList([torch.tensor(net.params[name]) for name in names])
        module.forward = lambda batch: net.eager(dict(zip(names, module.values, strict=True)), batch)
        self.model: Any = torch.nn.parallel.DistributedDataParallel(module) if ranks > 1 else module
        self._optimizer = torch.optim.SGD(self.model.parameters(), rate)
        self._data = {name: torch.tensor(value) for name, value in net.data.items()}
        self._rows, self._rank, self._ranks = net.rows, rank, ranks
        self._batches = len(next(iter(net.data.values()))) // net.rows
        self._done = 0

    def steps(self, count: int) -> list[float]:
        """Return the losses of the next batches, in the order of the data and from its start again."""
        found = []
        each = self._rows // self._ranks
        for i in range(self._done, self._done + count):
            start = i % self._batches * self._rows + self._rank * each
            batch = {name: value[start : start + each] for name, value in self._data.items()}
            self._optimizer.zero_grad()
            loss = self.model(batch)
            loss.backward()
            self._optimizer.step()
            found.append(loss.item())
        self._done += count
        return found
