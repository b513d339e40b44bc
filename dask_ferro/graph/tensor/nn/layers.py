"""Activations, linear layers, embeddings, and values without a gradient; and checks of shapes and indices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.dtypes import INDEX
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import Shape, axis_of, format_shape, same_dim, same_shape
from dask_ferro.graph.tensor.manipulation import scalar_size
from dask_ferro.graph.tensor.rows import example, row
from dask_ferro.graph.tensor.tensor import (
    Node,
    Tensor,
    TensorLike,
    asarray,
    cast,
    constant_of,
    elementwise,
    floating,
    promote,
    widen,
)

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
    lambda x: cast(widen(x) * sigmoid(widen(x)), x.type.dtype))
softplus = _activation("softplus", "log(1 + exp(x)) without overflow", "[0.0, 2.0]", "[0.693, 2.127]",
    partial(elementwise, "Softplus"))
# fmt: on


@example("nn.gelu([0.0, 2.0]).compute().round(3)", "array([0.   , 1.954], dtype=float32)")
def gelu(input: TensorLike, *, approximate: str = "none") -> Tensor:
    """Return x times the standard normal distribution function at x, elementwise (arXiv:1606.08415).

    `approximate` is "none" for the exact form with the error function, or "tanh" for the form with a hyperbolic
    tangent.
    """
    if approximate not in ("none", "tanh"):
        raise InputError(f"gelu: approximate: got {approximate!r}, wanted 'none' or 'tanh'")
    return elementwise("Gelu", floating(input, "gelu"), approximate=approximate, opset=_GELU_SINCE)


def _softmax(op_type: str, where: str, input: TensorLike, axis: int | None) -> Tensor:
    x = floating(input, where)
    if axis is None and x.ndim > 2:
        raise InputError(f"{where}: axis: got none for {x!r}, wanted one; axis=-1 is the last dimension")
    # PyTorch's default is the last axis too, up to two dimensions.
    return elementwise(op_type, x, axis=axis_of(-1 if axis is None else axis, x.ndim, where))


@example("nn.softmax([0.0, 0.0]).compute()", "array([0.5, 0.5], dtype=float32)")
def softmax(input: TensorLike, axis: int | None = None) -> Tensor:
    """Return exp(x) divided by its sum along an axis, without overflow; `axis` may be left out up to 2 dimensions."""
    return _softmax("Softmax", "softmax", input, axis)


@example("nn.log_softmax([0.0, 0.0]).compute().round(3)", "array([-0.693, -0.693], dtype=float32)")
def log_softmax(input: TensorLike, axis: int | None = None) -> Tensor:
    """Return the logarithm of `softmax`, without loss of digits; parameters are the same as in `softmax`."""
    return _softmax("LogSoftmax", "log_softmax", input, axis)


def check_shape(what: str, x: Tensor, shape: Shape, meaning: str) -> None:
    """Raise `InputError` if `x`, the argument `what`, cannot have a shape of this meaning."""
    if not same_shape(x.shape, shape):
        raise InputError(f"{what}: got {x!r}, wanted {format_shape(shape)}, {meaning}")


def check_range(what: str, indices: Tensor, size: Dim, remedy: str, ignored: int | None = None) -> None:
    """Raise `InputError` if indices are constants, and one that is not ignored is below 0 or not below the size."""
    if (known := constant_of(indices)) is None:
        return
    wrong = ((known < 0) | (known >= size) if isinstance(size, int) else known < 0) & (known != ignored)
    if wrong.any():
        wanted = f"numbers from 0 to {size - 1}" if isinstance(size, int) else "numbers of at least 0"
        raise InputError(f"{what}: got {known[wrong].flat[0]}, wanted {wanted}; {remedy}")


@example("nn.linear([[1.0, 2.0]], [[3.0, 4.0]], [0.5]).compute()", "array([[11.5]], dtype=float32)")
def linear(input: TensorLike, weight: TensorLike, bias: TensorLike | None = None) -> Tensor:
    """Return input @ weight.T + bias.

    Parameters
    ----------
    input : Tensor
        (..., features in).
    weight : Tensor
        (features out, features in), or (features in) for a single feature out, which adds no dimension to the result.
    bias : Tensor, optional
        (features out).
    """
    data, w = promote("linear", asarray(input), asarray(weight))
    if not data.ndim or w.ndim not in (1, 2) or not same_dim(data.shape[-1], w.shape[-1]):
        wanted = f"(features out, features in) for {data!r}, as in PyTorch"
        raise InputError(f"linear: weight: got {w!r}, wanted {wanted}; weight.T if it is (in, out)")
    product = xp.matmul(data, w.mT if w.ndim == 2 else w)
    if bias is None:
        return product
    result = product + bias
    if not same_shape(result.shape, product.shape):
        raise InputError(f"linear: bias: got {asarray(bias)!r}, wanted (features out) of {w!r}; reshape it")
    return result


@example("nn.embedding([1, 0], [[1.0], [2.0]]).compute()", "array([[2.],\n       [1.]], dtype=float32)")
def embedding(input: TensorLike, weight: TensorLike) -> Tensor:
    """Return the rows of a table at indices: the shape of the indices and (features), in the dtype of the weight.

    The input has indices of at least 0, int32 or int64, of any shape; the weight is (entries, features). Constant
    indices without a row raise `InputError`. The engine refuses others, like PyTorch; if an index is below 0, its
    message has the index less the number of entries.
    """
    indices, table = asarray(input), asarray(weight)
    if indices.type.dtype not in INDEX or table.ndim != 2:
        got = f"got {indices!r} and {table!r}, wanted int32 or int64 indices and then a weight of (entries, features)"
        raise InputError(f"embedding: {got}; the order is PyTorch's: embedding(indices, weight)")
    check_range("embedding: input", indices, table.shape[0], f"they are rows of {table!r}")
    if constant_of(indices) is None:
        # Below 0 an index would count from the end; this far below, the engine refuses it.
        below = indices - scalar_size(table, 0, indices.type.dtype)
        indices = xp.where(indices < 0, below, indices)
    return xp.take(table, indices, axis=0)


@example("nn.stop_gradient([1.0, 2.0]).compute()", "array([1., 2.], dtype=float32)")
def stop_gradient(input: TensorLike) -> Tensor:
    """Return the values as a constant for gradients: none passes through it (`detach` in PyTorch)."""
    tensor = asarray(input)
    return Tensor(Node("Identity", (tensor,), (tensor.type,), {}, is_stop=True), 0, tensor.type)
