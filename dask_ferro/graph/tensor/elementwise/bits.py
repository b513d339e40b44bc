"""Bitwise functions of integers, which are logic for bools; elementwise and with broadcasting."""

from __future__ import annotations

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import INTEGER, SIGNED
from dask_ferro.graph.tensor.elementwise.comparison import where
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    binary,
    cast,
    elementwise,
    inverted,
    promoted,
)

_BOOL = ir.DataType.BOOL
# BitShift takes unsigned integers alone: a signed one is shifted as the unsigned one of its width.
_UNSIGNED = {d: ir.DataType[f"U{d.name}"] for d in SIGNED}


def _integers(name: str, *tensors: Tensor) -> None:
    """Refuse dtypes that have no bits to combine."""
    for tensor in tensors:
        if tensor.type.dtype not in INTEGER:
            raise ConfigError(
                f"{name}: takes integers, got {tensor.dtype.name}; use astype, or compare first"
            )


def _bitwise(name: str, logic: str, x1: TensorLike, x2: TensorLike) -> Tensor:
    """Return a bitwise node `name` of integers, or `logic` of bools."""
    a, b = promoted(name, x1, x2)
    if a.type.dtype == _BOOL:
        return binary(logic, a, b, only=_BOOL)
    _integers(name, a)
    return binary(name, a, b)


def bitwise_and(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the bits that are set in both, elementwise and with broadcasting; `&` of tensors.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.bitwise_and([6, 5], 3).compute()
    array([2, 1])
    """
    return _bitwise("BitwiseAnd", "And", x1, x2)


def bitwise_or(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the bits that are set in at least one, elementwise and with broadcasting; `|` of tensors.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.bitwise_or([6, 5], 3).compute()
    array([7, 7])
    """
    return _bitwise("BitwiseOr", "Or", x1, x2)


def bitwise_xor(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the bits that are set in exactly one, elementwise and with broadcasting; `^` of tensors.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.bitwise_xor([6, 5], 3).compute()
    array([5, 6])
    """
    return _bitwise("BitwiseXor", "Xor", x1, x2)


def bitwise_invert(x: TensorLike, /) -> Tensor:
    """Return x with every bit inverted, elementwise; `~` of tensors.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.bitwise_invert([0, 5]).compute()
    array([-1, -6])
    """
    tensor = asarray(x)
    if tensor.type.dtype not in INTEGER:
        return inverted(tensor)
    return elementwise("BitwiseNot", tensor)


def _shift(direction: str, x: Tensor, by: Tensor) -> Tensor:
    """Return unsigned bits moved; what leaves the width is lost, zeros follow."""
    dtype = x.type.dtype
    wide = _UNSIGNED.get(dtype, dtype)
    return cast(binary("BitShift", cast(x, wide), cast(by, wide), direction=direction), dtype)


def bitwise_left_shift(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the bits of x1 moved left by x2 places, elementwise and with broadcasting; `<<` of tensors.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.bitwise_left_shift([1, -3], 2).compute()
    array([  4, -12], dtype=int64)
    """
    a, b = promoted("bitwise_left_shift", x1, x2)
    _integers("bitwise_left_shift", a)
    return _shift("LEFT", a, b)


def bitwise_right_shift(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the bits of x1 moved right by x2 places, elementwise and with broadcasting; `>>` of tensors.

    The sign is kept: -1 stays -1.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.bitwise_right_shift([8, -3], 1).compute()
    array([ 4, -2], dtype=int64)
    """
    a, b = promoted("bitwise_right_shift", x1, x2)
    _integers("bitwise_right_shift", a)
    if a.type.dtype not in SIGNED:
        return _shift("RIGHT", a, b)
    # The complement of a negative number is not negative, so zeros may follow it.
    flipped = bitwise_invert(_shift("RIGHT", bitwise_invert(a), b))
    return where(a < 0, flipped, _shift("RIGHT", a, b))


__all__ = [
    "bitwise_and", "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
]  # fmt: skip
