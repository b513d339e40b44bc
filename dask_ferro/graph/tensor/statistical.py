"""Reductions, cumulative sums, counting, sorting and searching, with the array-API standard's names.

Integers narrower than 64 bits are summed in 64, as the standard asks.  An empty tuple of axes reduces nothing.
Functions whose result has a size that depends on values (`nonzero`, `unique_values`) are left out: shapes are known
before a graph runs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.dtypes import SIGNED_INTS, UNSIGNED_INTS
from dask_ferro.graph.tensor import manipulation as xp
from dask_ferro.graph.tensor.dims import Shape, axes_of, axis_of, sizes
from dask_ferro.graph.tensor.dtypes import DTypeLike, dtype_of
from dask_ferro.graph.tensor.elementwise import logical_not, maximum, where
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import (
    OPSET,
    Tensor,
    TensorLike,
    TensorType,
    asarray,
    cast,
    emit,
    emit_all,
    floating,
    numbers,
    promote,
    widen,
)  # fmt: skip

Axis = int | Sequence[int] | None
_BOOL, _INT64 = ir.DataType.BOOL, ir.DataType.INT64


def reduce_shape(shape: Shape, axes: Sequence[int], keepdims: bool) -> Shape:
    ones = [1 if i in axes else dim for i, dim in enumerate(shape)]
    return tuple(dim for i, dim in enumerate(ones) if keepdims or i not in axes)


def reduce(op_type: str, x: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    """Return the output of a node that reduces over `axis`; `x` itself without an axis to reduce over."""
    axes = axes_of(axis, x.ndim, op_type)
    shape = reduce_shape(x.shape, axes, keepdims)
    return emit(op_type, [x, xp.ints(axes)], shape, keepdims=int(keepdims)) if axes else x


def _summable(x: TensorLike, where: str, dtype: DTypeLike = None) -> Tensor:
    """Return numbers in the dtype to sum them in; by default integers of 64 bits, and floats unchanged."""
    if dtype is not None:
        return numbers(cast(asarray(x), dtype_of(dtype)), where)
    tensor = numbers(x, where)
    if tensor.type.dtype in SIGNED_INTS:
        return cast(tensor, ir.DataType.INT64)
    return cast(tensor, ir.DataType.UINT64) if tensor.type.dtype in UNSIGNED_INTS else tensor


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
    wide = widen(x)
    # Two passes: the mean of squares minus the square of the mean cancels for large means.
    centred = wide - mean(wide, axis=axis, keepdims=True)
    variance = mean(centred * centred, axis=axis, keepdims=keepdims)
    if not correction:
        return variance
    total = count_over(wide, axes_of(axis, wide.ndim, "var"), wide.type.dtype)
    # No degrees of freedom give 0 / 0, which is NaN, or x / 0, which is inf, as in numpy.
    return variance * total / maximum(total - correction, 0.0)


def count_over(x: Tensor, axes: Sequence[int], dtype: ir.DataType) -> Tensor:
    """Return the number of elements that a reduction over `axes` combines, as a scalar."""
    known = math.prod(sizes(x.shape[axis] for axis in axes))
    late = [axis for axis in axes if not isinstance(x.shape[axis], int)]
    if not late:
        return asarray(np.asarray(known, dtype.numpy()))
    # The whole shape, which other nodes read too.
    sizes_late = [emit("Gather", [xp.shape_of(x), asarray(np.int64(axis))], (), axis=0) for axis in late]
    # Products of scalars, since ONNX Runtime's ReduceProd of int64 is not used: the graph would be several runs.
    total = functools.reduce(operator.mul, sizes_late)
    return cast(total if known == 1 else total * known, dtype)


def root(x: Tensor) -> Tensor:
    """Return the root of non-negative numbers with gradient 0 at 0, like a norm's; a root's own is infinite."""
    zero = x == 0
    # The root gets no 0: a where() would not suffice, since it multiplies an infinite gradient by 0, which is NaN.
    above = where(zero, 1.0, x)
    return where(zero, 0.0, emit("Sqrt", [above], x.shape))


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
        place = _arg(op_type, xp.reshape(x, (-1,)), 0, keepdims)
        return xp.reshape(place, (1,) * x.ndim) if keepdims else place
    at = axis_of(axis, x.ndim, op_type)
    shape = reduce_shape(x.shape, [at], keepdims)
    return emit(op_type, [x], shape, ir.DataType.INT64, axis=at, keepdims=int(keepdims))


@example("cumulative_sum([1, 2, 3]).compute()", "array([1, 3, 6])")
def cumulative_sum(
    x: TensorLike, /, *, axis: int | None = None, dtype: DTypeLike = None, include_initial: bool = False
) -> Tensor:
    """Return the cumulative sums along an axis, which may be left out for a vector; computed in `dtype`.

    If `include_initial` is true, the sum of nothing, 0, comes first, and the axis is longer by one.
    """
    return _cumulate("CumSum", _summable(x, "cumulative_sum", dtype), axis, 0 if include_initial else None)


@example("cumulative_prod([1, 2, 3]).compute()", "array([1, 2, 6])")
def cumulative_prod(
    x: TensorLike, /, *, axis: int | None = None, dtype: DTypeLike = None, include_initial: bool = False
) -> Tensor:
    """Return the cumulative products along an axis; parameters are the same as in `cumulative_sum` (empty: 1)."""
    tensor = _summable(x, "cumulative_prod", dtype)
    return _cumulate("CumProd", tensor, axis, 1 if include_initial else None, opset=26)


def _cumulate(op_type: str, x: Tensor, axis: int | None, initial: int | None, opset: int = OPSET) -> Tensor:
    if axis is None and x.ndim != 1:
        raise InputError(f"{op_type}: {x!r} has {x.ndim} dimensions; name an axis")
    at = axis_of(axis or 0, x.ndim, op_type)
    results = emit(op_type, [x, asarray(np.int64(at))], x.shape, opset=opset)
    if initial is None:
        return results
    # A sum over the axis has the size of the first slice, even if there are no elements.
    first = xp.expand_dims(reduce("ReduceSum", x, at, keepdims=False), axis=at)
    return xp.concat([xp.full_like(first, initial), results], axis=at)


# ---- counting, sorting and searching ------------------------------------------------------------------------


def _is_true(x: TensorLike) -> Tensor:
    """Return whether elements are not 0; NaN is not."""
    tensor = asarray(x)
    return tensor if tensor.type.dtype == _BOOL else tensor != 0


@example("count_nonzero([[0, 2], [3, 4]], axis=1).compute()", "array([1, 2], dtype=int64)")
def count_nonzero(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return how many elements over `axis` are not 0 (or true), as int64."""
    return reduce("ReduceSum", cast(_is_true(x), _INT64), axis, keepdims)


@example("any([[0, 0], [0, 4]], axis=1).compute()", "array([False,  True])")
def any(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return whether at least one element over `axis` is true, or not 0; false for no elements."""
    return count_nonzero(x, axis=axis, keepdims=keepdims) > 0


@example("all([[1, 0], [3, 4]], axis=1).compute()", "array([False,  True])")
def all(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return whether all elements over `axis` are true, or not 0; true for no elements."""
    return count_nonzero(logical_not(_is_true(x)), axis=axis, keepdims=keepdims) == 0


@example("sort([3.0, 1.0, 2.0]).compute()", "array([1., 2., 3.], dtype=float32)")
def sort(x: TensorLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Return the elements in order along an axis; the place of NaN depends on the engine.

    The gradient of each sorted element goes to its original position.
    """
    return _sort(x, axis, descending, "sort")[0]


@example("argsort([3.0, 1.0, 2.0]).compute()", "array([1, 2, 0])")
def argsort(x: TensorLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Return the int64 indices that sort `x` along an axis; equal elements keep their order."""
    return _sort(x, axis, descending, "argsort")[1]


def _sort(x: TensorLike, axis: int, descending: bool, where: str) -> tuple[Tensor, Tensor]:
    tensor, at = xp.on_axis(numbers(x, where), axis, where)
    types = [tensor.type, TensorType(_INT64, tensor.shape)]
    # TopK of all elements: among equal elements the one of the lower index comes first, so it is stable.
    values, places = emit_all(
        "TopK", [tensor, xp.size_of(tensor, at)], types, axis=at, largest=int(descending), sorted=1
    )
    return values, places


@example("searchsorted([1, 3, 5], [3, 6]).compute()", "array([1, 3], dtype=int64)")
def searchsorted(
    x1: TensorLike, x2: TensorLike, /, *, side: str = "left", sorter: TensorLike | None = None
) -> Tensor:
    """Return the int64 places in a sorted vector x1 before which the elements of x2 can be inserted to keep it sorted.

    `side` is "left" or "right": whether equal elements of x1 are behind the place, or before it.  `sorter` are indices
    that sort x1.  Every element is compared with the whole vector: time and memory are the product of both sizes.
    """
    vector, values = promote("searchsorted", x1, x2)
    if vector.ndim != 1 or side not in ("left", "right"):
        raise InputError(
            f"searchsorted: got {vector!r} and side {side!r}, wanted a vector, 'left' or 'right'"
        )
    ordered = vector if sorter is None else xp.take(vector, sorter)
    each = xp.expand_dims(values, axis=-1)
    return count_nonzero(ordered < each if side == "left" else ordered <= each, axis=-1)


@example("isin([1, 2, 3], [3, 1]).compute()", "array([ True, False,  True])")
def isin(x1: TensorLike, x2: TensorLike, /, *, invert: bool = False) -> Tensor:
    """Return whether each element of `x1` is among the elements of `x2` (or, inverted, is not).

    Every element is compared with all of `x2`: time and memory are the product of both sizes.
    """
    values, listed = promote("isin", x1, x2)
    is_listed = any(xp.expand_dims(values, axis=-1) == xp.reshape(listed, (-1,)), axis=-1)
    return logical_not(is_listed) if invert else is_listed


@example("diff([1, 4, 9]).compute()", "array([3, 5])")
def diff(
    x: TensorLike,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: TensorLike | None = None,
    append: TensorLike | None = None,
) -> Tensor:
    """Return the differences of neighbours along an axis, taken `n` times, of `x` between `prepend` and `append`."""
    parts = [asarray(part) for part in (prepend, x, append) if part is not None]
    tensor = numbers(xp.concat(parts, axis=axis) if len(parts) > 1 else parts[0], "diff")
    at = axis_of(axis, tensor.ndim, "diff")
    if not isinstance(n, int) or n < 0:
        raise InputError(f"diff: n: got {n!r}, wanted a whole number of at least 0")
    for _ in range(n):
        # A dimension of size 0 has no last element, and its differences are none.
        before_last = tensor if tensor.shape[at] == 0 else xp.slice_dims(tensor, {at: slice(None, -1)})
        tensor = xp.slice_dims(tensor, {at: slice(1, None)}) - before_last
    return tensor


__all__ = [
    "all", "any", "argmax", "argmin", "argsort", "count_nonzero", "cumulative_prod", "cumulative_sum", "diff", "isin",
    "max", "mean", "min", "prod", "searchsorted", "sort", "std", "sum", "var",
]  # fmt: skip
