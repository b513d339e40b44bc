"""Division with rounding, and its remainder, elementwise, by the rules of Python and the array-API standard.

The quotient is rounded down, and the remainder has the sign of the divisor: x1 == floor_divide(x1, x2) * x2 +
remainder(x1, x2).  ONNX's own Div of integers truncates.  Integers divided by 0 are an error when the graph runs.
"""

from __future__ import annotations

from dask_ferro.graph.ir.dtypes import UNSIGNED
from dask_ferro.graph.tensor.dims import broadcast
from dask_ferro.graph.tensor.elementwise.comparison import isfinite, isnan, where
from dask_ferro.graph.tensor.elementwise.elementary import round as nearest
from dask_ferro.graph.tensor.elementwise.pairs import copysign
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, binary, cast, emit, numbers, promoted


def _pair(where_: str, x1: TensorLike, x2: TensorLike) -> tuple[Tensor, Tensor]:
    """Return two tensors of numbers of one dtype."""
    a, b = promoted(where_, x1, x2)
    return numbers(a, where_), b


def _mod(a: Tensor, b: Tensor, fmod: int) -> Tensor:
    """Return the remainder of a division: of the divisor's sign, or with `fmod` of the dividend's."""
    return emit("Mod", [a, b], broadcast([a.shape, b.shape], "remainder"), fmod=fmod)


def remainder(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the remainder of x1 / x2 with the sign of x2, elementwise and with broadcasting; `%` of tensors.

    Of floats, a remainder of 0 has the sign of x2 too, and x2 = 0 gives NaN.  The gradient is 1 with respect to x1,
    and -floor(x1 / x2) with respect to x2.

    Raises
    ------
    ConfigError
        Bools, dtypes that do not mix, or shapes that do not broadcast.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.remainder([5, -5], 3).compute()
    array([2, 1])
    """
    a, b = _pair("remainder", x1, x2)
    if not a.is_floating:
        return _mod(a, b, 0)
    # ONNX has no floating point Mod but C's, whose result has the dividend's sign.
    rest = _mod(a, b, 1)
    moved = where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
    # Differences, since an exact 0 of either sign has to become that of the divisor with gradient 1.
    zero = _zero(moved)
    return where(b >= 0, zero - (-moved), -(zero - moved))


def _zero(like: Tensor) -> Tensor:
    """Return 0 as a scalar in the dtype of a tensor."""
    return promoted("remainder", like, 0)[1]


def floor_divide(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return x1 / x2 rounded down, elementwise and with broadcasting; `//` of tensors.

    Of floats it is the largest whole number not above the exact quotient (1.0 // 0.1 is 9.0, as 0.1 is stored a little
    above a tenth), and x2 = 0 gives infinity, or NaN.  The gradient is 0.

    Raises
    ------
    ConfigError
        Bools, dtypes that do not mix, or shapes that do not broadcast.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.floor_divide([5, -5], 3).compute()
    array([ 1, -2], dtype=int64)
    >>> ff.floor_divide([1.0, 3.0], 2.0).compute()
    array([0., 1.], dtype=float32)
    """
    a, b = _pair("floor_divide", x1, x2)
    quotient = binary("Div", a, b)
    if a.type.dtype in UNSIGNED:
        return quotient
    if not a.is_floating:
        # ONNX truncates, which is one too high where the quotient is negative and not exact.
        rest = a - quotient * b
        return quotient - cast((rest != 0) & ((rest < 0) != (b < 0)), a.type.dtype)
    # An exact multiple of the divisor is divided, so that rounding lifts no quotient over a whole number.
    whole = nearest((a - remainder(a, b)) / b)
    # A finite number over an infinite one is a hair from 0, on either side of it.
    beside = where((a != 0) & ((a < 0) != (b < 0)), -1.0, _zero(a))
    found = where((b == 0) | ~isfinite(quotient), quotient, where(isfinite(b), whole, beside))
    # Zeros in the second branch, without a negated condition: see `copysign`.
    return where((found < 0) | (found > 0) | isnan(found), found, copysign(found, quotient))


__all__ = ["floor_divide", "remainder"]
