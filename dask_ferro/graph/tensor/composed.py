"""Elementwise functions that ONNX lacks, as compositions: corrected logarithms, division that rounds, angles, signs.

Each is written so that it neither overflows nor loses the sign of a zero, and has a finite gradient wherever the
function has one.  Division rounds down, and the remainder has the sign of the divisor, as in Python: x1 ==
floor_divide(x1, x2) * x2 + remainder(x1, x2).  Integers divided by 0 are an error when the graph runs.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from dask_ferro.graph.ir.dtypes import SIGNED, UNSIGNED
from dask_ferro.graph.tensor import elementwise as xp
from dask_ferro.graph.tensor.rows import example, row
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    binary,
    cast,
    elementwise,
    floating,
    integers,
    numbers,
    promoted,
    widened,
)

# BitShift takes unsigned integers alone: a signed one is shifted as the unsigned one of its width.
_UNSIGNED = {d: ir.DataType[f"U{d.name}"] for d in SIGNED}


def _log_to(base: int, x: str) -> xp.Unary:
    name = f"log{base}"
    says = f"the logarithm to the base {base}, elementwise: the natural one over log({base})"

    @row(name, says, f"{name}({x}).compute().round(3)", "array([0., 3.], dtype=float32)")
    def function(x: TensorLike, /) -> Tensor:
        tensor = floating(x, name)
        return cast(xp.log(widened(tensor)) / math.log(base), tensor.type.dtype)

    return function


log2 = _log_to(2, "[1.0, 8.0]")
log10 = _log_to(10, "[1.0, 1000.0]")


@example("log1p([0.0, 1.0]).compute().round(3)", "array([0.   , 0.693], dtype=float32)")
def log1p(x: TensorLike, /) -> Tensor:
    """Return log(1 + x), elementwise, accurate for tiny x; its gradient is 1 / (1 + x).

    ONNX has no such function.  The sum u = 1 + x is rounded, and x - (u - 1) is the exact rounding error: log(u) plus
    that error over u is Kahan's correction as a sum.  Its derivative is 1 / u; that of Kahan's quotient cancels near 0.
    """
    half = floating(x, "log1p")
    tensor = widened(half)
    total = 1 + tensor
    # Outside, x - (u - 1) would be inf - inf.
    inside = (total > 0) & (total < math.inf)
    lost = xp.where(inside, tensor - (total - 1), 0.0) / xp.where(inside, total, 1.0)
    return cast(xp.log(total) + lost, half.type.dtype)


@example("expm1([0.0, 1.0]).compute().round(3)", "array([0.   , 1.718], dtype=float32)")
def expm1(x: TensorLike, /) -> Tensor:
    """Return exp(x) - 1, elementwise, accurate for tiny x; its gradient is exp(x).

    ONNX has no such function.  For |x| < 1 the rounded u = exp(x) is the exact power of log(u), so u (x - log(u)) is
    the error of u - 1: Kahan's correction as a sum, whose derivative is right too.
    """
    half = floating(x, "expm1")
    tensor = widened(half)
    # Farther out exp(x) - 1 loses no digits, and the correction may be infinite.
    near = (tensor > -1) & (tensor < 1)
    small = xp.where(near, tensor, 0.0)
    power = xp.exp(small)
    close = (power - 1) + power * (small - xp.log(power))
    return cast(xp.where(near, close, xp.exp(tensor) - 1), half.type.dtype)


def _floats(name: str, x1: TensorLike, x2: TensorLike) -> tuple[Tensor, Tensor, ir.DataType]:
    """Return two tensors of one floating point dtype, in float32 if that is of half precision; and the dtype."""
    a, b = promoted(name, x1, x2)
    return widened(floating(a, name)), widened(b), a.type.dtype


@example("signbit([1.0, -0.0, -2.0]).compute()", "array([False,  True,  True])")
def signbit(x: TensorLike, /) -> Tensor:
    """Return whether x is below 0 or a negative zero, elementwise; false for NaN."""
    tensor = floating(x, "signbit")
    # A comparison does not see the sign of a zero, but its reciprocal is an infinity of that sign.
    return (tensor < 0) | ((tensor == 0) & (elementwise("Reciprocal", tensor) < 0))


@example("copysign([1.0, -2.0], [-0.0, 3.0]).compute()", "array([-1.,  2.], dtype=float32)")
def copysign(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the magnitude of x1 with the sign of x2, elementwise and with broadcasting.

    A NaN in x2 counts as positive.  The gradient with respect to x2 is 0.
    """
    a, b = promoted("copysign", x1, x2)
    size = xp.abs(floating(a, "copysign"))
    # ONNX Runtime's Where loses the sign of a zero that it takes from its first branch; and it exchanges the branches
    # of a negated condition, so the opposite of `signbit` is written out.
    above = (b > 0) | ((b == 0) & (elementwise("Reciprocal", b) > 0)) | xp.isnan(b)
    return xp.where(above, size, -size)


@example("hypot([3.0, 0.0], [4.0, 2.0]).compute().round(3)", "array([5., 2.], dtype=float32)")
def hypot(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the square root of x1 * x1 + x2 * x2 without overflow, elementwise and with broadcasting.

    It is infinite where one of both is, and its gradient at (0, 0) is 0.
    """
    a, b, dtype = _floats("hypot", x1, x2)
    a, b = xp.abs(a), xp.abs(b)
    large, small = binary("Max", a, b), binary("Min", a, b)
    inside = (large > 0) & ~xp.isinf(large)
    # Both branches of a `where` are computed: outside, the ratio would be 0 / 0.
    ratio = xp.where(inside, small, 0.0) / xp.where(inside, large, 1.0)
    found = xp.where(large > 0, large * xp.sqrt(1 + ratio * ratio), large)
    return cast(xp.where(xp.isinf(a) | xp.isinf(b), math.inf, found), dtype)


@example("atan2([1.0, -1.0], [0.0, -1.0]).compute().round(3)", "array([ 1.571, -2.356], dtype=float32)")
def atan2(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the angle from the positive x axis to the point (x2, x1), in radians from -pi to pi, elementwise.

    The signs of zeros and infinities choose the quadrant, as in C.
    """
    y, x, dtype = _floats("atan2", x1, x2)
    both = xp.isinf(x) & xp.isinf(y)
    rise, run = xp.where(both, xp.sign(y), y), xp.where(both, xp.sign(x), x)
    steep = xp.abs(rise) > xp.abs(run)
    over, under = xp.where(steep, run, rise), xp.where(steep, rise, run)
    # Only the quotient that is at most 1 is taken; at (0, 0) it is the zero of y.
    angle = xp.atan(over / xp.where(under == 0, 1.0, under))
    flat = xp.where(signbit(x), angle + copysign(math.pi, y), angle)
    return cast(xp.where(steep, copysign(math.pi / 2, y) - angle, flat), dtype)


@example("logaddexp([0.0, 1e4], 0.0).compute().round(3)", "array([6.93e-01, 1.00e+04], dtype=float32)")
def logaddexp(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return log(exp(x1) + exp(x2)) without overflow, elementwise and with broadcasting."""
    a, b, dtype = _floats("logaddexp", x1, x2)
    # Equal infinities would differ by NaN.
    apart = xp.abs(xp.where(a == b, 0.0, a - b))
    return cast(binary("Max", a, b) + elementwise("Softplus", -apart), dtype)


@example("remainder([5, -5], 3).compute()", "array([2, 1])")
def remainder(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the remainder of x1 / x2 with the sign of x2, elementwise and with broadcasting; `%` of tensors.

    Of floats, a remainder of 0 has the sign of x2 too, and x2 = 0 gives NaN.  The gradient is 1 with respect to x1,
    and -floor(x1 / x2) with respect to x2.
    """
    a, b = promoted("remainder", x1, x2)
    if not numbers(a, "remainder").is_floating:
        return binary("Mod", a, b)
    # ONNX has no floating point Mod but C's, whose result has the dividend's sign.
    rest = binary("Mod", a, b, fmod=1)
    moved = xp.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
    # Differences, since an exact 0 of either sign has to become that of the divisor with gradient 1.
    zero = _zero(moved)
    return xp.where(b >= 0, zero - (-moved), -(zero - moved))


def _zero(like: Tensor) -> Tensor:
    return promoted("remainder", like, 0)[1]


@example("floor_divide([5, -5], 3).compute()", "array([ 1, -2], dtype=int64)")
def floor_divide(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return x1 / x2 rounded down, elementwise and with broadcasting; `//` of tensors.

    Of floats it is the largest whole number not above the exact quotient (1.0 // 0.1 is 9.0, as 0.1 is stored a little
    above a tenth), and x2 = 0 gives infinity, or NaN.  The gradient is 0.
    """
    a, b = promoted("floor_divide", x1, x2)
    quotient = binary("Div", numbers(a, "floor_divide"), b)
    if a.type.dtype in UNSIGNED:
        return quotient
    if not a.is_floating:
        # ONNX truncates, which is one too high where the quotient is negative and not exact.
        rest = a - quotient * b
        return quotient - cast((rest != 0) & ((rest < 0) != (b < 0)), a.type.dtype)
    # An exact multiple of the divisor is divided, so that rounding lifts no quotient over a whole number.
    whole = xp.round((a - remainder(a, b)) / b)
    # A finite number over an infinite one is a hair from 0, on either side of it.
    beside = xp.where((a != 0) & ((a < 0) != (b < 0)), -1.0, _zero(a))
    found = xp.where((b == 0) | ~xp.isfinite(quotient), quotient, xp.where(xp.isfinite(b), whole, beside))
    # Zeros in the second branch, without a negated condition: see `copysign`.
    return xp.where((found < 0) | (found > 0) | xp.isnan(found), found, copysign(found, quotient))


def _shift(direction: str, x: Tensor, by: Tensor) -> Tensor:
    dtype = x.type.dtype
    wide = _UNSIGNED.get(dtype, dtype)
    return cast(binary("BitShift", cast(x, wide), cast(by, wide), direction=direction), dtype)


@example("bitwise_left_shift([1, -3], 2).compute()", "array([  4, -12], dtype=int64)")
def bitwise_left_shift(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the bits of x1 moved left by x2 places, elementwise and with broadcasting; `<<` of tensors."""
    a, b = promoted("bitwise_left_shift", x1, x2)
    return _shift("LEFT", integers(a, "bitwise_left_shift"), b)


@example("bitwise_right_shift([8, -3], 1).compute()", "array([ 4, -2], dtype=int64)")
def bitwise_right_shift(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the bits of x1 moved right by x2 places, elementwise and with broadcasting; `>>` of tensors.

    The sign is kept: -1 stays -1.
    """
    a, b = promoted("bitwise_right_shift", x1, x2)
    if integers(a, "bitwise_right_shift").type.dtype not in SIGNED:
        return _shift("RIGHT", a, b)
    # The complement of a negative number is not negative, so zeros may follow it.
    flipped = xp.bitwise_invert(_shift("RIGHT", xp.bitwise_invert(a), b))
    return xp.where(a < 0, flipped, _shift("RIGHT", a, b))


__all__ = [
    "atan2", "bitwise_left_shift", "bitwise_right_shift", "copysign", "expm1", "floor_divide", "hypot", "log1p", "log2",
    "log10", "logaddexp", "remainder", "signbit",
]  # fmt: skip
