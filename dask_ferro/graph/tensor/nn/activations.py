"""Activations, and softmax: functions of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.dims import axis_of
from dask_ferro.graph.tensor.rows import example, row
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, cast, elementwise, floating, widened

_GELU_SINCE = 20


class Activation(Protocol):
    """An elementwise function of one tensor."""

    def __call__(self, input: TensorLike) -> Tensor: ...


def _activation(name: str, says: str, x: str, shown: str, compute: Callable[[Tensor], Tensor]) -> Activation:
    call = f"nn.{name}({x}).compute().round(3)"

    @row(name, f"{says}, elementwise", call, f"array({shown}, dtype=float32)")
    def function(input: TensorLike) -> Tensor:
        return compute(floating(input, name))

    return function


# fmt: off
relu = _activation("relu", "max(x, 0)", "[-1.0, 2.0]", "[0., 2.]", partial(elementwise, "Relu"))
sigmoid = _activation("sigmoid", "1 / (1 + exp(-x)) without overflow", "[0.0, 2.0]", "[0.5  , 0.881]",
    partial(elementwise, "Sigmoid"))
silu = _activation("silu", "x * sigmoid(x)", "[0.0, 2.0]", "[0.   , 1.762]",
    lambda x: cast(widened(x) * sigmoid(widened(x)), x.type.dtype))
softplus = _activation("softplus", "log(1 + exp(x)) without overflow", "[0.0, 2.0]", "[0.693, 2.127]",
    partial(elementwise, "Softplus"))
# fmt: on


@example("nn.gelu([0.0, 2.0]).compute().round(3)", "array([0.   , 1.954], dtype=float32)")
def gelu(input: TensorLike, *, approximate: str = "none") -> Tensor:
    """Return x times the standard normal distribution function at x, elementwise (arXiv:1606.08415).

    `approximate` is "none" for the exact form by the error function, or "tanh" for that by a hyperbolic tangent.
    """
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"gelu: approximate: got {approximate!r}, wanted 'none' or 'tanh'")
    return elementwise("Gelu", floating(input, "gelu"), approximate=approximate, opset=_GELU_SINCE)


def _softmax(op_type: str, where: str, input: TensorLike, axis: int | None) -> Tensor:
    x = floating(input, where)
    if axis is None and x.ndim > 2:
        raise ConfigError(f"{where}: axis: got none for {x!r}, wanted one; axis=-1 is the last dimension")
    # Without an axis PyTorch takes the last one, too, up to two dimensions.
    return elementwise(op_type, x, axis=axis_of(-1 if axis is None else axis, x.ndim, where))


@example("nn.softmax([0.0, 0.0]).compute()", "array([0.5, 0.5], dtype=float32)")
def softmax(input: TensorLike, axis: int | None = None) -> Tensor:
    """Return exp(x) divided by its sum along an axis, without overflow; `axis` may be left out up to 2 dimensions."""
    return _softmax("Softmax", "softmax", input, axis)


@example("nn.log_softmax([0.0, 0.0]).compute().round(3)", "array([-0.693, -0.693], dtype=float32)")
def log_softmax(input: TensorLike, axis: int | None = None) -> Tensor:
    """Return the logarithm of `softmax`, without loss of digits; parameters are those of `softmax`."""
    return _softmax("LogSoftmax", "log_softmax", input, axis)
