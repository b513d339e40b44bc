"""Activation functions, softmax among them.

In each of them an intermediate overflows only if the result does (softplus, mish), or overflows to an infinity that
the next step turns into the correct limit (sigmoid).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Build, Fn, Kernel, Op, axis_shape, one_of, row
from dask_ferro.engines.array.ops.elementwise import erf
from dask_ferro.graph.ir.dtypes import FLOAT, NUMERIC

# The standard's defaults, to the last digit of its text.
SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def _leaky_relu(xp: Namespace, x: Array, alpha: float) -> Array:
    # For such slopes the result is the larger of both, which takes half the time of a `where`.
    return xp.maximum(x, alpha * x) if 0 <= alpha <= 1 else xp.where(x < 0, alpha * x, x)


def sigmoid(xp: Namespace, x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    # exp may overflow to infinity, whose reciprocal is the correct 0.
    return 1 / (1 + xp.exp(-x))


def softplus(xp: Namespace, x: Array) -> Array:
    """Return log(1 + exp(x))."""
    # In this form exp gets no positive number, and does not overflow.
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


def _swish(xp: Namespace, x: Array, alpha: float) -> Array:
    return x / (1 + xp.exp(-alpha * x))


def _gelu(xp: Namespace, x: Array, approximate: str) -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + erf(xp, x * math.sqrt(0.5)))


def _shrink(xp: Namespace, x: Array, bias: float, lambd: float) -> Array:
    return xp.where(x > lambd, x - bias, xp.where(x < -lambd, x + bias, xp.zeros_like(x)))


def _along_axis(full: Callable[[Namespace, Array, int], Array]) -> Build:
    """Return the builder of the kernel that applies a function of an array and an axis."""

    def build(xp: Namespace, op: Op) -> Fn:
        def fn(x: Array, axis: int) -> Array:
            # The namespaces raise for the maximum of no elements; the result has no elements either.
            return x if 0 in x.shape else full(xp, x, axis)

        axis: int = op.get("axis", -1 if op.opset >= 13 else 1)
        if op.opset >= 13:
            return partial(fn, axis=axis)

        # Before opset 13 these operators took a matrix, with `axis` and all later axes as its columns.
        def flattened(x: Array) -> Array:
            rows = math.prod(x.shape[: axis if axis >= 0 else axis + x.ndim])
            columns = math.prod(x.shape[axis:]) if axis < x.ndim else 1
            return xp.reshape(fn(xp.reshape(x, (rows, columns)), 1), x.shape)

        return flattened

    return build


def _softmax(xp: Namespace, x: Array, axis: int) -> Array:
    # The maximum is subtracted: exp overflows beyond 88 in float32, beyond 11 in float16.
    e = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    e /= xp.sum(e, axis=axis, keepdims=True)
    return e


def _log_softmax(xp: Namespace, x: Array, axis: int) -> Array:
    shifted = x - xp.max(x, axis=axis, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axis, keepdims=True))


def _hardmax(xp: Namespace, x: Array, axis: int) -> Array:
    # Only the first of several equal maxima is 1, so comparing with the maximum is not enough.
    first = xp.expand_dims(xp.argmax(x, axis=axis), axis=axis)
    places = xp.arange(x.shape[axis], dtype=first.dtype)
    places = xp.reshape(places, axis_shape(axis % x.ndim, x.ndim))
    return xp.astype(places == first, x.dtype)


TABLE: dict[str, Kernel] = {
    "Relu": row(lambda xp, x: xp.maximum(x, 0), NUMERIC),
    "LeakyRelu": row(_leaky_relu, FLOAT, alpha=0.01),
    "PRelu": row(lambda xp, x, slope: xp.where(x < 0, slope * x, x), NUMERIC),
    "ThresholdedRelu": row(lambda xp, x, alpha: xp.where(x > alpha, x, xp.zeros_like(x)), FLOAT, alpha=1.0),
    "Elu": row(lambda xp, x, alpha: xp.where(x < 0, alpha * xp.expm1(x), x), FLOAT, alpha=1.0),
    "Celu": row(
        lambda xp, x, alpha: xp.maximum(x, 0) + xp.minimum(alpha * xp.expm1(x / alpha), 0), FLOAT, alpha=1.0
    ),
    "Selu": row(
        lambda xp, x, alpha, gamma: gamma * xp.where(x > 0, x, alpha * xp.expm1(x)),
        FLOAT,
        alpha=SELU_ALPHA,
        gamma=SELU_GAMMA,
    ),
    "Sigmoid": row(sigmoid, FLOAT),
    "Softplus": row(softplus, FLOAT),
    "Softsign": row(lambda xp, x: x / (1 + xp.abs(x)), FLOAT),
    "HardSigmoid": row(
        lambda xp, x, alpha, beta: xp.minimum(xp.maximum(alpha * x + beta, 0), 1), FLOAT, alpha=0.2, beta=0.5
    ),
    "HardSwish": row(lambda xp, x: x * xp.minimum(xp.maximum(x / 6 + 0.5, 0), 1), FLOAT),
    "Mish": row(lambda xp, x: x * xp.tanh(softplus(xp, x)), FLOAT),
    "Swish": row(_swish, FLOAT, alpha=1.0),
    "SwiGLU": row(lambda xp, gate, value, alpha: _swish(xp, gate, alpha) * value, FLOAT, alpha=1.0),
    "Gelu": row(_gelu, FLOAT, when=one_of("approximate", ("none", "tanh"), "none"), approximate="none"),
    "Shrink": row(_shrink, FLOAT, bias=0.0, lambd=0.5),
    "Softmax": Kernel(_along_axis(_softmax), (FLOAT,)),
    "LogSoftmax": Kernel(_along_axis(_log_softmax), (FLOAT,)),
    "Hardmax": Kernel(_along_axis(_hardmax), (FLOAT,)),
}
