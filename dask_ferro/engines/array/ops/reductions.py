"""Reductions, ArgMax and ArgMin, cumulative sums and products.

The axes are an attribute in old opsets and an input in new ones (from 13 for ReduceSum, from 18 for the others).
A result keeps its input's dtype.  No axes means all axes, or with `noop_with_empty_axes` none (only the elementwise
part).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Kernel, Op, from_front, index_at, row, row_of
from dask_ferro.graph.ir.dtypes import BOOL, FLOAT, NUMERIC, WIDE

Axes = tuple[int, ...] | None  # None: all axes
Reduce = Callable[[Namespace, Array, Axes, bool], Array]  # (xp, x, axes, keepdims)


def _sum(xp: Namespace, x: Array, axes: Axes, keepdims: bool) -> Array:
    # The dtype is the input's: the array API would sum small integers in the default integer, but ONNX wraps.
    return xp.sum(x, axis=axes, dtype=x.dtype, keepdims=keepdims)


def _mean(xp: Namespace, x: Array, axes: Axes, keepdims: bool) -> Array:
    # The mean of no elements is NaN; numpy would also warn.
    if 0 in x.shape:
        return _sum(xp, x, axes, keepdims) * float("nan")
    return xp.mean(x, axis=axes, keepdims=keepdims)


def _extreme(largest: bool) -> Reduce:
    def fn(xp: Namespace, x: Array, axes: Axes, keepdims: bool) -> Array:
        if x.dtype == xp.bool:
            return (xp.any if largest else xp.all)(x, axis=axes, keepdims=keepdims)
        if 0 not in x.shape:
            return (xp.max if largest else xp.min)(x, axis=axes, keepdims=keepdims)
        # For no elements ONNX returns the smallest (or largest) value, but the namespaces raise.
        if xp.isdtype(x.dtype, "integral"):
            limits = xp.iinfo(x.dtype)
            worst: float = limits.min if largest else limits.max
        else:
            worst = float("-inf") if largest else float("inf")
        shape = xp.any(xp.zeros_like(x, dtype=xp.bool), axis=axes, keepdims=keepdims).shape
        return xp.full(shape, worst, dtype=x.dtype)

    return fn


def _log_sum_exp(xp: Namespace, x: Array, axes: Axes, keepdims: bool) -> Array:
    top = _extreme(largest=True)(xp, x, axes, True)
    # A row with an infinite maximum is not shifted: inf - inf would be NaN.
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
    total = xp.log(_sum(xp, xp.exp(x - top), axes, True)) + top
    return total if keepdims else xp.reshape(total, _sum(xp, xp.zeros_like(x), axes, False).shape)


def _over_axes(reduce: Reduce, xp: Namespace, op: Op, values: Axes) -> Fn:
    keepdims = bool(op.get("keepdims", 1))
    nothing: Axes = () if op.get("noop_with_empty_axes", 0) else None
    axes = tuple(values) if values else nothing
    return lambda x, *_: reduce(xp, x, axes, keepdims)


def _arg(largest: bool) -> Kernel:
    def fn(xp: Namespace, x: Array, axis: int, keepdims: int, select_last_index: int) -> Array:
        find = xp.argmax if largest else xp.argmin
        # numpy reads -2^31 as all axes.
        at = from_front(axis, x.ndim)
        if not select_last_index:
            return xp.astype(find(x, axis=at, keepdims=bool(keepdims)), xp.int64, copy=False)
        # The namespaces find the first of equal elements: the last one is the first from the end.
        from_end = find(xp.flip(x, axis=at), axis=at, keepdims=bool(keepdims))
        return xp.astype(x.shape[at] - 1 - from_end, xp.int64, copy=False)

    return row(fn, NUMERIC, axis=0, keepdims=1, select_last_index=0)


def _cumulative(name: str, xp: Namespace, op: Op, axes: tuple[int, ...]) -> Fn:
    accumulate, (axis,) = getattr(xp, name), axes
    exclusive, reverse = bool(op.get("exclusive", 0)), bool(op.get("reverse", 0))

    def fn(x: Array, *_: Array) -> Array:
        at = from_front(axis, x.ndim)
        x = xp.flip(x, axis=at) if reverse else x
        y = accumulate(x, axis=at, dtype=x.dtype, include_initial=exclusive)
        # `include_initial` puts the initial value first; the last sum is dropped.
        if exclusive:
            y = y[index_at(at, slice(0, x.shape[at]))]
        return xp.flip(y, axis=at) if reverse else y

    return fn


def _row(reduce: Reduce, *dtypes: frozenset[ir.DataType], since: int = 18) -> Kernel:
    return row_of(partial(_over_axes, reduce), *dtypes, WIDE, since=since, attributes=("axes",))


TABLE: dict[str, Kernel] = {
    "ReduceSum": _row(_sum, NUMERIC, since=13),
    "ReduceProd": _row(
        lambda xp, x, axes, keepdims: xp.prod(x, axis=axes, dtype=x.dtype, keepdims=keepdims), NUMERIC
    ),
    "ReduceMean": _row(_mean, FLOAT),
    "ReduceMax": _row(_extreme(largest=True), NUMERIC | BOOL),
    "ReduceMin": _row(_extreme(largest=False), NUMERIC | BOOL),
    "ReduceL1": _row(lambda xp, x, axes, keepdims: _sum(xp, xp.abs(x), axes, keepdims), NUMERIC),
    "ReduceL2": _row(lambda xp, x, axes, keepdims: xp.sqrt(_sum(xp, x * x, axes, keepdims)), FLOAT),
    "ReduceSumSquare": _row(lambda xp, x, axes, keepdims: _sum(xp, x * x, axes, keepdims), NUMERIC),
    "ReduceLogSum": _row(lambda xp, x, axes, keepdims: xp.log(_sum(xp, x, axes, keepdims)), FLOAT),
    "ReduceLogSumExp": _row(_log_sum_exp, FLOAT),
    "ArgMax": _arg(largest=True),
    "ArgMin": _arg(largest=False),
    "CumSum": row_of(partial(_cumulative, "cumulative_sum"), NUMERIC),
    "CumProd": row_of(partial(_cumulative, "cumulative_prod"), NUMERIC),
}
