"""Functions of one tensor, elementwise: powers, logarithms, trigonometry, rounding.

The two that ONNX lacks and that a composition would round badly (`log1p`, `expm1`) are corrected.
"""

from __future__ import annotations

import math

from dask_ferro.graph.tensor.elementwise.comparison import where
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    cast,
    elementwise,
    floating,
    numbers,
    widened,
)


def exp(x: TensorLike, /) -> Tensor:
    """Return e to the power of x, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.exp([0.0, 1.0]).compute().round(3)
    array([1.   , 2.718], dtype=float32)
    """
    return elementwise("Exp", floating(x, "exp"))


def log(x: TensorLike, /) -> Tensor:
    """Return the natural logarithm, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.log([1.0, 2.0]).compute().round(3)
    array([0.   , 0.693], dtype=float32)
    """
    return elementwise("Log", floating(x, "log"))


def log2(x: TensorLike, /) -> Tensor:
    """Return the logarithm to the base 2, elementwise: the natural one over log(2).

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.log2([1.0, 8.0]).compute().round(3)
    array([0., 3.], dtype=float32)
    """
    return _log_to(2, x, "log2")


def log10(x: TensorLike, /) -> Tensor:
    """Return the logarithm to the base 10, elementwise: the natural one over log(10).

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.log10([1.0, 1000.0]).compute().round(3)
    array([0., 3.], dtype=float32)
    """
    return _log_to(10, x, "log10")


def _log_to(base: int, x: TensorLike, name: str) -> Tensor:
    tensor = floating(x, name)
    return cast(log(widened(tensor)) / math.log(base), tensor.type.dtype)


def sqrt(x: TensorLike, /) -> Tensor:
    """Return the square root, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.sqrt([4.0, 9.0]).compute().round(3)
    array([2., 3.], dtype=float32)
    """
    return elementwise("Sqrt", floating(x, "sqrt"))


def reciprocal(x: TensorLike, /) -> Tensor:
    """Return 1 / x, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.reciprocal([2.0, 4.0]).compute().round(3)
    array([0.5 , 0.25], dtype=float32)
    """
    return elementwise("Reciprocal", floating(x, "reciprocal"))


def sin(x: TensorLike, /) -> Tensor:
    """Return the sine, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.sin([0.0, 1.0]).compute().round(3)
    array([0.   , 0.841], dtype=float32)
    """
    return elementwise("Sin", floating(x, "sin"))


def cos(x: TensorLike, /) -> Tensor:
    """Return the cosine, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.cos([0.0, 1.0]).compute().round(3)
    array([1.  , 0.54], dtype=float32)
    """
    return elementwise("Cos", floating(x, "cos"))


def tan(x: TensorLike, /) -> Tensor:
    """Return the tangent, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.tan([0.0, 1.0]).compute().round(3)
    array([0.   , 1.557], dtype=float32)
    """
    return elementwise("Tan", floating(x, "tan"))


def asin(x: TensorLike, /) -> Tensor:
    """Return the inverse of the sine, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.asin([0.0, 1.0]).compute().round(3)
    array([0.   , 1.571], dtype=float32)
    """
    return elementwise("Asin", floating(x, "asin"))


def acos(x: TensorLike, /) -> Tensor:
    """Return the inverse of the cosine, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.acos([0.0, 1.0]).compute().round(3)
    array([1.571, 0.   ], dtype=float32)
    """
    return elementwise("Acos", floating(x, "acos"))


def atan(x: TensorLike, /) -> Tensor:
    """Return the inverse of the tangent, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.atan([0.0, 1.0]).compute().round(3)
    array([0.   , 0.785], dtype=float32)
    """
    return elementwise("Atan", floating(x, "atan"))


def sinh(x: TensorLike, /) -> Tensor:
    """Return the hyperbolic sine, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.sinh([0.0, 1.0]).compute().round(3)
    array([0.   , 1.175], dtype=float32)
    """
    return elementwise("Sinh", floating(x, "sinh"))


def cosh(x: TensorLike, /) -> Tensor:
    """Return the hyperbolic cosine, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.cosh([0.0, 1.0]).compute().round(3)
    array([1.   , 1.543], dtype=float32)
    """
    return elementwise("Cosh", floating(x, "cosh"))


def tanh(x: TensorLike, /) -> Tensor:
    """Return the hyperbolic tangent, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.tanh([0.0, 1.0]).compute().round(3)
    array([0.   , 0.762], dtype=float32)
    """
    return elementwise("Tanh", floating(x, "tanh"))


def asinh(x: TensorLike, /) -> Tensor:
    """Return the inverse of the hyperbolic sine, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.asinh([0.0, 1.0]).compute().round(3)
    array([0.   , 0.881], dtype=float32)
    """
    return elementwise("Asinh", floating(x, "asinh"))


def acosh(x: TensorLike, /) -> Tensor:
    """Return the inverse of the hyperbolic cosine, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.acosh([1.0, 2.0]).compute().round(3)
    array([0.   , 1.317], dtype=float32)
    """
    return elementwise("Acosh", floating(x, "acosh"))


def atanh(x: TensorLike, /) -> Tensor:
    """Return the inverse of the hyperbolic tangent, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.atanh([0.0, 0.5]).compute().round(3)
    array([0.   , 0.549], dtype=float32)
    """
    return elementwise("Atanh", floating(x, "atanh"))


def erf(x: TensorLike, /) -> Tensor:
    """Return the error function, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.erf([0.0, 1.0]).compute().round(3)
    array([0.   , 0.843], dtype=float32)
    """
    return elementwise("Erf", floating(x, "erf"))


def _rounded(op_type: str, x: TensorLike, name: str) -> Tensor:
    tensor = numbers(asarray(x), name)
    return elementwise(op_type, tensor) if tensor.is_floating else tensor


def floor(x: TensorLike, /) -> Tensor:
    """Return the largest whole number not above x, elementwise; integers are unchanged.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.floor([0.2, 1.7]).compute()
    array([0., 1.], dtype=float32)
    """
    return _rounded("Floor", x, "floor")


def ceil(x: TensorLike, /) -> Tensor:
    """Return the smallest whole number not below x, elementwise; integers are unchanged.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.ceil([0.2, 1.7]).compute()
    array([1., 2.], dtype=float32)
    """
    return _rounded("Ceil", x, "ceil")


def round(x: TensorLike, /) -> Tensor:
    """Return the nearest whole number, halves to even, elementwise; integers are unchanged.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.round([0.5, 1.5, 2.4]).compute()
    array([0., 2., 2.], dtype=float32)
    """
    return _rounded("Round", x, "round")


def trunc(x: TensorLike, /) -> Tensor:
    """Return the whole number that is left without the fraction, elementwise; integers are unchanged.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.trunc([-1.7, 1.7]).compute()
    array([-1.,  1.], dtype=float32)
    """
    tensor = numbers(asarray(x), "trunc")
    return where(tensor < 0, ceil(tensor), floor(tensor)) if tensor.is_floating else tensor


def positive(x: TensorLike, /) -> Tensor:
    """Return x, a tensor of numbers.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.positive([-1, 2]).compute()
    array([-1,  2])
    """
    return numbers(asarray(x), "positive")


def abs(x: TensorLike, /) -> Tensor:
    """Return the absolute value, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.abs([-1.5, 2.0]).compute()
    array([1.5, 2. ], dtype=float32)
    """
    return elementwise("Abs", numbers(asarray(x), "abs"))


def sign(x: TensorLike, /) -> Tensor:
    """Return -1, 0 or 1, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.sign([-3, 0, 5]).compute()
    array([-1,  0,  1])
    """
    return elementwise("Sign", numbers(asarray(x), "sign"))


def square(x: TensorLike, /) -> Tensor:
    """Return x * x, elementwise.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.square([2.0, 3.0]).compute()
    array([4., 9.], dtype=float32)
    """
    tensor = asarray(x)
    return tensor * tensor


def log1p(x: TensorLike, /) -> Tensor:
    """Return log(1 + x), elementwise, accurate for tiny x; its gradient is 1 / (1 + x).

    ONNX has no such function.  The sum u = 1 + x is rounded, and x - (u - 1) is the exact rounding error: log(u) plus
    that error over u is Kahan's correction as a sum.  Its derivative is 1 / u; that of Kahan's quotient cancels near 0.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.log1p([0.0, 1.0]).compute().round(3)
    array([0.   , 0.693], dtype=float32)
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

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.expm1([0.0, 1.0]).compute().round(3)
    array([0.   , 1.718], dtype=float32)
    """
    half = floating(x, "expm1")
    tensor = widened(half)
    # Farther out exp(x) - 1 loses no digits, and the correction may be infinite.
    near = (tensor > -1) & (tensor < 1)
    small = where(near, tensor, 0.0)
    power = exp(small)
    close = (power - 1) + power * (small - log(power))
    return cast(where(near, close, exp(tensor) - 1), half.type.dtype)


__all__ = [
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "exp",
    "expm1", "floor", "log", "log1p", "log2", "log10", "positive", "reciprocal", "round", "sign", "sin",
    "sinh", "sqrt", "square", "tan", "tanh", "trunc",
]  # fmt: skip
