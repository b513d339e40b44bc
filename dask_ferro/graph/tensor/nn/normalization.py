"""Normalization over features or over the batch, with scale and bias."""

from __future__ import annotations

from typing import Any

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import alike, axis_of, broadcast, written
from dask_ferro.graph.tensor.nn.layers import stop_gradient
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.statistical import count_over, reduce
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, cast, emit, floating, promoted, widened

# The operator set that has RMSNormalization.
_RMS_SINCE = 23


@example("nn.layer_norm([[1.0, 3.0]], [1.0, 1.0]).compute().round(3)", "array([[-1.,  1.]], dtype=float32)")
def layer_norm(
    x: TensorLike,
    scale: TensorLike,
    bias: TensorLike | None = None,
    /,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
) -> Tensor:
    """Return x normalized over `axis` and the dimensions after it, times scale, plus bias (arXiv:1607.06450).

    Parameters
    ----------
    x : Tensor
    scale, bias : Tensor
        In the shape of the normalized dimensions. The bias may be left out.
    axis : int, optional
        The first normalized dimension.
    epsilon : float, optional
        Added to the variance.
    """
    given = [x, scale] if bias is None else [x, scale, bias]
    return _normalized("LayerNormalization", "layer_norm", given, axis, epsilon)


def _normalized(
    op_type: str, where: str, given: list[TensorLike], axis: int, epsilon: float | None, **since: Any
) -> Tensor:
    """Return the output of a node that normalizes its first input; the others have to fit it."""
    remedy = "use astype; the normalized dimensions are axis= and those after it, not a shape"
    parts = promoted(where, *(floating(part, where, remedy=remedy) for part in given))
    first = axis_of(axis, parts[0].ndim, where)
    for part in parts[1:]:
        if broadcast([parts[0].shape[first:], part.shape], where) != parts[0].shape[first:]:
            raise ConfigError(f"{where}: {part!r} does not fit {written(parts[0].shape[first:])}")
    wide = [widened(part) for part in parts]
    added = float(np.finfo(wide[0].dtype).eps if epsilon is None else epsilon)
    found = emit(op_type, wide, parts[0].shape, axis=first, epsilon=added, **since)
    return cast(found, parts[0].type.dtype)


@example("nn.rms_norm([[1.0, 7.0]], [1.0, 1.0]).compute().round(3)", "array([[0.2, 1.4]], dtype=float32)")
def rms_norm(x: TensorLike, scale: TensorLike, /, *, axis: int = -1, epsilon: float | None = None) -> Tensor:
    """Return x over the root of its mean square over `axis` and the dimensions after it, times scale.

    Parameters are those of `layer_norm` (arXiv:1910.07467); `epsilon` is the dtype's (1.2e-7 in float32 and in half
    precision) if left out, as in PyTorch.
    """
    return _normalized("RMSNormalization", "rms_norm", [x, scale], axis, epsilon, opset=_RMS_SINCE)


@example(
    "nn.batch_norm([[1.0], [3.0]], [1.0], [1.0], [2.0], [0.5]).compute().round(3)",
    "array([[0.5],\n       [4.5]], dtype=float32)",
)
def batch_norm(
    x: TensorLike,
    mean: TensorLike,
    variance: TensorLike,
    scale: TensorLike,
    bias: TensorLike,
    /,
    *,
    epsilon: float = 1e-5,
) -> Tensor:
    """Return x normalized by running statistics, for inference; `batch_norm_training` takes those of the batch.

    Parameters are those of `batch_norm_training`.
    """
    parts = _channels([x, mean, variance, scale, bias], "batch_norm")
    data, centre, spread, gain, shift = map(widened, parts)
    order = [data, gain, shift, centre, spread]
    found = emit("BatchNormalization", order, data.shape, epsilon=float(epsilon))
    return cast(found, parts[0].type.dtype)


def batch_norm_training(
    x: TensorLike,
    mean: TensorLike,
    variance: TensorLike,
    scale: TensorLike,
    bias: TensorLike,
    /,
    *,
    momentum: float = 0.1,
    epsilon: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x normalized by the statistics of the batch, and the next running mean and variance (arXiv:1502.03167).

    On ranks that split the batch the statistics are summed over the ranks; in a pipeline they are those of a
    micro-batch.

    Parameters
    ----------
    x : Tensor
        (batch, channels, ...).
    mean, variance : Tensor
        (channels), the running statistics so far.
    scale, bias : Tensor
        (channels).
    momentum : float, optional
        The weight of the batch in the next running statistics, as in PyTorch; ONNX's attribute is 1 minus it.
    epsilon : float, optional
        Added to the variance.

    Returns
    -------
    tuple of Tensor
        The normalized x, the next mean, and the next variance: that of the batch is unbiased, as in PyTorch.  No
        gradient passes through the next statistics.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> y, mean, variance = ff.nn.batch_norm_training([[1.0], [3.0]], [0.0], [1.0], [1.0], [0.0])
    >>> y.compute().round(3)
    array([[-1.],
           [ 1.]], dtype=float32)
    >>> mean.compute(), variance.compute().round(3)
    (array([0.2], dtype=float32), array([1.1], dtype=float32))
    """
    parts = _channels([x, mean, variance, scale, bias], "batch_norm_training")
    data, old_mean, old_variance, gain, shift = map(widened, parts)
    axes = (0, *range(2, data.ndim))
    centre = reduce("ReduceMean", data, axes, keepdims=True)
    centred = data - centre
    spread = reduce("ReduceMean", centred * centred, axes, keepdims=True)
    y = centred * (per_channel(gain, data) / xp.sqrt(spread + epsilon)) + per_channel(shift, data)
    count = count_over(data, axes, data.type.dtype)
    # One value has no variance: the running one stays.
    unbiased = xp.where(count > 1.0, xp.squeeze(spread, axes) * count / (count - 1), old_variance)
    pairs = zip((old_mean, old_variance), (xp.squeeze(centre, axes), unbiased), strict=True)
    dtype = parts[0].type.dtype
    running = (old + momentum * (new - old) for old, new in pairs)
    next_mean, next_variance = (cast(stop_gradient(new), dtype) for new in running)
    return cast(y, dtype), next_mean, next_variance


def _channels(given: list[TensorLike], where: str) -> tuple[Tensor, ...]:
    """Return the tensors in one dtype: (batch, channels, ...), and four of (channels)."""
    remedy = "use astype; the statistics before a training are zeros and ones"
    parts = promoted(where, *(floating(part, where, remedy=remedy) for part in given))
    data = parts[0]
    if data.ndim < 2:
        raise ConfigError(f"{where}: takes (batch, channels, ...), got {data!r}")
    for part in parts[1:]:
        if not alike(part.shape, data.shape[1:2]):
            wanted = f"{written(data.shape[1:2])}, one for each channel of {data!r}"
            raise ConfigError(f"{where}: got {part!r}, wanted {wanted}")
    return parts


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Return a vector by channel in a shape that broadcasts to (batch, channels, ...)."""
    return xp.expand_dims(values, axis=list(range(1, x.ndim - 1))) if x.ndim > 2 else values
