"""Sorting, searching and counting, under the array-API standard's names.

Functions whose result has a size that depends on values (`nonzero`, `unique_values`) are left out: shapes are known
before a graph runs.
"""

from __future__ import annotations

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.dims import axis_of
from dask_ferro.graph.tensor.elementwise import logical_not
from dask_ferro.graph.tensor.manipulation import concat, expand_dims, reshape, size_of, sliced, take
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.statistical import Axis, reduce
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    TensorType,
    asarray,
    cast,
    emit_all,
    numbers,
    promoted,
)

_BOOL, _INT64 = ir.DataType.BOOL, ir.DataType.INT64


def _true(x: TensorLike) -> Tensor:
    """Return whether elements are not 0; NaN is not."""
    tensor = asarray(x)
    return tensor if tensor.type.dtype == _BOOL else tensor != 0


@example("count_nonzero([[0, 2], [3, 4]], axis=1).compute()", "array([1, 2], dtype=int64)")
def count_nonzero(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return how many elements over `axis` are not 0 (or true), as int64."""
    return reduce("ReduceSum", cast(_true(x), _INT64), axis, keepdims)


@example("any([[0, 0], [0, 4]], axis=1).compute()", "array([False,  True])")
def any(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return whether at least one element over `axis` is true, or not 0; false of none."""
    return count_nonzero(x, axis=axis, keepdims=keepdims) > 0


@example("all([[1, 0], [3, 4]], axis=1).compute()", "array([False,  True])")
def all(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return whether all elements over `axis` are true, or not 0; true of none."""
    return count_nonzero(logical_not(_true(x)), axis=axis, keepdims=keepdims) == 0


@example("sort([3.0, 1.0, 2.0]).compute()", "array([1., 2., 3.], dtype=float32)")
def sort(x: TensorLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Return the elements in order along an axis; the place of NaN depends on the engine.

    The gradient of each sorted element goes to where it came from.
    """
    return _sorted(x, axis, descending, "sort")[0]


@example("argsort([3.0, 1.0, 2.0]).compute()", "array([1, 2, 0])")
def argsort(x: TensorLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Return the int64 indices that sort `x` along an axis; equal elements keep their order."""
    return _sorted(x, axis, descending, "argsort")[1]


def _sorted(x: TensorLike, axis: int, descending: bool, where: str) -> tuple[Tensor, Tensor]:
    tensor = numbers(x, where)
    if not tensor.ndim:
        raise ConfigError(f"{where}: {tensor!r} is a scalar and has no axis to sort along")
    at = axis_of(axis, tensor.ndim, where)
    types = [tensor.type, TensorType(_INT64, tensor.shape)]
    # TopK of all elements: of equal ones it takes that of the lower index first, so it is stable.
    values, places = emit_all(
        "TopK", [tensor, size_of(tensor, at)], types, axis=at, largest=int(descending), sorted=1
    )
    return values, places


@example("searchsorted([1, 3, 5], [3, 6]).compute()", "array([1, 3], dtype=int64)")
def searchsorted(
    x1: TensorLike, x2: TensorLike, /, *, side: str = "left", sorter: TensorLike | None = None
) -> Tensor:
    """Return the int64 places in a sorted vector before which elements would be inserted to keep it sorted.

    Every element is compared with the whole vector: time and memory are the product of both sizes.

    Parameters
    ----------
    x1 : Tensor
        A vector in ascending order.
    x2 : Tensor
        The elements to insert.
    side : {"left", "right"}, optional
        Whether equal elements of `x1` are behind the place, or before it.
    sorter : Tensor, optional
        Indices that sort `x1`, as `argsort` gives them.
    """
    vector, values = promoted("searchsorted", x1, x2)
    if vector.ndim != 1 or side not in ("left", "right"):
        raise ConfigError(
            f"searchsorted: got {vector!r} and side {side!r}, wanted a vector, 'left' or 'right'"
        )
    ordered = vector if sorter is None else take(vector, sorter)
    each = expand_dims(values, axis=-1)
    before = ordered < each if side == "left" else ordered <= each
    return reduce("ReduceSum", cast(before, _INT64), -1, keepdims=False)


@example("isin([1, 2, 3], [3, 1]).compute()", "array([ True, False,  True])")
def isin(x1: TensorLike, x2: TensorLike, /, *, invert: bool = False) -> Tensor:
    """Return whether each element of `x1` is among those of `x2` (or, inverted, is not).

    Every element is compared with all of `x2`: time and memory are the product of both sizes.
    """
    values, listed = promoted("isin", x1, x2)
    found = any(expand_dims(values, axis=-1) == reshape(listed, (-1,)), axis=-1)
    return logical_not(found) if invert else found


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
    """Return the differences of neighbours along an axis, taken `n` times.

    Parameters
    ----------
    x : Tensor
    axis : int, optional
    n : int, optional
        From 0 on.
    prepend, append : Tensor, optional
        Joined to `x` along the axis first.
    """
    parts = [asarray(part) for part in (prepend, x, append) if part is not None]
    tensor = numbers(concat(parts, axis=axis) if len(parts) > 1 else parts[0], "diff")
    at = axis_of(axis, tensor.ndim, "diff")
    if not isinstance(n, int) or n < 0:
        raise ConfigError(f"diff: n: got {n!r}, wanted a whole number from 0 on")
    for _ in range(n):
        # A dimension of size 0 has no last element, and its differences are none.
        before_last = tensor if tensor.shape[at] == 0 else sliced(tensor, {at: slice(None, -1)})
        tensor = sliced(tensor, {at: slice(1, None)}) - before_last
    return tensor


__all__ = ["all", "any", "argsort", "count_nonzero", "diff", "isin", "searchsorted", "sort"]
