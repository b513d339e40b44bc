"""Arithmetic of tensors, elementwise, and the larger, the smaller and the bounded one."""

from __future__ import annotations

from dask_ferro.graph.tensor.elementwise.comparison import where
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    binary,
    emit,
    negated,
    numbers,
    promoted,
)


def add(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the sum, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.add([1, 2], [3, 4]).compute()
    array([4, 6])
    """
    return binary("Add", x1, x2)


def subtract(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the difference, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.subtract([1, 2], [3, 5]).compute()
    array([-2, -3])
    """
    return binary("Sub", x1, x2)


def multiply(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the product, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.multiply([1, 2], [3, 4]).compute()
    array([3, 8])
    """
    return binary("Mul", x1, x2)


def divide(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the quotient of floating point numbers, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.divide([1.0, 3.0], 2.0).compute()
    array([0.5, 1.5], dtype=float32)
    """
    return binary("Div", x1, x2, floats=True)


def pow(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return x1 to the power of x2, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.pow([2.0, 3.0], 2.0).compute().round(3)
    array([4., 9.], dtype=float32)
    """
    return binary("Pow", x1, x2)


def maximum(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the larger one, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.maximum([1, 5], [3, 4]).compute()
    array([3, 5])
    """
    return binary("Max", x1, x2)


def minimum(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the smaller one, elementwise and with broadcasting.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.minimum([1, 5], [3, 4]).compute()
    array([1, 4])
    """
    return binary("Min", x1, x2)


def negative(x: TensorLike, /) -> Tensor:
    """Return -x, elementwise; unsigned integers are refused.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.negative([1, -2]).compute()
    array([-1,  2])
    """
    return negated(asarray(x))


def clip(x: TensorLike, /, min: TensorLike | None = None, max: TensorLike | None = None) -> Tensor:
    """Return x, but not below `min` and not above `max` (numbers, or tensors that broadcast).

    At a bound the gradient is that of x, as in PyTorch; where the bounds cross, the result is `max`.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.clip([-1.0, 0.5, 2.0], 0.0, 1.0).compute()
    array([0. , 0.5, 1. ], dtype=float32)
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
    "add", "clip", "divide", "maximum", "minimum", "multiply", "negative", "pow",
    "subtract",
]  # fmt: skip
