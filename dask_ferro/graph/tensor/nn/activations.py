"""Activations, and softmax: functions of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.dims import axis_of
from dask_ferro.graph.tensor.elementwise import Unary
from dask_ferro.graph.tensor.rows import example, row
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, cast, elementwise, floating, widened

_GELU_SINCE = 20


def _activation(name: str, says: str, x: str, shown: str, compute: Callable[[Tensor], Tensor]) -> Unary:
    call = f"nn.{name}({x}).compute().round(3)"

    @row(name, f"{says}, elementwise", call, f"array({shown}, dtype=float32)")
    def function(x: TensorLike, /) -> Tensor:
        return compute(floating(x, name))

    return function


def _in_float32(op_type: str, x: Tensor, **attributes: Any) -> Tensor:
    """Return an elementwise node or a softmax, computed in float32 if `x` has half precision.

    Otherwise engines would round each of their own steps, or have no such op in bfloat16.
    """
    return cast(elementwise(op_type, widened(x), **attributes), x.type.dtype)


# fmt: off
relu = _activation("relu", "max(x, 0)", "[-1.0, 2.0]", "[0., 2.]", partial(elementwise, "Relu"))
sigmoid = _activation("sigmoid", "1 / (1 + exp(-x)) without overflow", "[0.0, 2.0]", "[0.5  , 0.881]",
    partial(_in_float32, "Sigmoid"))
silu = _activation("silu", "x * sigmoid(x)", "[0.0, 2.0]", "[0.   , 1.762]",
    lambda x: cast(widened(x) * sigmoid(widened(x)), x.type.dtype))
softplus = _activation("softplus", "log(1 + exp(x)) without overflow", "[0.0, 2.0]", "[0.693, 2.127]",
    partial(_in_float32, "Softplus"))
# fmt: on


@example("nn.gelu([0.0, 2.0]).compute().round(3)", "array([0.   , 1.954], dtype=float32)")
def gelu(x: TensorLike, /, *, approximate: str = "none") -> Tensor:
    """Return x times the standard normal distribution function at x, elementwise (arXiv:1606.08415).

    Parameters
    ----------
    x : Tensor
    approximate : {"none", "tanh"}, optional
        The exact form by the error function, or the approximation by a hyperbolic tangent.
    """
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"gelu: approximate is 'none' or 'tanh', got {approximate!r}")
    return _in_float32("Gelu", floating(x, "gelu"), approximate=approximate, opset=_GELU_SINCE)


@example("nn.softmax([0.0, 0.0]).compute()", "array([0.5, 0.5], dtype=float32)")
def softmax(x: TensorLike, /, *, axis: int | None = None) -> Tensor:
    """Return exp(x) divided by its sum along an axis, without overflow; `axis` may be left out up to 2 dimensions."""
    tensor = floating(x, "softmax")
    return _in_float32("Softmax", tensor, axis=_axis(axis, tensor, "softmax"))


@example("nn.log_softmax([0.0, 0.0]).compute().round(3)", "array([-0.693, -0.693], dtype=float32)")
def log_softmax(x: TensorLike, /, *, axis: int | None = None) -> Tensor:
    """Return the logarithm of `softmax`, without loss of digits; parameters are those of `softmax`."""
    tensor = floating(x, "log_softmax")
    return _in_float32("LogSoftmax", tensor, axis=_axis(axis, tensor, "log_softmax"))


def _axis(axis: int | None, x: Tensor, where: str) -> int:
    """Return the axis from the front; the last one if left out, where PyTorch takes the last one too."""
    if axis is None and x.ndim > 2:
        raise ConfigError(f"{where}: axis: got none for {x!r}, wanted one; axis=-1 is the last dimension")
    return axis_of(-1 if axis is None else axis, x.ndim, where)
