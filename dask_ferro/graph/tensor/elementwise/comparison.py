"""Comparisons, logic and choice, elementwise; the results are of bools, except those of `where`."""

from __future__ import annotations

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.dims import broadcast
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    binary,
    elementwise,
    emit,
    inverted,
    numbers,
    promoted,
)

_BOOL = ir.DataType.BOOL


def equal(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return whether both are equal, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.equal([1, 2], [1, 3]).compute()
    array([ True, False])
    """
    return binary("Equal", x1, x2, result=_BOOL)


def less(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return whether x1 < x2, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.less([1, 2], [1, 3]).compute()
    array([False,  True])
    """
    return binary("Less", x1, x2, result=_BOOL)


def less_equal(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return whether x1 <= x2, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.less_equal([1, 2], [1, 3]).compute()
    array([ True,  True])
    """
    return binary("LessOrEqual", x1, x2, result=_BOOL)


def greater(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return whether x1 > x2, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.greater([1, 4], [1, 3]).compute()
    array([False,  True])
    """
    return binary("Greater", x1, x2, result=_BOOL)


def greater_equal(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return whether x1 >= x2, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.greater_equal([1, 2], [1, 3]).compute()
    array([ True, False])
    """
    return binary("GreaterOrEqual", x1, x2, result=_BOOL)


def logical_and(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return whether both are true, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.logical_and([True, False], [True, True]).compute()
    array([ True, False])
    """
    return binary("And", x1, x2, only=_BOOL)


def logical_or(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return whether at least one is true, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.logical_or([True, False], [False, False]).compute()
    array([ True, False])
    """
    return binary("Or", x1, x2, only=_BOOL)


def logical_xor(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return whether exactly one is true, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.logical_xor([True, False], [True, True]).compute()
    array([False,  True])
    """
    return binary("Xor", x1, x2, only=_BOOL)


def logical_not(x: TensorLike, /) -> Tensor:
    """Return whether x, a tensor of bools, is false, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.logical_not([True, False]).compute()
    array([False,  True])
    """
    return inverted(asarray(x))


def not_equal(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return whether both differ, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.not_equal([1, 2], [1, 3]).compute()
    array([False,  True])
    """
    return logical_not(equal(x1, x2))


def isnan(x: TensorLike, /) -> Tensor:
    """Return whether x is not a number, elementwise; no integer is.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.isnan([1.0, float("nan")]).compute()
    array([False,  True])
    """
    return _is("IsNaN", x, "isnan")


def isinf(x: TensorLike, /) -> Tensor:
    """Return whether x is an infinity, elementwise; no integer is.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.isinf([1.0, float("inf")]).compute()
    array([False,  True])
    """
    return _is("IsInf", x, "isinf")


def isfinite(x: TensorLike, /) -> Tensor:
    """Return whether x is neither an infinity nor NaN, elementwise; every integer is finite.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.isfinite([1.0, float("inf"), float("nan")]).compute()
    array([ True, False, False])
    """
    tensor = numbers(asarray(x), "isfinite")
    # The difference of an infinity, or of NaN, and itself is NaN.
    return tensor - tensor == 0 if tensor.is_floating else tensor == tensor


def _is(op_type: str, x: TensorLike, name: str) -> Tensor:
    tensor = numbers(asarray(x), name)
    return elementwise(op_type, tensor, _BOOL) if tensor.is_floating else inverted(isfinite(tensor))


def where(condition: TensorLike, x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return x1 where the condition is true, else x2; all three broadcast.

    Raises
    ------
    ConfigError
        The condition is not a tensor of bools.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.where([True, False], [1, 2], [3, 4]).compute()
    array([1, 4])
    """
    chosen = asarray(condition)
    if chosen.type.dtype != _BOOL:
        raise ConfigError(f"where: a condition is of bools, got {chosen!r}; compare first")
    a, b = promoted("where", x1, x2)
    return emit("Where", [chosen, a, b], broadcast([chosen.shape, a.shape, b.shape], "where"), a.type.dtype)


__all__ = [
    "equal", "greater", "greater_equal", "isfinite", "isinf", "isnan", "less", "less_equal", "logical_and",
    "logical_not", "logical_or", "logical_xor", "not_equal", "where",
]  # fmt: skip
