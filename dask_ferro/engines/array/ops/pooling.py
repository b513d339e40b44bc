"""Pooling: maxima, means and p-norms over windows, or over all spatial axes.

A maximum or a sum over a box is computed axis by axis: a 3x3 pool folds 3 + 3 slices rather than 9.  Padding
never is the maximum and adds nothing to a sum.  A mean divides by the number of counted elements: with
`count_include_pad` they include the requested padding, but never the padding that ceil_mode adds.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Kernel, Op, along, axis_shape, listed, widened
from dask_ferro.engines.array.ops.layout import padded
from dask_ferro.engines.array.window import KernelWindow, Placement, only_pads, place, tap, taps, window_of
from dask_ferro.graph.ir.dtypes import FLOAT, D
from dask_ferro.graph.ir.nodes import attribute_of


def _fold(
    xp: Namespace, combine: Fn, x: Array, window: KernelWindow, placement: Placement, fill: float
) -> Array:
    """Return `combine` folded over every window, one spatial axis after the other."""
    if any(map(any, placement.widths())):
        x = padded(xp, x, placement.widths(), fill=fill)
    for axis, (size, count) in enumerate(zip(window.sizes, placement.counts, strict=True)):
        y = x[along(2 + axis, tap(window, axis, 0, count))]
        for k in range(1, size):
            y = combine(y, x[along(2 + axis, tap(window, axis, k, count))])
        x = y
    return x


def _lowest(xp: Namespace, x: Array) -> float:
    return float("-inf") if xp.isdtype(x.dtype, "real floating") else int(xp.iinfo(x.dtype).min)


def _max_pool(xp: Namespace, op: Op) -> Fn:
    window = window_of(op, op.get("kernel_shape"))
    if op.outputs == 2:
        return _max_pool_with_indices(xp, op, window)

    def fn(x: Array) -> Array:
        return _fold(xp, xp.maximum, x, window, place(window, x.shape[2:]), _lowest(xp, x))

    return fn


def _max_pool_with_indices(xp: Namespace, op: Op, window: KernelWindow) -> Fn:
    column_major = bool(op.get("storage_order", 0))

    def fn(x: Array) -> tuple[Array, Array]:
        samples, channels, *sizes = x.shape
        placement = place(window, sizes)
        wide = padded(xp, x, placement.widths(), fill=_lowest(xp, x))
        rank = len(sizes)
        steps = [math.prod(sizes[:i] if column_major else sizes[i + 1 :]) for i in range(rank)]
        best, at = None, None
        for offsets, slices in taps(window, placement.counts):
            # The element's index in its plane, for every position: one array serves all samples and channels.
            index = np.zeros((1,) * rank, np.int64)
            for axis, (k, n, (pad, _)) in enumerate(
                zip(offsets, placement.counts, placement.pads, strict=True)
            ):
                place_on_axis = np.arange(n) * window.strides[axis] + k * window.dilations[axis] - pad
                index = index + steps[axis] * place_on_axis.reshape(axis_shape(axis, rank))
            value = wide[(..., *slices)]
            here = xp.broadcast_to(xp.asarray(index), value.shape)
            if best is None:
                best, at = value, here
            else:
                # Not `>=`: ONNX takes the first of equal elements.
                larger = value > best
                best, at = xp.where(larger, value, best), xp.where(larger, here, at)
        planes = xp.arange(samples * channels, dtype=xp.int64) * math.prod(sizes)
        return best, at + xp.reshape(planes, (samples, channels) + (1,) * rank)

    return listed(op, fn)


def _average_pool(xp: Namespace, op: Op) -> Fn:
    window = window_of(op, op.get("kernel_shape"))
    with_padding, wide = bool(op.get("count_include_pad", 0)), widened(xp)

    def fn(x: Array) -> Array:
        placement = place(window, x.shape[2:])
        total = _fold(xp, xp.add, wide(x), window, placement, 0.0)
        counts = _counts(window, placement, x.shape[2:], with_padding)
        # Without padding every window has the same number of elements, and dividing by a number is faster than by
        # an array.
        even = counts.min() == counts.max()
        mean = total / (int(counts.flat[0]) if even else xp.astype(xp.asarray(counts), total.dtype))
        return xp.astype(mean, x.dtype, copy=False)

    return fn


def _counts(
    window: KernelWindow, placement: Placement, sizes: tuple[int, ...], with_padding: bool
) -> np.ndarray:
    """Return the number of elements that each window averages."""
    counts = np.ones((1,) * len(sizes), np.int64)
    for axis, (n, size, (before, after)) in enumerate(
        zip(placement.counts, sizes, placement.pads, strict=True)
    ):
        first = np.arange(n)[:, None] * window.strides[axis] - before
        element = first + np.arange(window.sizes[axis]) * window.dilations[axis]
        low, high = (-before, size + after) if with_padding else (0, size)
        inside = ((element >= low) & (element < high)).sum(axis=1)
        counts = counts * inside.reshape(axis_shape(axis, len(sizes)))
    return counts


def _lp_pool(xp: Namespace, op: Op) -> Fn:
    window, p, wide = window_of(op, op.get("kernel_shape")), op.get("p", 2), widened(xp)

    def fn(x: Array) -> Array:
        w = wide(x)
        powers = w * w if p == 2 else xp.pow(xp.abs(w), p)
        total = _fold(xp, xp.add, powers, window, place(window, x.shape[2:]), 0.0)
        return xp.astype(xp.sqrt(total) if p == 2 else xp.pow(total, 1 / p), x.dtype, copy=False)

    return fn


def _space(x: Array) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _global_lp(xp: Namespace, op: Op) -> Fn:
    p = op.get("p", 2)
    return lambda x: xp.pow(xp.sum(xp.pow(xp.abs(x), p), axis=_space(x), keepdims=True), 1 / p)


def _plain(node: ir.Node, opset: int) -> bool:
    """Return whether no pad is negative, and ceil_mode and auto_pad are not combined."""
    has_auto_pad = attribute_of(node, "auto_pad", "NOTSET") != "NOTSET"
    return only_pads(node, opset) and not (has_auto_pad and attribute_of(node, "ceil_mode", 0))


def _plain_floor(node: ir.Node, opset: int) -> bool:
    """Return whether a node is `_plain` and without ceil_mode, whose partial windows engines scale differently."""
    return _plain(node, opset) and not attribute_of(node, "ceil_mode", 0)


TABLE: dict[str, Kernel] = {
    "MaxPool": Kernel(_max_pool, (FLOAT | {D.INT8, D.UINT8},), when=_plain),
    "AveragePool": Kernel(_average_pool, (FLOAT,), when=_plain),
    "LpPool": Kernel(_lp_pool, (FLOAT,), when=_plain_floor),
    "GlobalAveragePool": Kernel(lambda xp, op: lambda x: xp.mean(x, axis=_space(x), keepdims=True), (FLOAT,)),
    "GlobalMaxPool": Kernel(lambda xp, op: lambda x: xp.max(x, axis=_space(x), keepdims=True), (FLOAT,)),
    "GlobalLpPool": Kernel(_global_lp, (FLOAT,)),
}
