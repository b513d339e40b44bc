"""Gradients of images that are read at other places: Resize, and GridSample.

A Resize is a linear map along each axis, so its gradient is a product with that map's transpose.  The map's matrix is
the same Resize of an identity, so both break a tie of the nearest neighbours alike.  A GridSample is written as reads
of the neighbours of each place, times their weights, and these are differentiated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_ferro.graph.autodiff.known_values import by_size, known_value
from dask_ferro.graph.autodiff.rule import GradientRequest, Row
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import sizes
from dask_ferro.graph.tensor.manipulation import broadcast_like, fold, ints, reshape_like
from dask_ferro.graph.tensor.tensor import Tensor, asarray, cast, emit, widened

# ---- Resize ------------------------------------------------------------------------------------------------


def _resized(call: GradientRequest) -> Tensor:
    coordinates = call.get("coordinate_transformation_mode", "half_pixel")
    if coordinates == "tf_crop_and_resize" or call.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise call.unsupported(f"it keeps an aspect ratio, or has coordinates {coordinates!r}")
    x, scaled, wanted, g = call.x, call.maybe(2), call.maybe(3), widened(call.g)
    axes = [axis % x.ndim for axis in call.get("axes") or range(x.ndim)]
    scales: list[float | None] = [None] * len(axes)
    if scaled is not None and scaled.shape != (0,):
        if (values := known_value(scaled)) is None:
            raise call.unsupported("its scales are computed; make them constants")
        wanted, scales = None, list(map(float, values))
    computed = {} if wanted is None else by_size(wanted)
    for i, (axis, scale) in enumerate(zip(axes, scales, strict=True)):
        n, m = x.shape[axis], call.y.shape[axis]
        # A known or named dimension of one size is not resized, nor one whose size is computed as the input's own.
        is_own = all(found[i] == (n if isinstance(n, int) else size) for size, found in computed.items())
        if scale == 1 or (scale is None and ((n is not None and n == m) or (computed and is_own))):
            continue
        if not isinstance(n, int) or not isinstance(m, int):
            raise call.unsupported(f"sizes of {call.x!r} or {call.y!r} are not known; give them")
        matrix = _matrix(call, n, m, scale, g.dtype)
        g = xp.moveaxis(xp.moveaxis(g, axis, -1) @ matrix.mT, -1, axis)
    return cast(g, call.x.type.dtype)


def _matrix(call: GradientRequest, n: int, m: int, scale: float | None, dtype: np.dtype[Any]) -> Tensor:
    """Return the matrix (n, m) of a resize along one axis: the same node of an identity."""
    identity = xp.reshape(xp.eye(n, dtype=dtype), (1, 1, n, n))
    size: list[Tensor | None] = [asarray([1.0, 1.0, 1.0, scale])] if scale else [None, ints([1, 1, n, m])]
    attributes = {name: value for name, value in call.node.attributes.items() if name != "axes"}
    matrix = emit("Resize", [identity, None, *size], (1, 1, n, m), opset=call.node.opset, **attributes)
    return xp.reshape(matrix, (n, m))


# ---- GridSample --------------------------------------------------------------------------------------------


def grid_sample(call: GradientRequest) -> Tensor:
    """Return a GridSample of images (4-D) as reads of the nearest or the four surrounding pixels."""
    x, grid = call.input(0), widened(call.input(1))
    mode = call.get("mode", "linear").replace("bilinear", "linear")
    height, width = x.shape[-2:]
    if (
        mode not in ("linear", "nearest")
        or x.ndim != 4
        or not (isinstance(height, int) and isinstance(width, int))
    ):
        raise call.unsupported(f"its mode is {mode!r}, it is of volumes, or the size of {x!r} is not known")
    padding = call.get("padding_mode", "zeros")
    corners = bool(call.get("align_corners", 0))
    # The last dimension of a grid is (x, y), from -1 to 1.
    column = _padded(_unnormalized(grid[..., 0], width, corners), width, padding, corners)
    row = _padded(_unnormalized(grid[..., 1], height, corners), height, padding, corners)
    if mode == "nearest":
        return _read(x, xp.round(row), xp.round(column), call.y)
    top, left = xp.floor(row), xp.floor(column)
    down, right = row - top, column - left
    parts = []
    for i, weight_i in ((top, 1 - down), (top + 1, down)):
        for j, weight_j in ((left, 1 - right), (left + 1, right)):
            weight = cast(xp.expand_dims(weight_i * weight_j, axis=1), x.type.dtype)
            parts.append(_read(x, i, j, call.y) * weight)
    return sum(parts[1:], start=parts[0])


def _unnormalized(at: Tensor, size: int, corners: bool) -> Tensor:
    """Return a coordinate from -1 to 1 as a position among `size` pixels."""
    return (at + 1) * ((size - 1) / 2) if corners else (at + 1) * (size / 2) - 0.5


def _padded(at: Tensor, size: int, padding: str, corners: bool) -> Tensor:
    """Return positions moved inside, as `padding` says; those of zeros stay."""
    if padding == "zeros":
        return at
    if padding == "reflection":
        low, span = (0.0, float(size - 1)) if corners else (-0.5, float(size))
        # Back and forth: the distance from the start, modulo twice the span.
        there = xp.remainder(xp.abs(at - low), 2 * span) if span else at * 0.0
        at = xp.where(there > span, 2 * span - there, there) + low
    return xp.clip(at, 0.0, float(size - 1))


def _read(x: Tensor, row: Tensor, column: Tensor, like: Tensor) -> Tensor:
    """Return the pixels at whole positions (batch, rows, columns) of every channel; zeros outside."""
    height, width = sizes(x.shape[-2:])
    inside = (row >= 0) & (row <= height - 1) & (column >= 0) & (column <= width - 1)
    place = xp.where(inside, row * float(width) + column, 0.0)
    channels = xp.astype(xp.expand_dims(place, axis=1), np.int64)
    picks = broadcast_like(channels, like)
    pattern = (0, 0, -1)
    found = reshape_like(xp.take_along_axis(fold(x, pattern), fold(picks, pattern), axis=2), like)
    return xp.where(xp.expand_dims(inside, axis=1), found, 0.0)


TABLE: dict[str, Row] = {"Resize": (_resized, None, None, None)}
