"""A transformer of pre-norm blocks in regions, and the plan of its sequence parallel form."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import dask_ferro.tensor as ft
from dask_ferro.graph.ir.regions import region
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.tensor import Tensor, asarray, input

SEQUENCE, WIDTH, HEADS, HIDDEN = 8, 8, 4, 16
NORMS = ("g1", "b1", "g2", "b2")
SHAPES = {
    **dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH)),
    **dict.fromkeys(("bo", "bdown", *NORMS), (WIDTH,)),
    "up": (HIDDEN, WIDTH),
    "bup": (HIDDEN,),
    "down": (WIDTH, HIDDEN),
}

# Norms, dropout and residuals on shards of the sequence; attention and MLP by heads and columns.
REGIONS: dict[str, Any] = {
    "layer*": {"sequence": {"tensor": 1}},
    "layer*/attention": {
        "sequence": "whole",
        "shard": {**{f"{w}*": {"tensor": 1} for w in ("wq", "wk", "wv")}, "wo*": {"tensor": 1}},
    },
    "layer*/mlp": {
        "sequence": "whole",
        "shard": {"up*": {"tensor": 0}, "bup*": {"tensor": 0}, "down*": {"tensor": 1}},
    },
    "loss": {"sequence": {"tensor": 1}},
}
WITHOUT = {
    name: {key: value for key, value in region.items() if key != "sequence"}
    for name, region in REGIONS.items()
}


class Transformer(NamedTuple):
    """Parameters by name, the output, and the loss."""

    params: dict[str, Tensor]
    y: Tensor
    loss: Tensor


def transformer(
    layers: int, dtype: Any = np.float64, *, half: Any = None, sequence: int = SEQUENCE
) -> Transformer:
    """Return a transformer of rows "N" of a sequence; `half` is the dtype that it computes with."""
    rng = np.random.default_rng(0)
    params = {
        f"{name}{i}": asarray((rng.standard_normal(shape) / 2).astype(dtype), name=f"{name}{i}")
        for i in range(layers)
        for name, shape in SHAPES.items()
    }
    given = [input(name, ("N", sequence, WIDTH), dtype) for name in "xt"]
    x, t = given if half is None else [ft.astype(value, half) for value in given]
    used = params if half is None else {name: ft.astype(p, half) for name, p in params.items()}
    for i in range(layers):
        with region(f"layer{i}"):
            x = _block(x, {name: used[f"{name}{i}"] for name in SHAPES}, i)
    with region("loss"):
        return Transformer(params, x, nn.mse_loss(x, t))


def _block(x: Tensor, p: dict[str, Tensor], number: int) -> Tensor:
    length = x.shape[1]

    def heads(a: Tensor) -> Tensor:
        return ft.permute_dims(ft.reshape(a, (-1, length, HEADS, WIDTH // HEADS)), (0, 2, 1, 3))

    with region("norm1"):
        n = nn.layer_norm(x, (WIDTH,), p["g1"], p["b1"])
    with region("attention"):
        a = nn.scaled_dot_product_attention(*(heads(n @ p[w]) for w in ("wq", "wk", "wv")), is_causal=True)
        joined = ft.reshape(ft.permute_dims(a, (0, 2, 1, 3)), (-1, length, WIDTH))
        a = nn.linear(joined, p["wo"], p["bo"])
    x = x + nn.dropout(a, 0.25, seed=1, layer=f"attention {number}")
    with region("norm2"):
        n = nn.layer_norm(x, (WIDTH,), p["g2"], p["b2"])
    with region("mlp"):
        h = nn.linear(nn.gelu(nn.linear(n, p["up"], p["bup"])), p["down"], p["bdown"])
    return x + nn.dropout(h, 0.25, seed=1, layer=f"mlp {number}")


def batch_of(rows: int, dtype: Any = np.float64, seed: int = 3) -> dict[str, np.ndarray]:
    """Return inputs and targets."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((rows, SEQUENCE, WIDTH)).astype(dtype) for name in "xt"}
