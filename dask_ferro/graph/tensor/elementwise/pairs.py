"""Functions of two tensors that ONNX lacks, and signs of zeros, elementwise and with broadcasting.

Each is written so that it neither overflows nor loses the sign of a zero, and has a finite gradient wherever the
function has one.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from dask_ferro.graph.tensor.elementwise.comparison import isinf, isnan, where
from dask_ferro.graph.tensor.elementwise.elementary import abs as absolute
from dask_ferro.graph.tensor.elementwise.elementary import atan, sign, sqrt
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    binary,
    cast,
    elementwise,
    floating,
    promoted,
    widened,
)


def _floats(name: str, x1: TensorLike, x2: TensorLike) -> tuple[Tensor, Tensor, ir.DataType]:
    """Return two tensors of one floating point dtype, in float32 if that is of half precision; and the dtype."""
    a, b = promoted(name, x1, x2)
    return widened(floating(a, name)), widened(b), a.type.dtype


def signbit(x: TensorLike, /) -> Tensor:
    """Return whether x is below 0 or a negative zero, elementwise; false for NaN.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.signbit([1.0, -0.0, -2.0]).compute()
    array([False,  True,  True])
    """
    tensor = floating(x, "signbit")
    # A comparison does not see the sign of a zero, but its reciprocal is an infinity of that sign.
    return (tensor < 0) | ((tensor == 0) & (elementwise("Reciprocal", tensor) < 0))


def copysign(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the magnitude of x1 with the sign of x2, elementwise and with broadcasting.

    A NaN in x2 counts as positive.  The gradient with respect to x2 is 0.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.copysign([1.0, -2.0], [-0.0, 3.0]).compute()
    array([-1.,  2.], dtype=float32)
    """
    a, b = promoted("copysign", x1, x2)
    size = absolute(floating(a, "copysign"))
    # ONNX Runtime's Where loses the sign of a zero that it takes from its first branch; and it exchanges the branches
    # of a negated condition, so the opposite of `signbit` is written out.
    above = (b > 0) | ((b == 0) & (elementwise("Reciprocal", b) > 0)) | isnan(b)
    return where(above, size, -size)


def hypot(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the square root of x1 * x1 + x2 * x2 without overflow, elementwise and with broadcasting.

    It is infinite where one of both is, and its gradient at (0, 0) is 0.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.hypot([3.0, 0.0], [4.0, 2.0]).compute().round(3)
    array([5., 2.], dtype=float32)
    """
    a, b, dtype = _floats("hypot", x1, x2)
    a, b = absolute(a), absolute(b)
    large, small = binary("Max", a, b), binary("Min", a, b)
    inside = (large > 0) & ~isinf(large)
    # Both branches of a `where` are computed: outside, the ratio would be 0 / 0.
    ratio = where(inside, small, 0.0) / where(inside, large, 1.0)
    found = where(large > 0, large * sqrt(1 + ratio * ratio), large)
    return cast(where(isinf(a) | isinf(b), math.inf, found), dtype)


def atan2(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the angle from the positive x axis to the point (x2, x1), in radians from -pi to pi, elementwise.

    The signs of zeros and infinities choose the quadrant, as in C.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.atan2([1.0, -1.0], [0.0, -1.0]).compute().round(3)
    array([ 1.571, -2.356], dtype=float32)
    """
    y, x, dtype = _floats("atan2", x1, x2)
    both = isinf(x) & isinf(y)
    rise, run = where(both, sign(y), y), where(both, sign(x), x)
    steep = absolute(rise) > absolute(run)
    over, under = where(steep, run, rise), where(steep, rise, run)
    # Only the quotient that is at most 1 is taken; at (0, 0) it is the zero of y.
    angle = atan(over / where(under == 0, 1.0, under))
    flat = where(signbit(x), angle + copysign(math.pi, y), angle)
    return cast(where(steep, copysign(math.pi / 2, y) - angle, flat), dtype)


def logaddexp(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return log(exp(x1) + exp(x2)) without overflow, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.logaddexp([0.0, 1000.0], [0.0, 0.0]).compute().round(3)
    array([6.93e-01, 1.00e+03], dtype=float32)
    """
    a, b, dtype = _floats("logaddexp", x1, x2)
    # Equal infinities would differ by NaN.
    apart = absolute(where(a == b, 0.0, a - b))
    return cast(binary("Max", a, b) + elementwise("Softplus", -apart), dtype)


__all__ = ["atan2", "copysign", "hypot", "logaddexp", "signbit"]
