"""Normalization over features or over the batch, with weight and bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import Shape, format_shape, is_static, same_shape, sizes
from dask_ferro.graph.tensor.nn.layers import check_shape, stop_gradient
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.statistical import count_over, reduce
from dask_ferro.graph.tensor.tensor import OPSET, Tensor, TensorLike, cast, emit, floating, promote, widen

# Operators, and the operator sets that have them.
_NODES = {"layer_norm": ("LayerNormalization", OPSET), "rms_norm": ("RMSNormalization", 23)}
# The elements of parameters that are left out.
_FILL = {"weight": 1.0, "bias": 0.0}


@example("nn.layer_norm([[1.0, 3.0]], (2,)).compute().round(3)", "array([[-1.,  1.]], dtype=float32)")
def layer_norm(
    input: TensorLike,
    normalized_shape: Sequence[Dim],
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Return the input normalized over its last dimensions, times weight, plus bias (arXiv:1607.06450).

    `normalized_shape` are these dimensions, such as `x.shape[-1:]`.  Weight and bias have this shape, and are ones
    and zeros by default.  `eps` is added to the variance.
    """
    return _norm("layer_norm", input, normalized_shape, eps, weight=weight, bias=bias)


def _norm(
    where: str, input: TensorLike, normalized_shape: Sequence[Dim], eps: float | None, **parameters: Any
) -> Tensor:
    x, (op_type, opset) = floating(input, where), _NODES[where]
    # A tensor as this argument is a weight without its shape.
    shape = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else ()
    if not shape or not same_shape(x.shape[-len(shape) :], shape):
        wanted = f"the last dimensions of {x!r}, such as {format_shape(x.shape[-1:])}"
        raise InputError(f"{where}: normalized_shape: got {normalized_shape!r}, wanted {wanted}")
    parts = _parameters(where, x, shape, "the normalized shape", parameters)
    epsilon = float(np.finfo(widen(parts[0]).dtype).eps if eps is None else eps)
    return emit(op_type, parts, x.shape, axis=x.ndim - len(shape), epsilon=epsilon, opset=opset)


def _parameters(
    where: str, x: Tensor, shape: Shape, meaning: str, parameters: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Return `x` and its parameters, all of one shape, in one dtype; omitted parameters are ones and zeros."""
    parts = []
    for name, part in parameters.items():
        if part is None and name in _FILL:
            if not is_static(shape):
                raise InputError(
                    f"{where}: {name}: got none, wanted one, because the size of {x!r} is not known"
                )
            part = np.full(sizes(shape), _FILL[name], x.dtype)
        parts.append(floating(part, f"{where}: {name}"))
        check_shape(f"{where}: {name}", parts[-1], shape, meaning)
    return promote(where, x, *parts)


@example("nn.rms_norm([[1.0, 7.0]], (2,)).compute().round(3)", "array([[0.2, 1.4]], dtype=float32)")
def rms_norm(
    input: TensorLike,
    normalized_shape: Sequence[Dim],
    weight: TensorLike | None = None,
    eps: float | None = None,
) -> Tensor:
    """Return the input over the root of its mean square over its last dimensions, times weight.

    Parameters are the same as in `layer_norm` (arXiv:1910.07467); the default of `eps` is the dtype's (1.2e-7 in
    float32 and in half precision).
    """
    return _norm("rms_norm", input, normalized_shape, eps, weight=weight)


@example(
    "nn.batch_norm([[1.0], [3.0]], [1.0], [1.0], [2.0], [0.5]).compute().round(3)",
    "array([[0.5],\n       [4.5]], dtype=float32)",
)
def batch_norm(
    input: TensorLike,
    running_mean: TensorLike,
    running_var: TensorLike,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """Return the input normalized with running statistics, for inference.

    Parameters are the same as in `batch_norm_training`, which uses the statistics of the batch.
    """
    parts = _channels("batch_norm", input, running_mean, running_var, weight, bias)
    data, mean, variance, gain, shift = parts
    return emit("BatchNormalization", [data, gain, shift, mean, variance], data.shape, epsilon=float(eps))


def batch_norm_training(
    input: TensorLike,
    running_mean: TensorLike,
    running_var: TensorLike,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input normalized with the statistics of the batch, and the next running mean and variance.

    On ranks that split the batch the statistics are summed over the ranks; in a pipeline each micro-batch has its own
    statistics (arXiv:1502.03167).

    Parameters
    ----------
    input : Tensor
        (batch, channels, ...).
    running_mean, running_var, weight, bias : Tensor
        (channels). Running statistics are zeros and ones before a training; weight and bias are ones and zeros by
        default.
    momentum : float, optional
        The weight of the batch in the next running statistics; ONNX's attribute is 1 minus it.
    eps : float, optional
        Added to the variance.

    Returns
    -------
    tuple of Tensor
        The normalized input, and the next mean and (unbiased) variance, which no gradient passes through.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> y, mean, variance = ft.nn.batch_norm_training([[1.0], [3.0]], [0.0], [1.0])
    >>> y.compute().round(3)
    array([[-1.],
           [ 1.]], dtype=float32)
    >>> mean.compute(), variance.compute().round(3)
    (array([0.2], dtype=float32), array([1.1], dtype=float32))
    """
    parts = _channels("batch_norm_training", input, running_mean, running_var, weight, bias)
    data, old_mean, old_variance, gain, shift = map(widen, parts)
    axes = (0, *range(2, data.ndim))
    centre = reduce("ReduceMean", data, axes, keepdims=True)
    centred = data - centre
    spread = reduce("ReduceMean", centred * centred, axes, keepdims=True)
    y = centred * (per_channel(gain, data) / xp.sqrt(spread + eps)) + per_channel(shift, data)
    count = count_over(data, axes, data.type.dtype)
    # One value has no variance: the running one stays.
    unbiased = xp.where(count > 1.0, xp.squeeze(spread, axes) * count / (count - 1), old_variance)
    pairs = zip((old_mean, old_variance), (xp.squeeze(centre, axes), unbiased), strict=True)
    dtype = parts[0].type.dtype
    running = (old + momentum * (new - old) for old, new in pairs)
    next_mean, next_variance = (cast(stop_gradient(new), dtype) for new in running)
    return cast(y, dtype), next_mean, next_variance


def _channels(where: str, input: TensorLike, *vectors: TensorLike | None) -> tuple[Tensor, ...]:
    """Return the tensors in one dtype: (batch, channels, ...), and four of (channels)."""
    x = floating(input, where)
    if x.ndim < 2:
        raise InputError(f"{where}: takes (batch, channels, ...), got {x!r}")
    parameters = dict(zip(("running_mean", "running_var", "weight", "bias"), vectors, strict=True))
    return _parameters(where, x, x.shape[1:2], f"one for each channel of {x!r}", parameters)


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return a vector by channel in a shape that broadcasts to (batch, channels, ...)."""
    return xp.expand_dims(values, axis=list(range(1, x.ndim - 1))) if x.ndim > 2 else values
