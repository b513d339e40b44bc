"""Elementwise functions of tensors under the array-API standard's names: one ONNX node each, and choice.

Most are rows: a name, an operator, what is returned, the arguments of an example, and its result.  `composed` has those
that ONNX lacks.  Shapes and dtypes are checked in `tensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import ARITHMETIC, INTEGER, UNSIGNED
from dask_ferro.graph.tensor.dims import broadcast
from dask_ferro.graph.tensor.rows import example, row
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    binary,
    bools,
    elementwise,
    emit,
    floating,
    integers,
    numbers,
    of_kind,
    promoted,
)

Unary = Callable[[TensorLike], Tensor]
Binary = Callable[[TensorLike, TensorLike], Tensor]

_BOOL = ir.DataType.BOOL
_BROADCAST = "elementwise and with broadcasting"


def _unary(name: str, compute: Callable[[Tensor], Tensor], says: str, x: str, shown: str) -> Unary:
    @row(name, says, f"{name}({x}).compute()", f"array({shown})")
    def function(x: TensorLike, /) -> Tensor:
        return compute(asarray(x))

    return function


def _of_floats(name: str, op_type: str, says: str, x: str, shown: str) -> Unary:
    call = f"{name}({x}).compute().round(3)"

    @row(name, f"{says}, elementwise", call, f"array({shown}, dtype=float32)")
    def function(x: TensorLike, /) -> Tensor:
        return elementwise(op_type, floating(x, name))

    return function


def _rounded(name: str, compute: Callable[[Tensor], Tensor], says: str, x: str, shown: str) -> Unary:
    def unless_whole(x: Tensor) -> Tensor:
        return compute(x) if numbers(x, name).is_floating else x

    said = f"{says}, elementwise; integers are unchanged"
    return _unary(name, unless_whole, said, x, f"{shown}, dtype=float32")


def _is(name: str, op_type: str, says: str, x: str, shown: str) -> Unary:
    def unless_whole(x: Tensor) -> Tensor:
        is_floating = numbers(x, name).is_floating
        return elementwise(op_type, x, _BOOL) if is_floating else _inverted(isfinite(x))

    return _unary(name, unless_whole, f"whether x is {says}, elementwise; no integer is", x, shown)


def _binary(name: str, compute: Binary, says: str, arguments: str, shown: str) -> Binary:
    call = f"{name}({arguments}).compute()" + ".round(3)" * (name == "pow")

    @row(name, says, call, f"array({shown})")
    def function(x1: TensorLike, x2: TensorLike, /) -> Tensor:
        return compute(x1, x2)

    return function


def _of_two(name: str, op_type: str, says: str, arguments: str, shown: str, **rules: Any) -> Binary:
    def node(x1: TensorLike, x2: TensorLike) -> Tensor:
        return binary(op_type, x1, x2, **rules)

    return _binary(name, node, f"{says}, {_BROADCAST}", arguments, shown)


_compared, _logical = partial(_of_two, result=_BOOL), partial(_of_two, check=bools)


def _bitwise(name: str, sign: str, op_type: str, logic: str, says: str, shown: str) -> Binary:
    def node(x1: TensorLike, x2: TensorLike) -> Tensor:
        a, b = promoted(op_type, x1, x2)
        if a.type.dtype == _BOOL:
            return binary(logic, a, b, check=bools)
        return binary(op_type, a, b, check=integers)

    said = f"the bits that are set in {says}, {_BROADCAST}; `{sign}` of tensors"
    return _binary(name, node, said, "[6, 5], 3", shown)


def _inverted(x: Tensor) -> Tensor:
    return elementwise("Not", bools(x, "Not"))


def _is_finite(x: Tensor) -> Tensor:
    # The difference of an infinity, or of NaN, and itself is NaN.
    return x - x == 0 if numbers(x, "isfinite").is_floating else x == x


@example("where([True, False], [1, 2], [3, 4]).compute()", "array([1, 4])")
def where(condition: TensorLike, x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return x1 where the condition is true, else x2; all three broadcast."""
    chosen = asarray(condition)
    if chosen.type.dtype != _BOOL:
        raise ConfigError(f"where: a condition is of bools, got {chosen!r}; compare first")
    a, b = promoted("where", x1, x2)
    return emit("Where", [chosen, a, b], broadcast([chosen.shape, a.shape, b.shape], "where"), a.type.dtype)


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
erf = _of_floats("erf", "Erf", "the error function", "[0.0, 1.0]", "[0.   , 0.843]")

isfinite = _unary("isfinite", _is_finite,
    "whether x is neither an infinity nor NaN, elementwise; every integer is finite",
    '[1.0, float("inf"), float("nan")]', "[ True, False, False]")
isnan = _is("isnan", "IsNaN", "not a number", '[1.0, float("nan")]', "[False,  True]")
isinf = _is("isinf", "IsInf", "an infinity", '[1.0, float("inf")]', "[False,  True]")
floor = _rounded("floor", lambda x: elementwise("Floor", x), "the largest whole number not above x",
    "[0.2, 1.7]", "[0., 1.]")
ceil = _rounded("ceil", lambda x: elementwise("Ceil", x), "the smallest whole number not below x",
    "[0.2, 1.7]", "[1., 2.]")
round = _rounded("round", lambda x: elementwise("Round", x), "the nearest whole number, halves to even",
    "[0.5, 1.5, 2.4]", "[0., 2., 2.]")
trunc = _rounded("trunc", lambda x: where(x < 0, ceil(x), floor(x)),
    "the whole number that is left without the fraction", "[-1.7, 1.7]", "[-1.,  1.]")
abs = _unary("abs", lambda x: elementwise("Abs", numbers(x, "abs")), "the absolute value, elementwise",
    "[-1.5, 2.0]", "[1.5, 2. ], dtype=float32")
sign = _unary("sign", lambda x: elementwise("Sign", numbers(x, "sign")), "-1, 0 or 1, elementwise",
    "[-3, 0, 5]", "[-1,  0,  1]")
square = _unary("square", lambda x: x * x, "x * x, elementwise", "[2.0, 3.0]", "[4., 9.], dtype=float32")
positive = _unary("positive", lambda x: numbers(x, "positive"), "x, a tensor of numbers", "[-1, 2]", "[-1,  2]")
negative = _unary("negative",
    lambda x: elementwise("Neg", of_kind(ARITHMETIC - UNSIGNED, "numbers that have a sign", x, "Neg")),
    "-x, elementwise; unsigned integers are refused", "[1, -2]", "[-1,  2]")
logical_not = _unary("logical_not", _inverted, "whether x, a tensor of bools, is false, elementwise",
    "[True, False]", "[False,  True]")
bitwise_invert = _unary("bitwise_invert",
    lambda x: elementwise("BitwiseNot", x) if x.type.dtype in INTEGER else _inverted(x),
    "x with every bit inverted, elementwise; `~` of tensors",
    "[0, 5]", "[-1, -6]")

add = _of_two("add", "Add", "the sum", "[1, 2], [3, 4]", "[4, 6]")
subtract = _of_two("subtract", "Sub", "the difference", "[1, 2], [3, 5]", "[-2, -3]")
multiply = _of_two("multiply", "Mul", "the product", "[1, 2], [3, 4]", "[3, 8]")
divide = _of_two("divide", "Div", "the quotient of floating point numbers", "[1.0, 3.0], 2.0",
    "[0.5, 1.5], dtype=float32", check=floating)
pow = _of_two("pow", "Pow", "x1 to the power of x2", "[2.0, 3.0], 2.0", "[4., 9.], dtype=float32")
maximum = _of_two("maximum", "Max", "the larger one", "[1, 5], [3, 4]", "[3, 5]")
minimum = _of_two("minimum", "Min", "the smaller one", "[1, 5], [3, 4]", "[1, 4]")
equal = _compared("equal", "Equal", "whether both are equal", "[1, 2], [1, 3]", "[ True, False]", check=None)
not_equal = _binary("not_equal", lambda x1, x2: _inverted(equal(x1, x2)), f"whether both differ, {_BROADCAST}",
    "[1, 2], [1, 3]", "[False,  True]")
less = _compared("less", "Less", "whether x1 < x2", "[1, 2], [1, 3]", "[False,  True]")
less_equal = _compared("less_equal", "LessOrEqual", "whether x1 <= x2", "[1, 2], [1, 3]", "[ True,  True]")
greater = _compared("greater", "Greater", "whether x1 > x2", "[1, 4], [1, 3]", "[False,  True]")
greater_equal = _compared("greater_equal", "GreaterOrEqual", "whether x1 >= x2", "[1, 2], [1, 3]", "[ True, False]")
logical_and = _logical("logical_and", "And", "whether both are true", "[True, False], [True, True]", "[ True, False]")
logical_or = _logical("logical_or", "Or", "whether x1 or x2 is true", "[True, False], [False, False]", "[ True, False]")
logical_xor = _logical("logical_xor", "Xor", "whether both differ", "[True, False], [True, True]", "[False,  True]")
bitwise_and = _bitwise("bitwise_and", "&", "BitwiseAnd", "And", "both", "[2, 1]")
bitwise_or = _bitwise("bitwise_or", "|", "BitwiseOr", "Or", "at least one", "[7, 7]")
bitwise_xor = _bitwise("bitwise_xor", "^", "BitwiseXor", "Xor", "exactly one", "[5, 6]")
# fmt: on


@example("clip([-1.0, 0.5, 2.0], 0.0, 1.0).compute()", "array([0. , 0.5, 1. ], dtype=float32)")
def clip(x: TensorLike, /, min: TensorLike | None = None, max: TensorLike | None = None) -> Tensor:
    """Return x, but not below `min` and not above `max` (numbers, or tensors that broadcast).

    At a bound the gradient is that of x, as in PyTorch; where the bounds cross, the result is `max`.
    """
    given = [bound for bound in (min, max) if bound is not None]
    tensor, *bounds = promoted("clip", numbers(x, "clip"), *given)
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
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atanh", "bitwise_and", "bitwise_invert", "bitwise_or",
    "bitwise_xor", "ceil", "clip", "cos", "cosh", "divide", "equal", "erf", "exp", "floor", "greater",
    "greater_equal", "isfinite", "isinf", "isnan", "less", "less_equal", "log", "logical_and", "logical_not",
    "logical_or", "logical_xor", "maximum", "minimum", "multiply", "negative", "not_equal", "positive", "pow",
    "reciprocal", "round", "sign", "sin", "sinh", "sqrt", "square", "subtract", "tan", "tanh", "trunc", "where",
]  # fmt: skip
