"""Pooling: maxima, means and p-norms over windows, or over all spatial axes.

A maximum or a sum over a box is computed axis by axis: a 3x3 pool folds 3 + 3 slices rather than 9.  Padding
never is the maximum and adds nothing to a sum.  A mean divides by the number of counted elements: with
`count_include_pad` they include the requested padding, but never the padding that ceil_mode adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Kernel, Op, index_at, row, widen
from dask_ferro.engines.array.ops.layout import pad_array
from dask_ferro.engines.array.window import (
    WINDOW,
    KernelWindow,
    Placement,
    only_pads,
    place,
    tap,
    taps,
    window_of,
)
from dask_ferro.graph.ir.dtypes import FLOAT, D
from dask_ferro.graph.ir.nodes import attribute_of


def _fold(
    xp: Namespace, combine: Fn, x: Array, window: KernelWindow, placement: Placement, fill: float
) -> Array:
    """Return `combine` folded over every window, one spatial axis after the other."""
    if any(map(any, placement.widths())):
        x = pad_array(xp, x, placement.widths(), fill=fill)
    for axis, (size, count) in enumerate(zip(window.sizes, placement.counts, strict=True)):
        y = x[index_at(2 + axis, tap(window, axis, 0, count))]
        for k in range(1, size):
            y = combine(y, x[index_at(2 + axis, tap(window, axis, k, count))])
        x = y
    return x


def _lowest(xp: Namespace, x: Array) -> float:
    return float("-inf") if xp.isdtype(x.dtype, "real floating") else int(xp.iinfo(x.dtype).min)


def _max_pool(xp: Namespace, op: Op) -> Fn:
    window = window_of(
        op.get("kernel_shape"), **{name: op.get(name, value) for name, value in WINDOW.items()}
    )
    if op.outputs == 1:
        return lambda x: _fold(xp, xp.maximum, x, window, place(window, x.shape[2:]), _lowest(xp, x))
    order: Literal["C", "F"] = "F" if op.get("storage_order", 0) else "C"

    def fn(x: Array) -> tuple[Array, Array]:
        samples, channels, *sizes = x.shape
        placement = place(window, sizes)
        wide = pad_array(xp, x, placement.widths(), fill=_lowest(xp, x))
        # Each element's index in its plane: one array serves all samples and channels.
        plane = np.arange(math.prod(sizes)).reshape(1, 1, *sizes, order=order)
        index = xp.asarray(pad_array(np, plane, placement.widths()))
        best, at = None, None
        for _, slices in taps(window, placement.counts):
            value = wide[(..., *slices)]
            here = xp.broadcast_to(index[(..., *slices)], value.shape)
            if best is None:
                best, at = value, here
            else:
                # Not `>=`: ONNX takes the first of equal elements.
                larger = value > best
                best, at = xp.where(larger, value, best), xp.where(larger, here, at)
        planes = xp.arange(samples * channels, dtype=xp.int64) * math.prod(sizes)
        return best, at + xp.reshape(planes, (samples, channels) + (1,) * len(sizes))

    return fn


def _average_pool(
    xp: Namespace, x: Array, kernel_shape: Sequence[int], count_include_pad: int, **attributes: Any
) -> Array:
    window = window_of(kernel_shape, **attributes)
    placement = place(window, x.shape[2:])
    total = _fold(xp, xp.add, widen(xp, x), window, placement, 0.0)
    # The number of elements that each window averages.
    counted = np.ones((1, 1, *x.shape[2:]), np.int64)
    if count_include_pad:
        counted = np.pad(counted, [(0, 0), (0, 0), *placement.pads], constant_values=1)
        placement = placement._replace(pads=((0, 0),) * len(kernel_shape))
    counts = _fold(np, np.add, counted, window, placement, 0)
    # Without padding all windows have as many, and dividing by a number is faster than by an array.
    even = counts.min() == counts.max()
    mean = total / (int(counts.flat[0]) if even else xp.astype(xp.asarray(counts), total.dtype))
    return xp.astype(mean, x.dtype, copy=False)


def _lp_pool(xp: Namespace, x: Array, kernel_shape: Sequence[int], p: int, **attributes: Any) -> Array:
    window, w = window_of(kernel_shape, **attributes), widen(xp, x)
    powers = w * w if p == 2 else xp.pow(xp.abs(w), p)
    total = _fold(xp, xp.add, powers, window, place(window, x.shape[2:]), 0.0)
    return xp.astype(xp.sqrt(total) if p == 2 else xp.pow(total, 1 / p), x.dtype, copy=False)


def _space(x: Array) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _global_lp(xp: Namespace, x: Array, p: int) -> Array:
    return xp.pow(xp.sum(xp.pow(xp.abs(x), p), axis=_space(x), keepdims=True), 1 / p)


def _fits(node: ir.Node, opset: int) -> bool:
    """Return whether no pad is negative, and ceil_mode and auto_pad are not combined."""
    has_auto_pad = attribute_of(node, "auto_pad", "NOTSET") != "NOTSET"
    return only_pads(node, opset) and not (has_auto_pad and attribute_of(node, "ceil_mode", 0))


def _plain_floor(node: ir.Node, opset: int) -> bool:
    """Return whether a node is `_fits` and without ceil_mode, whose partial windows engines scale differently."""
    return _fits(node, opset) and not attribute_of(node, "ceil_mode", 0)


TABLE: dict[str, Kernel] = {
    "MaxPool": Kernel(_max_pool, (FLOAT | {D.INT8, D.UINT8},), when=_fits),
    "AveragePool": row(_average_pool, FLOAT, when=_fits, kernel_shape=None, count_include_pad=0, **WINDOW),
    "LpPool": row(_lp_pool, FLOAT, when=_plain_floor, kernel_shape=None, p=2, **WINDOW),
    "GlobalAveragePool": row(lambda xp, x: xp.mean(x, axis=_space(x), keepdims=True), FLOAT),
    "GlobalMaxPool": row(lambda xp, x: xp.max(x, axis=_space(x), keepdims=True), FLOAT),
    "GlobalLpPool": row(_global_lp, FLOAT, p=2),
}
