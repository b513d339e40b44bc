"""Elementwise functions of tensors, under the array-API standard's names.

Each is one ONNX node; the few functions that ONNX lacks (`square`, `log1p`, `floor_divide`) are compositions.
Shapes and dtypes are checked in `tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.dims import broadcast
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    binary,
    cast,
    elementwise,
    emit,
    floating,
    inverted,
    negated,
    numbers,
    promoted,
    widened,
)

_BOOL = ir.DataType.BOOL


def _unary(name: str, op_type: str, doc: str, *, floats: bool = True) -> Callable[[Any], Tensor]:
    def fn(x: TensorLike, /) -> Tensor:
        return elementwise(op_type, floating(x, name) if floats else numbers(asarray(x), name))

    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = f"{doc}, elementwise."
    return fn


def _binary(name: str, op_type: str, doc: str, **rules: Any) -> Callable[[TensorLike, TensorLike], Tensor]:
    def fn(x1: TensorLike, x2: TensorLike, /) -> Tensor:
        return binary(op_type, x1, x2, **rules)

    fn.__name__ = fn.__qualname__ = name
    fn.__doc__ = f"{doc}, elementwise and with broadcasting."
    return fn


exp = _unary("exp", "Exp", "e to the power of x")
log = _unary("log", "Log", "The natural logarithm")
sqrt = _unary("sqrt", "Sqrt", "The square root")
reciprocal = _unary("reciprocal", "Reciprocal", "1 / x")
sin = _unary("sin", "Sin", "The sine")
cos = _unary("cos", "Cos", "The cosine")
tan = _unary("tan", "Tan", "The tangent")
asin = _unary("asin", "Asin", "The inverse of the sine")
acos = _unary("acos", "Acos", "The inverse of the cosine")
atan = _unary("atan", "Atan", "The inverse of the tangent")
sinh = _unary("sinh", "Sinh", "The hyperbolic sine")
cosh = _unary("cosh", "Cosh", "The hyperbolic cosine")
tanh = _unary("tanh", "Tanh", "The hyperbolic tangent")
asinh = _unary("asinh", "Asinh", "The inverse of the hyperbolic sine")
acosh = _unary("acosh", "Acosh", "The inverse of the hyperbolic cosine")
atanh = _unary("atanh", "Atanh", "The inverse of the hyperbolic tangent")
erf = _unary("erf", "Erf", "The error function")
floor = _unary("floor", "Floor", "The largest whole number not above x")
ceil = _unary("ceil", "Ceil", "The smallest whole number not below x")
round = _unary("round", "Round", "The nearest whole number, halves to even")
abs = _unary("abs", "Abs", "The absolute value", floats=False)
sign = _unary("sign", "Sign", "-1, 0 or 1", floats=False)

add = _binary("add", "Add", "The sum")
subtract = _binary("subtract", "Sub", "The difference")
multiply = _binary("multiply", "Mul", "The product")
divide = _binary("divide", "Div", "The quotient of floating point numbers", floats=True)
pow = _binary("pow", "Pow", "x1 to the power of x2")
maximum = _binary("maximum", "Max", "The larger one")
minimum = _binary("minimum", "Min", "The smaller one")
equal = _binary("equal", "Equal", "Whether both are equal", result=_BOOL)
less = _binary("less", "Less", "Whether x1 < x2", result=_BOOL)
less_equal = _binary("less_equal", "LessOrEqual", "Whether x1 <= x2", result=_BOOL)
greater = _binary("greater", "Greater", "Whether x1 > x2", result=_BOOL)
greater_equal = _binary("greater_equal", "GreaterOrEqual", "Whether x1 >= x2", result=_BOOL)
logical_and = _binary("logical_and", "And", "Whether both are true", only=_BOOL)
logical_or = _binary("logical_or", "Or", "Whether at least one is true", only=_BOOL)
logical_xor = _binary("logical_xor", "Xor", "Whether exactly one is true", only=_BOOL)


def negative(x: TensorLike, /) -> Tensor:
    """Return -x, elementwise; unsigned integers are refused."""
    return negated(asarray(x))


def logical_not(x: TensorLike, /) -> Tensor:
    """Return whether x, a tensor of bools, is false, elementwise."""
    return inverted(asarray(x))


def not_equal(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return whether both differ, elementwise and with broadcasting."""
    return logical_not(equal(x1, x2))


def square(x: TensorLike, /) -> Tensor:
    """Return x * x, elementwise."""
    tensor = asarray(x)
    return tensor * tensor


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
    lost = where(inside, tensor - (total - 1), 0.0) / where(inside, total, 1.0)
    return cast(log(total) + lost, half.type.dtype)


def expm1(x: TensorLike, /) -> Tensor:
    """Return exp(x) - 1, elementwise, accurate for tiny x; its gradient is exp(x).

    ONNX has no such function.  For |x| < 1 the rounded u = exp(x) is the exact power of log(u), so u (x - log(u)) is
    the error of u - 1: Kahan's correction as a sum, whose derivative is right too.
    """
    half = floating(x, "expm1")
    tensor = widened(half)
    # Farther out exp(x) - 1 loses no digits, and the correction may be infinite.
    near = (tensor > -1) & (tensor < 1)
    small = where(near, tensor, 0.0)
    power = exp(small)
    close = (power - 1) + power * (small - log(power))
    return cast(where(near, close, exp(tensor) - 1), half.type.dtype)


def floor_divide(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the quotient of floating point numbers, rounded down; elementwise and with broadcasting."""
    return floor(divide(x1, x2))


def isnan(x: TensorLike, /) -> Tensor:
    """Return whether x is not a number, elementwise."""
    return elementwise("IsNaN", floating(x, "isnan"), _BOOL)


def isinf(x: TensorLike, /) -> Tensor:
    """Return whether x is an infinity, elementwise."""
    return elementwise("IsInf", floating(x, "isinf"), _BOOL)


def where(condition: TensorLike, x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return x1 where the condition is true, else x2; all three broadcast.

    Raises
    ------
    ConfigError
        The condition is not a tensor of bools.
    """
    chosen = asarray(condition)
    if chosen.type.dtype != _BOOL:
        raise ConfigError(f"where: a condition is of bools, got {chosen!r}; compare first")
    a, b = promoted("where", x1, x2)
    return emit("Where", [chosen, a, b], broadcast([chosen.shape, a.shape, b.shape], "where"), a.type.dtype)


def clip(x: TensorLike, /, min: TensorLike | None = None, max: TensorLike | None = None) -> Tensor:
    """Return x, but not below `min` and not above `max` (numbers, or tensors that broadcast).

    At a bound the gradient is that of x, as in PyTorch; where the bounds cross, the result is `max`.
    """
    given = [bound for bound in (min, max) if bound is not None]
    tensor, *bounds = promoted("clip", numbers(asarray(x), "clip"), *given)
    if not bounds:
        return tensor
    rest = iter(bounds)
    low, high = (None if bound is None else next(rest) for bound in (min, max))
    # ONNX's Clip takes only scalars.
    if all(bound.ndim == 0 for bound in bounds):
        return emit("Clip", [tensor, low, *([] if high is None else [high])], tensor.shape)
    if low is not None:
        tensor = where(tensor < low, low, tensor)
    return tensor if high is None else where(tensor > high, high, tensor)


__all__ = [
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atanh", "ceil", "clip", "cos", "cosh",
    "divide", "equal", "erf", "exp", "expm1", "floor", "floor_divide", "greater", "greater_equal",
    "isinf", "isnan", "less", "less_equal", "log", "log1p", "logical_and", "logical_not", "logical_or",
    "logical_xor", "maximum", "minimum", "multiply", "negative", "not_equal", "pow", "reciprocal",
    "round", "sign", "sin", "sinh", "sqrt", "square", "subtract", "tan", "tanh", "where",
]  # fmt: skip
