"""Activation functions, softmax among them.

In each of them an intermediate overflows only where the result does (softplus, mish), or overflows to an
infinity that the next step turns into the correct limit (sigmoid).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Build, Fn, Kernel, Op, axis_shape, only
from dask_ferro.engines.array.ops.elementwise import erf
from dask_ferro.graph.ir.dtypes import FLOAT, NUMERIC

# The standard's defaults, to the last digit of its text.
SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def _leaky_relu(xp: Namespace, op: Op) -> Fn:
    alpha = op.get("alpha", 0.01)
    # With such slopes the result is the larger of both, which takes half the time of a `where`.
    if 0 <= alpha <= 1:
        return lambda x: xp.maximum(x, alpha * x)
    return lambda x: xp.where(x < 0, alpha * x, x)


def _thresholded_relu(xp: Namespace, op: Op) -> Fn:
    alpha = op.get("alpha", 1.0)
    return lambda x: xp.where(x > alpha, x, xp.zeros_like(x))


def _elu(xp: Namespace, op: Op) -> Fn:
    alpha = op.get("alpha", 1.0)
    return lambda x: xp.where(x < 0, alpha * xp.expm1(x), x)


def _celu(xp: Namespace, op: Op) -> Fn:
    alpha = op.get("alpha", 1.0)
    return lambda x: xp.maximum(x, 0) + xp.minimum(alpha * xp.expm1(x / alpha), 0)


def _selu(xp: Namespace, op: Op) -> Fn:
    alpha, gamma = op.get("alpha", SELU_ALPHA), op.get("gamma", SELU_GAMMA)
    return lambda x: gamma * xp.where(x > 0, x, alpha * xp.expm1(x))


def sigmoid(xp: Namespace) -> Fn:
    """Return the function 1 / (1 + exp(-x))."""
    # exp may overflow to infinity, whose reciprocal is the correct 0.
    return lambda x: 1 / (1 + xp.exp(-x))


def softplus(xp: Namespace) -> Fn:
    """Return the function log(1 + exp(x))."""
    # In this form exp gets no positive number, and does not overflow.
    return lambda x: xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


def _hard_sigmoid(xp: Namespace, op: Op) -> Fn:
    alpha, beta = op.get("alpha", 0.2), op.get("beta", 0.5)
    return lambda x: xp.minimum(xp.maximum(alpha * x + beta, 0), 1)


def _mish(xp: Namespace, op: Op) -> Fn:
    plus = softplus(xp)
    return lambda x: x * xp.tanh(plus(x))


def _swish(xp: Namespace, op: Op) -> Fn:
    alpha = op.get("alpha", 1.0)
    return lambda x: x / (1 + xp.exp(-alpha * x))


def _swiglu(xp: Namespace, op: Op) -> Fn:
    swish = _swish(xp, op)
    return lambda gate, value: swish(gate) * value


def _gelu(xp: Namespace, op: Op) -> Fn:
    if op.get("approximate", "none") == "tanh":
        c = math.sqrt(2 / math.pi)
        return lambda x: 0.5 * x * (1 + xp.tanh(c * (x + 0.044715 * x * x * x)))
    error = erf(xp)
    return lambda x: 0.5 * x * (1 + error(x * math.sqrt(0.5)))


def _shrink(xp: Namespace, op: Op) -> Fn:
    bias, bound = op.get("bias", 0.0), op.get("lambd", 0.5)

    def fn(x: Array) -> Array:
        return xp.where(x > bound, x - bias, xp.where(x < -bound, x + bias, xp.zeros_like(x)))

    return fn


def _along_axis(make: Callable[[Namespace], Callable[[Array, int], Array]]) -> Build:
    """Return the builder of the kernel that applies the function of an array and an axis that `make` returns."""

    def build(xp: Namespace, op: Op) -> Fn:
        full = make(xp)

        def fn(x: Array, axis: int) -> Array:
            # The namespaces raise for the maximum of no elements; the result has no elements either.
            return x if 0 in x.shape else full(x, axis)

        axis: int = op.get("axis", -1 if op.opset >= 13 else 1)
        if op.opset >= 13:
            return lambda x: fn(x, axis)

        # Before opset 13 these operators took a matrix, with `axis` and all later axes as its columns.
        def flattened(x: Array) -> Array:
            rows = math.prod(x.shape[: axis if axis >= 0 else axis + x.ndim])
            columns = math.prod(x.shape[axis:]) if axis < x.ndim else 1
            return xp.reshape(fn(xp.reshape(x, (rows, columns)), 1), x.shape)

        return flattened

    return build


def softmax(xp: Namespace) -> Callable[[Array, int], Array]:
    """Return the function softmax(x, axis)."""

    def fn(x: Array, axis: int) -> Array:
        # The maximum is subtracted: exp overflows beyond 88 in float32, beyond 11 in float16.
        e = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
        e /= xp.sum(e, axis=axis, keepdims=True)
        return e

    return fn


def _log_softmax(xp: Namespace) -> Callable[[Array, int], Array]:
    def fn(x: Array, axis: int) -> Array:
        shifted = x - xp.max(x, axis=axis, keepdims=True)
        return shifted - xp.log(xp.sum(xp.exp(shifted), axis=axis, keepdims=True))

    return fn


def _hardmax(xp: Namespace) -> Callable[[Array, int], Array]:
    def fn(x: Array, axis: int) -> Array:
        # Only the first of several equal maxima is 1, so comparing with the maximum is not enough.
        first = xp.expand_dims(xp.argmax(x, axis=axis), axis=axis)
        places = xp.arange(x.shape[axis], dtype=first.dtype)
        places = xp.reshape(places, axis_shape(axis % x.ndim, x.ndim))
        return xp.astype(places == first, x.dtype)

    return fn


TABLE: dict[str, Kernel] = {
    "Relu": Kernel(lambda xp, op: lambda x: xp.maximum(x, 0), (NUMERIC,)),
    "LeakyRelu": Kernel(_leaky_relu, (FLOAT,)),
    "PRelu": Kernel(lambda xp, op: lambda x, slope: xp.where(x < 0, slope * x, x), (NUMERIC,)),
    "ThresholdedRelu": Kernel(_thresholded_relu, (FLOAT,)),
    "Elu": Kernel(_elu, (FLOAT,)),
    "Celu": Kernel(_celu, (FLOAT,)),
    "Selu": Kernel(_selu, (FLOAT,)),
    "Sigmoid": Kernel(lambda xp, op: sigmoid(xp), (FLOAT,)),
    "Softplus": Kernel(lambda xp, op: softplus(xp), (FLOAT,)),
    "Softsign": Kernel(lambda xp, op: lambda x: x / (1 + xp.abs(x)), (FLOAT,)),
    "HardSigmoid": Kernel(_hard_sigmoid, (FLOAT,)),
    "HardSwish": Kernel(lambda xp, op: lambda x: x * xp.minimum(xp.maximum(x / 6 + 0.5, 0), 1), (FLOAT,)),
    "Mish": Kernel(_mish, (FLOAT,)),
    "Swish": Kernel(_swish, (FLOAT,)),
    "SwiGLU": Kernel(_swiglu, (FLOAT,)),
    "Gelu": Kernel(_gelu, (FLOAT,), when=only("approximate", ("none", "tanh"), "none")),
    "Shrink": Kernel(_shrink, (FLOAT,)),
    "Softmax": Kernel(_along_axis(softmax), (FLOAT,)),
    "LogSoftmax": Kernel(_along_axis(_log_softmax), (FLOAT,)),
    "Hardmax": Kernel(_along_axis(_hardmax), (FLOAT,)),
}
