"""Reductions and cumulative sums of tensors, under the array-API standard's names.

Integers narrower than 64 bits are summed in 64, as the standard asks.  An empty tuple of axes reduces nothing.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import SIGNED, UNSIGNED
from dask_ferro.graph.tensor.dims import Shape, axes_of, axis_of, is_static, sizes
from dask_ferro.graph.tensor.dtypes import DTypeLike, dtype_of
from dask_ferro.graph.tensor.elementwise import maximum, where
from dask_ferro.graph.tensor.manipulation import concat, expand_dims, full_like, ints, reshape, shape_of
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, cast, emit, floating, numbers, widened

Axis = int | Sequence[int] | None

# Reductions whose result is one of the elements.
_EXACT = frozenset({"ReduceMax", "ReduceMin"})


def reduced_shape(shape: Shape, axes: Sequence[int], keepdims: bool) -> Shape:
    """Return the shape after a reduction over `axes`."""
    kept = [1 if i in axes else dim for i, dim in enumerate(shape)]
    return tuple(dim for i, dim in enumerate(kept) if keepdims or i not in axes)


def reduce(op_type: str, x: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    """Return the output of a node that reduces over `axis`; `x` itself if no axis is given.

    Half precision is accumulated in float32 and rounded once: in bfloat16, 256 + 1 is 256.
    """
    axes = axes_of(axis, x.ndim, op_type)
    if not axes:
        return x
    wide = x if op_type in _EXACT else widened(x)
    shape = reduced_shape(x.shape, axes, keepdims)
    found = emit(op_type, [wide, ints(axes)], shape, keepdims=int(keepdims))
    return cast(found, x.type.dtype)


def _summable(x: TensorLike, where: str, dtype: DTypeLike = None) -> Tensor:
    """Return numbers in the dtype to sum them in; by default integers of 64 bits, and floats as they are."""
    if dtype is not None:
        return numbers(cast(asarray(x), dtype_of(dtype)), where)
    tensor = numbers(x, where)
    if tensor.type.dtype in SIGNED:
        return cast(tensor, ir.DataType.INT64)
    return cast(tensor, ir.DataType.UINT64) if tensor.type.dtype in UNSIGNED else tensor


@example("sum([[1, 2], [3, 4]], axis=1).compute()", "array([3, 7])")
def sum(x: TensorLike, /, *, axis: Axis = None, dtype: DTypeLike = None, keepdims: bool = False) -> Tensor:
    """Return the sum over `axis` (an axis, several, or None for all), computed in `dtype`."""
    return reduce("ReduceSum", _summable(x, "sum", dtype), axis, keepdims)


@example("prod([2, 3, 4]).compute()", "array(24)")
def prod(x: TensorLike, /, *, axis: Axis = None, dtype: DTypeLike = None, keepdims: bool = False) -> Tensor:
    """Return the product over `axis` (an axis, several, or None for all), computed in `dtype`."""
    return reduce("ReduceProd", _summable(x, "prod", dtype), axis, keepdims)


@example("mean([[1.0, 2.0], [3.0, 4.0]], axis=0).compute()", "array([2., 3.], dtype=float32)")
def mean(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean of floating point numbers over `axis`: an axis, several, or None for all."""
    return reduce("ReduceMean", floating(x, "mean"), axis, keepdims)


@example("max([[1, 2], [3, 4]], axis=0).compute()", "array([3, 4])")
def max(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the largest element over `axis`: an axis, several, or None for all."""
    return reduce("ReduceMax", asarray(x), axis, keepdims)


@example("min([[1, 2], [3, 4]], axis=0).compute()", "array([1, 2])")
def min(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the smallest element over `axis`: an axis, several, or None for all."""
    return reduce("ReduceMin", asarray(x), axis, keepdims)


@example("var([1.0, 3.0]).compute()", "array(1., dtype=float32)")
def var(x: TensorLike, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """Return the variance over `axis`: the sum of the squared distances from the mean over (count - correction).

    A correction of 1 gives the unbiased variance of a sample.
    """
    tensor = asarray(x)
    return cast(_wide_var(tensor, axis, correction, keepdims), tensor.type.dtype)


@example("std([1.0, 3.0]).compute().round(3)", "np.float32(1.0)")
def std(x: TensorLike, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """Return the standard deviation over `axis`, the square root of `var`; its gradient is 0 if all are equal."""
    tensor = asarray(x)
    return cast(root(_wide_var(tensor, axis, correction, keepdims)), tensor.type.dtype)


def _wide_var(x: Tensor, axis: Axis, correction: float, keepdims: bool) -> Tensor:
    """Return the variance, in float32 if `x` has half precision: float16 overflows at 256 squared."""
    wide = widened(x)
    # Two passes: the mean of squares minus the square of the mean cancels for large means.
    centred = wide - mean(wide, axis=axis, keepdims=True)
    found = mean(centred * centred, axis=axis, keepdims=keepdims)
    if not correction:
        return found
    total = count_over(wide, axes_of(axis, wide.ndim, "var"), wide.type.dtype)
    # No degrees of freedom give 0 / 0, which is NaN, or x / 0, which is inf, as in numpy.
    return found * total / maximum(total - correction, 0.0)


def count_over(x: Tensor, axes: Sequence[int], dtype: ir.DataType) -> Tensor:
    """Return the number of elements that a reduction over `axes` combines, as a scalar."""
    dims = [x.shape[axis] for axis in axes]
    if is_static(dims):
        return asarray(np.asarray(math.prod(sizes(dims)), dtype.numpy()))
    # Products of scalars, since ONNX Runtime's ReduceProd of int64 is not used: the graph would be several runs.
    shape = shape_of(x)
    counts = [emit("Gather", [shape, asarray(np.int64(axis))], (), axis=0) for axis in axes]
    return cast(functools.reduce(operator.mul, counts), dtype)


def root(x: Tensor, degree: int = 2) -> Tensor:
    """Return the root of non-negative numbers with gradient 0 at 0, as a norm has it; a root's own is infinite."""
    if degree == 1:
        return x
    zero = x == 0
    # The root gets no 0: where() alone would still multiply an infinite gradient by 0, which is NaN.
    above = where(zero, 1.0, x)
    found = emit("Sqrt", [above], x.shape) if degree == 2 else above ** (1 / degree)
    return where(zero, 0.0, found)


@example("argmax([[1, 7, 3], [9, 2, 4]], axis=1).compute()", "array([1, 0])")
def argmax(x: TensorLike, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the int64 index of the first largest element along an axis, or among all elements."""
    return _arg("ArgMax", asarray(x), axis, keepdims)


@example("argmin([[1, 7, 3], [9, 2, 4]], axis=1).compute()", "array([0, 1])")
def argmin(x: TensorLike, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the int64 index of the first smallest element along an axis, or among all elements."""
    return _arg("ArgMin", asarray(x), axis, keepdims)


def _arg(op_type: str, x: Tensor, axis: int | None, keepdims: bool) -> Tensor:
    if axis is None:
        found = _arg(op_type, reshape(x, (-1,)), 0, keepdims)
        return reshape(found, (1,) * x.ndim) if keepdims else found
    at = axis_of(axis, x.ndim, op_type)
    shape = reduced_shape(x.shape, [at], keepdims)
    return emit(op_type, [x], shape, ir.DataType.INT64, axis=at, keepdims=int(keepdims))


@example("cumulative_sum([1, 2, 3]).compute()", "array([1, 3, 6])")
def cumulative_sum(
    x: TensorLike, /, *, axis: int | None = None, dtype: DTypeLike = None, include_initial: bool = False
) -> Tensor:
    """Return the cumulative sums along an axis, which may be left out for a vector; computed in `dtype`.

    With `include_initial` the sum of nothing, 0, comes first, and the axis is longer by one.
    """
    return _cumulated("CumSum", _summable(x, "cumulative_sum", dtype), axis, include_initial)


@example("cumulative_prod([1, 2, 3]).compute()", "array([1, 2, 6])")
def cumulative_prod(
    x: TensorLike, /, *, axis: int | None = None, dtype: DTypeLike = None, include_initial: bool = False
) -> Tensor:
    """Return the cumulative products along an axis, which may be left out for a vector; computed in `dtype`.

    With `include_initial` the product of nothing, 1, comes first, and the axis is longer by one.
    """
    return _cumulated("CumProd", _summable(x, "cumulative_prod", dtype), axis, include_initial)


# The identity of each cumulative op, and the operator set that has it first.
_CUMULATIVE: dict[str, tuple[int, dict[str, Any]]] = {"CumSum": (0, {}), "CumProd": (1, {"opset": 26})}


def _cumulated(op_type: str, x: Tensor, axis: int | None, include_initial: bool) -> Tensor:
    if axis is None and x.ndim != 1:
        raise ConfigError(f"{op_type}: {x!r} has {x.ndim} dimensions; name an axis")
    at = axis_of(axis or 0, x.ndim, op_type)
    initial, since = _CUMULATIVE[op_type]
    place = asarray(np.int64(at))
    found = cast(emit(op_type, [widened(x), place], x.shape, **since), x.type.dtype)
    if not include_initial:
        return found
    # A sum over the axis has the size of the first slice, also where no element is there.
    first = expand_dims(reduce("ReduceSum", x, at, keepdims=False), axis=at)
    return concat([full_like(first, initial), found], axis=at)


__all__ = [
    "argmax", "argmin", "cumulative_prod", "cumulative_sum", "max", "mean", "min", "prod", "std", "sum", "var",
]  # fmt: skip
