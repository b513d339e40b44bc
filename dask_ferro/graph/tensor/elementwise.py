"""Elementwise functions of tensors with the array-API standard's names: one ONNX node each, or a composition.

Most are rows: a name, an operator, a description of the result, the arguments of an example, and the example's
result.  Shapes and dtypes are checked in `tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.dtypes import ARITHMETIC, INTEGER, SIGNED_INTS, UNSIGNED_INTS
from dask_ferro.graph.tensor.dims import broadcast
from dask_ferro.graph.tensor.rows import example, row
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    binary,
    bools,
    cast,
    elementwise,
    emit,
    floating,
    integers,
    numbers,
    of_kind,
    promote,
    widen,
)

Unary = Callable[[TensorLike], Tensor]
Binary = Callable[[TensorLike, TensorLike], Tensor]

_BOOL = ir.DataType.BOOL
_BROADCAST = "elementwise and with broadcasting"
_INT_RULE = "elementwise; integers are unchanged"


def _unary(
    name: str,
    compute: str | Callable[[Tensor], Tensor],
    says: str,
    x: str,
    shown: str,
    takes: Callable[[TensorLike, str], Tensor] = numbers,
    to: str = "",
) -> Unary:
    """Return the function that computes an operator or a composition of a tensor that `takes` passes."""

    @row(name, says, f"{name}({x}).compute(){to}", f"array({shown})")
    def function(x: TensorLike, /) -> Tensor:
        tensor = takes(x, name)
        return elementwise(compute, tensor) if isinstance(compute, str) else compute(tensor)

    return function


def _of_floats(name: str, compute: str | Callable[[Tensor], Tensor], says: str, x: str, shown: str) -> Unary:
    return _unary(name, compute, f"{says}, elementwise", x, f"{shown}, dtype=float32", floating, ".round(3)")


def _by_kind(
    name: str,
    of_floats: Callable[[Tensor], Tensor],
    says: str,
    x: str,
    shown: str,
    of_integers: Callable[[Tensor], Tensor] = lambda x: x,
) -> Unary:
    return _unary(name, lambda x: (of_floats if x.is_floating else of_integers)(x), says, x, shown)


def _binary(
    name: str,
    compute: str | Binary,
    says: str,
    arguments: str,
    shown: str,
    note: str = "",
    to: str = "",
    **rules: Any,
) -> Binary:
    """Return the function that computes an operator, with the rules of `binary`, or a composition."""

    @row(name, f"{says}, {_BROADCAST}{note}", f"{name}({arguments}).compute(){to}", f"array({shown})")
    def function(x1: TensorLike, x2: TensorLike, /) -> Tensor:
        return binary(compute, x1, x2, **rules) if isinstance(compute, str) else compute(x1, x2)

    return function


_comparison, _logical = partial(_binary, result=_BOOL), partial(_binary, check=bools)


def _bitwise(name: str, sign: str, op_type: str, logic: str, says: str, shown: str) -> Binary:
    def node(x1: TensorLike, x2: TensorLike) -> Tensor:
        a, b = promote(op_type, x1, x2)
        if a.type.dtype == _BOOL:
            return binary(logic, a, b, check=bools)
        return binary(op_type, a, b, check=integers)

    return _binary(
        name, node, f"the bits that are set in {says}", "[6, 5], 3", shown, f"; `{sign}` of tensors"
    )


def _log_to(base: int, x: Tensor) -> Tensor:
    return cast(log(widen(x)) / math.log(base), x.type.dtype)


def _shift(direction: str, x1: TensorLike, x2: TensorLike) -> Tensor:
    name = f"bitwise_{direction.lower()}_shift"
    a, b = promote(name, x1, x2)
    dtype = integers(a, name).type.dtype
    # BitShift accepts only unsigned integers: a signed integer is shifted as the unsigned integer of its width.
    wide = ir.DataType[f"U{dtype.name}"] if dtype in SIGNED_INTS else dtype

    def shifts(x: Tensor) -> Tensor:
        return cast(binary("BitShift", cast(x, wide), cast(b, wide), direction=direction), dtype)

    if direction == "LEFT" or dtype not in SIGNED_INTS:
        return shifts(a)
    # The complement of a negative number is not negative, so zeros may follow it.
    return where(a < 0, bitwise_invert(shifts(bitwise_invert(a))), shifts(a))


@example("where([True, False], [1, 2], [3, 4]).compute()", "array([1, 4])")
def where(condition: TensorLike, x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return elements of x1 if the condition is true, else of x2; all three broadcast."""
    mask = asarray(condition)
    if mask.type.dtype != _BOOL:
        raise InputError(f"where: the condition must be boolean, got {mask!r}; compare first")
    a, b = promote("where", x1, x2)
    return emit("Where", [mask, a, b], broadcast([mask.shape, a.shape, b.shape], "where"), a.type.dtype)


# fmt: off
exp = _of_floats("exp", "Exp", "e to the power of x", "[0.0, 1.0]", "[1.   , 2.718]")
log = _of_floats("log", "Log", "the natural logarithm", "[1.0, 2.0]", "[0.   , 0.693]")
sqrt = _of_floats("sqrt", "Sqrt", "the square root", "[4.0, 9.0]", "[2., 3.]")
reciprocal = _of_floats("reciprocal", "Reciprocal", "1 / x", "[2.0, 4.0]", "[0.5 , 0.25]")
sin = _of_floats("sin", "Sin", "the sine", "[0.0, 1.0]", "[0.   , 0.841]")
cos = _of_floats("cos", "Cos", "the cosine", "[0.0, 1.0]", "[1.  , 0.54]")
tan = _of_floats("tan", "Tan", "the tangent", "[0.0, 1.0]", "[0.   , 1.557]")
asin = _of_floats("asin", "Asin", "the inverse of the sine", "[0.0, 1.0]", "[0.   , 1.571]")
acos = _of_floats("acos", "Acos", "the inverse of the cosine", "[0.0, 1.0]", "[1.571, 0.   ]")
atan = _of_floats("atan", "Atan", "the inverse of the tangent", "[0.0, 1.0]", "[0.   , 0.785]")
sinh = _of_floats("sinh", "Sinh", "the hyperbolic sine", "[0.0, 1.0]", "[0.   , 1.175]")
cosh = _of_floats("cosh", "Cosh", "the hyperbolic cosine", "[0.0, 1.0]", "[1.   , 1.543]")
tanh = _of_floats("tanh", "Tanh", "the hyperbolic tangent", "[0.0, 1.0]", "[0.   , 0.762]")
asinh = _of_floats("asinh", "Asinh", "the inverse of the hyperbolic sine", "[0.0, 1.0]", "[0.   , 0.881]")
acosh = _of_floats("acosh", "Acosh", "the inverse of the hyperbolic cosine", "[1.0, 2.0]", "[0.   , 1.317]")
atanh = _of_floats("atanh", "Atanh", "the inverse of the hyperbolic tangent", "[0.0, 0.5]", "[0.   , 0.549]")
log2 = _of_floats("log2", partial(_log_to, 2), "the logarithm to the base 2, as the natural one over log(2)",
    "[1.0, 8.0]", "[0., 3.]")
log10 = _of_floats("log10", partial(_log_to, 10), "the logarithm to the base 10, as the natural one over log(10)",
    "[1.0, 1000.0]", "[0., 3.]")
erf = _of_floats("erf", "Erf", "the error function", "[0.0, 1.0]", "[0.   , 0.843]")

# The difference of an infinity, or of NaN, and itself is NaN.
isfinite = _by_kind("isfinite", lambda x: x - x == 0,
    "whether x is neither an infinity nor NaN, elementwise; every integer is finite",
    '[1.0, float("inf"), float("nan")]', "[ True, False, False]", lambda x: x == x)
isnan = _by_kind("isnan", lambda x: elementwise("IsNaN", x, _BOOL),
    "whether x is not a number, elementwise; no integer is", '[1.0, float("nan")]', "[False,  True]", lambda x: x != x)
isinf = _by_kind("isinf", lambda x: elementwise("IsInf", x, _BOOL),
    "whether x is an infinity, elementwise; no integer is", '[1.0, float("inf")]', "[False,  True]", lambda x: x != x)
floor = _by_kind("floor", partial(elementwise, "Floor"), f"the largest whole number not above x, {_INT_RULE}",
    "[0.2, 1.7]", "[0., 1.], dtype=float32")
ceil = _by_kind("ceil", partial(elementwise, "Ceil"), f"the smallest whole number not below x, {_INT_RULE}",
    "[0.2, 1.7]", "[1., 2.], dtype=float32")
round = _by_kind("round", partial(elementwise, "Round"), f"the nearest whole number, halves to even, {_INT_RULE}",
    "[0.5, 1.5, 2.4]", "[0., 2., 2.], dtype=float32")
trunc = _by_kind("trunc", lambda x: where(x < 0, ceil(x), floor(x)),
    f"the whole number that is left without the fraction, {_INT_RULE}", "[-1.7, 1.7]", "[-1.,  1.], dtype=float32")
abs = _unary("abs", "Abs", "the absolute value, elementwise", "[-1.5, 2.0]", "[1.5, 2. ], dtype=float32")
sign = _unary("sign", "Sign", "-1, 0 or 1, elementwise", "[-3, 0, 5]", "[-1,  0,  1]")
square = _unary("square", lambda x: x * x, "x * x, elementwise", "[2.0, 3.0]", "[4., 9.], dtype=float32")
positive = _unary("positive", lambda x: x, "x, a tensor of numbers", "[-1, 2]", "[-1,  2]")
negative = _unary("negative", "Neg", "-x, elementwise; unsigned integers are refused", "[1, -2]", "[-1,  2]",
    partial(of_kind, ARITHMETIC - UNSIGNED_INTS, "numbers that have a sign"))
logical_not = _unary("logical_not", "Not", "whether x, a tensor of bools, is false, elementwise",
    "[True, False]", "[False,  True]", bools)
bitwise_invert = _unary("bitwise_invert",
    lambda x: elementwise("BitwiseNot" if x.type.dtype in INTEGER else "Not", x),
    "x with every bit inverted, elementwise; `~` of tensors", "[0, 5]", "[-1, -6]",
    partial(of_kind, INTEGER | {_BOOL}, "bool or integers", remedy="compare first"))

add = _binary("add", "Add", "the sum", "[1, 2], [3, 4]", "[4, 6]")
subtract = _binary("subtract", "Sub", "the difference", "[1, 2], [3, 5]", "[-2, -3]")
multiply = _binary("multiply", "Mul", "the product", "[1, 2], [3, 4]", "[3, 8]")
divide = _binary("divide", "Div", "the quotient of floating point numbers", "[1.0, 3.0], 2.0",
    "[0.5, 1.5], dtype=float32", check=floating)
pow = _binary("pow", "Pow", "x1 to the power of x2", "[2.0, 3.0], 2.0", "[4., 9.], dtype=float32", to=".round(3)")
maximum = _binary("maximum", "Max", "the larger one", "[1, 5], [3, 4]", "[3, 5]")
minimum = _binary("minimum", "Min", "the smaller one", "[1, 5], [3, 4]", "[1, 4]")
equal = _comparison("equal", "Equal", "whether both are equal", "[1, 2], [1, 3]", "[ True, False]", check=None)
not_equal = _binary("not_equal", lambda x1, x2: logical_not(equal(x1, x2)), "whether both differ", "[1, 2], [1, 3]",
    "[False,  True]")
less = _comparison("less", "Less", "whether x1 < x2", "[1, 2], [1, 3]", "[False,  True]")
less_equal = _comparison("less_equal", "LessOrEqual", "whether x1 <= x2", "[1, 2], [1, 3]", "[ True,  True]")
greater = _comparison("greater", "Greater", "whether x1 > x2", "[1, 4], [1, 3]", "[False,  True]")
greater_equal = _comparison("greater_equal", "GreaterOrEqual", "whether x1 >= x2", "[1, 2], [1, 3]", "[ True, False]")
logical_and = _logical("logical_and", "And", "whether both are true", "[True, False], [True, True]", "[ True, False]")
logical_or = _logical("logical_or", "Or", "whether x1 or x2 is true", "[True, False], [False, False]", "[ True, False]")
logical_xor = _logical("logical_xor", "Xor", "whether both differ", "[True, False], [True, True]", "[False,  True]")
bitwise_and = _bitwise("bitwise_and", "&", "BitwiseAnd", "And", "both", "[2, 1]")
bitwise_or = _bitwise("bitwise_or", "|", "BitwiseOr", "Or", "at least one", "[7, 7]")
bitwise_xor = _bitwise("bitwise_xor", "^", "BitwiseXor", "Xor", "exactly one", "[5, 6]")
bitwise_left_shift = _binary("bitwise_left_shift", partial(_shift, "LEFT"), "the bits of x1 moved left by x2 places",
    "[1, -3], 2", "[  4, -12], dtype=int64", "; `<<` of tensors")
bitwise_right_shift = _binary("bitwise_right_shift", partial(_shift, "RIGHT"),
    "the bits of x1 moved right by x2 places", "[8, -3], 1", "[ 4, -2], dtype=int64",
    "; `>>` of tensors\n\nThe sign is kept: -1 stays -1.")
# fmt: on


@example("clip([-1.0, 0.5, 2.0], 0.0, 1.0).compute()", "array([0. , 0.5, 1. ], dtype=float32)")
def clip(x: TensorLike, /, min: TensorLike | None = None, max: TensorLike | None = None) -> Tensor:
    """Return x, but not below `min` and not above `max` (numbers, or tensors that broadcast).

    At a bound the gradient belongs to x, as in PyTorch; if the bounds cross, the result is `max`.
    """
    tensor, *bounds = promote("clip", numbers(x, "clip"), *(b for b in (min, max) if b is not None))
    if not bounds:
        return tensor
    low, high = None if min is None else bounds[0], None if max is None else bounds[-1]
    # ONNX's Clip takes only scalars.
    if all(bound.ndim == 0 for bound in bounds):
        return emit("Clip", [tensor, low, *([] if high is None else [high])], tensor.shape)
    if low is not None:
        tensor = where(tensor < low, low, tensor)
    return tensor if high is None else where(tensor > high, high, tensor)


# ---- compositions of functions that ONNX lacks
# ---------------------------------------------------------------------------- Each neither overflows nor loses the
# sign of a zero, and has a finite gradient wherever the function has one. Division rounds down, and the remainder has
# the sign of the divisor, as in Python: x1 == floor_divide(x1, x2) * x2 + remainder(x1, x2).  Integers divided by 0
# are an error when the graph runs.


@example("log1p([0.0, 1.0]).compute().round(3)", "array([0.   , 0.693], dtype=float32)")
def log1p(x: TensorLike, /) -> Tensor:
    """Return log(1 + x), elementwise, accurate for tiny x; its gradient is 1 / (1 + x).

    ONNX has no such function.  The sum u = 1 + x is rounded, and x - (u - 1) is the exact rounding error: log(u) plus
    that error over u is Kahan's correction as a sum.  Its derivative is 1 / u; the derivative of Kahan's quotient
    cancels near 0.
    """
    half = floating(x, "log1p")
    tensor = widen(half)
    total = 1 + tensor
    # Outside, x - (u - 1) would be inf - inf.
    inside = (total > 0) & (total < math.inf)
    lost = where(inside, tensor - (total - 1), 0.0) / where(inside, total, 1.0)
    return cast(log(total) + lost, half.type.dtype)


@example("expm1([0.0, 1.0]).compute().round(3)", "array([0.   , 1.718], dtype=float32)")
def expm1(x: TensorLike, /) -> Tensor:
    """Return exp(x) - 1, elementwise, accurate for tiny x; its gradient is exp(x).

    ONNX has no such function.  For |x| < 1 the rounded u = exp(x) is the exact power of log(u), so u (x - log(u)) is
    the error of u - 1: Kahan's correction as a sum, whose derivative is right too.
    """
    half = floating(x, "expm1")
    tensor = widen(half)
    # Farther out exp(x) - 1 loses no digits, and the correction may be infinite.
    near = (tensor > -1) & (tensor < 1)
    small = where(near, tensor, 0.0)
    power = exp(small)
    close = (power - 1) + power * (small - log(power))
    return cast(where(near, close, exp(tensor) - 1), half.type.dtype)


def _floats(name: str, x1: TensorLike, x2: TensorLike) -> tuple[Tensor, Tensor, ir.DataType]:
    """Return two tensors of one floating point dtype, in float32 if that is half precision; and the dtype."""
    a, b = promote(name, x1, x2)
    return widen(floating(a, name)), widen(b), a.type.dtype


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
    a, b = promote("copysign", x1, x2)
    size = abs(floating(a, "copysign"))
    # ONNX Runtime's Where loses the sign of a zero from its first branch; and it exchanges the branches of a negated
    # condition, so the opposite of `signbit` is written out.
    above = (b > 0) | ((b == 0) & (elementwise("Reciprocal", b) > 0)) | isnan(b)
    return where(above, size, -size)


@example("hypot([3.0, 0.0], [4.0, 2.0]).compute().round(3)", "array([5., 2.], dtype=float32)")
def hypot(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the square root of x1 * x1 + x2 * x2 without overflow, elementwise and with broadcasting.

    It is infinite if x1 or x2 is, and its gradient at (0, 0) is 0.
    """
    a, b, dtype = _floats("hypot", x1, x2)
    a, b = abs(a), abs(b)
    large, small = binary("Max", a, b), binary("Min", a, b)
    inside = (large > 0) & ~isinf(large)
    # Both branches of a `where` are computed: outside, the ratio would be 0 / 0.
    ratio = where(inside, small, 0.0) / where(inside, large, 1.0)
    length = where(large > 0, large * sqrt(1 + ratio * ratio), large)
    return cast(where(isinf(a) | isinf(b), math.inf, length), dtype)


@example("atan2([1.0, -1.0], [0.0, -1.0]).compute().round(3)", "array([ 1.571, -2.356], dtype=float32)")
def atan2(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the angle from the positive x axis to the point (x2, x1), in radians from -pi to pi, elementwise.

    The signs of zeros and infinities choose the quadrant, as in C.
    """
    y, x, dtype = _floats("atan2", x1, x2)
    both = isinf(x) & isinf(y)
    rise, run = where(both, sign(y), y), where(both, sign(x), x)
    steep = abs(rise) > abs(run)
    over, under = where(steep, run, rise), where(steep, rise, run)
    # Only the quotient that is at most 1 is taken; at (0, 0) it is the zero of y.
    angle = atan(over / where(under == 0, 1.0, under))
    flat = where(signbit(x), angle + copysign(math.pi, y), angle)
    return cast(where(steep, copysign(math.pi / 2, y) - angle, flat), dtype)


@example("logaddexp([0.0, 1e4], 0.0).compute().round(3)", "array([6.93e-01, 1.00e+04], dtype=float32)")
def logaddexp(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return log(exp(x1) + exp(x2)) without overflow, elementwise and with broadcasting."""
    a, b, dtype = _floats("logaddexp", x1, x2)
    # Equal infinities would differ by NaN.
    apart = abs(where(a == b, 0.0, a - b))
    return cast(binary("Max", a, b) + elementwise("Softplus", -apart), dtype)


@example("remainder([5, -5], 3).compute()", "array([2, 1])")
def remainder(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the remainder of x1 / x2 with the sign of x2, elementwise and with broadcasting; `%` of tensors.

    For floats, a remainder of 0 has the sign of x2 too, and x2 = 0 gives NaN.  The gradient is 1 with respect to x1,
    and -floor(x1 / x2) with respect to x2.
    """
    a, b = promote("remainder", x1, x2)
    if not numbers(a, "remainder").is_floating:
        return binary("Mod", a, b)
    # ONNX has no floating point Mod but C's, whose result has the dividend's sign.
    rest = binary("Mod", a, b, fmod=1)
    moved = where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
    # Differences, since an exact 0 of either sign has to become the divisor's 0 with gradient 1.
    zero = _zero(moved)
    return where(b >= 0, zero - (-moved), -(zero - moved))


def _zero(like: Tensor) -> Tensor:
    return promote("remainder", like, 0)[1]


@example("floor_divide([5, -5], 3).compute()", "array([ 1, -2], dtype=int64)")
def floor_divide(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return x1 / x2 rounded down, elementwise and with broadcasting; `//` of tensors.

    For floats it is the largest whole number not above the exact quotient (1.0 // 0.1 is 9.0, because 0.1 is stored
    as a little more than a tenth), and x2 = 0 gives infinity, or NaN.  The gradient is 0.
    """
    a, b = promote("floor_divide", x1, x2)
    quotient = binary("Div", numbers(a, "floor_divide"), b)
    if a.type.dtype in UNSIGNED_INTS:
        return quotient
    if not a.is_floating:
        # ONNX truncates, which is one too high if the quotient is negative and not exact.
        rest = a - quotient * b
        return quotient - cast((rest != 0) & ((rest < 0) != (b < 0)), a.type.dtype)
    # An exact multiple of the divisor is divided, so that rounding lifts no quotient over a whole number.
    whole = round((a - remainder(a, b)) / b)
    # A finite number over an infinite number is just above or below 0.
    beside = where((a != 0) & ((a < 0) != (b < 0)), -1.0, _zero(a))
    result = where((b == 0) | ~isfinite(quotient), quotient, where(isfinite(b), whole, beside))
    # Zeros are in the second branch, without a negated condition: see `copysign`.
    return where((result < 0) | (result > 0) | isnan(result), result, copysign(result, quotient))


__all__ = [
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and", "bitwise_invert",
    "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil", "clip", "copysign", "cos",
    "cosh", "divide", "equal", "erf", "exp", "expm1", "floor", "floor_divide", "greater", "greater_equal", "hypot",
    "isfinite", "isinf", "isnan", "less", "less_equal", "log", "log1p", "log2", "log10", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "multiply", "negative", "not_equal", "positive",
    "pow", "reciprocal", "remainder", "round", "sign", "signbit", "sin", "sinh", "sqrt", "square", "subtract", "tan",
    "tanh", "trunc", "where",
]  # fmt: skip
