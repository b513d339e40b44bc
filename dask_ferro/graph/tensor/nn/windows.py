"""The geometry of windows that slide over (batch, channels, ...): sizes of results, and attributes of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_ferro.errors import ConfigError, is_count
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor.dims import window_size
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, floating

# One number for all spatial dimensions, or one for each.
Sizes = int | Sequence[int]

# The spatial dimensions by their number, in the order of the tensor.
_SPACE = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


def counts(value: Sizes, name: str, rank: int, where: str, least: int = 1) -> tuple[int, ...]:
    """Return one number for each spatial dimension, each checked to be at least `least`."""
    given = tuple(value) if isinstance(value, Sequence) else (value,) * rank
    if len(given) != rank or not all(is_count(n, least) for n in given):
        several = " and ".join(f"one for {dim}" for dim in _SPACE[rank])
        wanted = f"wanted a whole number from {least} on, or {several}"
        raise ConfigError(f"{where}: {name}: got {value!r}, {wanted}")
    return given


def spatial(x: TensorLike, rank: int, where: str) -> Tensor:
    """Return floating point numbers of (batch, channels, ...), with `rank` spatial dimensions."""
    tensor = floating(x, where)
    if tensor.ndim != rank + 2:
        raise ConfigError(f"{where}: takes (batch, channels, {', '.join(_SPACE[rank])}), got {tensor!r}")
    return tensor


def weight_form(rank: int) -> str:
    """Return the dimensions of a convolution's weight as text."""
    return f"(out, in / groups, {', '.join(_SPACE[rank])})"


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sizes, padding: Sizes, dilation: Sizes, where: str
) -> tuple[tuple[Dim, ...], dict[str, Any]]:
    """Return the spatial dimensions of the result, and the attributes of the node."""
    rank = len(kernel)
    strides, spans = counts(stride, "stride", rank, where), counts(dilation, "dilation", rank, where)
    pads = counts(padding, "padding", rank, where, 0)
    shape = tuple(
        window_size(x.shape[2 + i], kernel[i], strides[i], (pads[i], pads[i]), spans[i], where)
        for i in range(rank)
    )
    return shape, {"strides": list(strides), "pads": [*pads, *pads], "dilations": list(spans)}
