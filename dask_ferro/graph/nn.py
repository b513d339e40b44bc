"""Layers as functions of tensors: activations, normalization, attention, convolution, losses.

No layer holds parameters: they are arguments, so that one function serves for inference, for training and for
weights that come out of a file.  Where ONNX has one operator for it, that is written; attention is written out
as products and a softmax, since that is what gets sharded, and what every engine computes in every dtype.
Images are (batch, channels, height, width).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.array_api import expand_dims, matmul, mean, squeeze, sum, take, take_along_axis, where
from dask_ferro.graph.shapes import Dim
from dask_ferro.graph.tensor import Tensor, asarray, elementwise, emit, promoted
from dask_ferro.graph.tensor_dims import axis_of, broadcast, same, window_size, written
from dask_ferro.graph.tensor_layout import positions

_GELU_SINCE = 20
Pair = int | Sequence[int]


def _floating(x: Any, where_: str) -> Tensor:
    tensor = asarray(x)
    if not tensor.is_floating:
        raise ConfigError(f"{where_}: takes floating point numbers, got {tensor!r}; use astype")
    return tensor


# ---- activations -------------------------------------------------------------------------------------------


def relu(x: Any, /) -> Tensor:
    """max(x, 0), elementwise."""
    return elementwise("Relu", _floating(x, "relu"))


def sigmoid(x: Any, /) -> Tensor:
    """1 / (1 + exp(-x)), elementwise and without overflow."""
    return elementwise("Sigmoid", _floating(x, "sigmoid"))


def silu(x: Any, /) -> Tensor:
    """x * sigmoid(x), elementwise."""
    tensor = _floating(x, "silu")
    return tensor * sigmoid(tensor)


def softplus(x: Any, /) -> Tensor:
    """log(1 + exp(x)), elementwise and without overflow."""
    return elementwise("Softplus", _floating(x, "softplus"))


def gelu(x: Any, /, *, approximate: str = "none") -> Tensor:
    """x times the standard normal distribution function at x, elementwise (arXiv:1606.08415).

    Parameters
    ----------
    x : Tensor
    approximate : {"none", "tanh"}, optional
        By the error function, or by a hyperbolic tangent.
    """
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"gelu: approximate is 'none' or 'tanh', got {approximate!r}")
    return elementwise("Gelu", _floating(x, "gelu"), approximate=approximate, opset=_GELU_SINCE)


def softmax(x: Any, /, *, axis: int = -1) -> Tensor:
    """exp(x) over its sum along an axis, without overflow."""
    tensor = _floating(x, "softmax")
    return elementwise("Softmax", tensor, axis=axis_of(axis, tensor.ndim, "softmax"))


def log_softmax(x: Any, /, *, axis: int = -1) -> Tensor:
    """The logarithm of `softmax`, without loss of digits."""
    tensor = _floating(x, "log_softmax")
    return elementwise("LogSoftmax", tensor, axis=axis_of(axis, tensor.ndim, "log_softmax"))


# ---- layers ------------------------------------------------------------------------------------------------


def linear(x: Any, weight: Any, bias: Any = None, /) -> Tensor:
    """x @ weight + bias, with a weight of (features in, features out)."""
    product = matmul(x, weight)
    return product if bias is None else product + bias


def embedding(table: Any, indices: Any, /) -> Tensor:
    """The rows of `table` (entries, features) at `indices`, which get a dimension of features behind them."""
    return take(table, indices, axis=0)


def layer_norm(x: Any, scale: Any, bias: Any = None, /, *, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    """x with mean 0 and variance 1 over `axis` and all behind it, times scale, plus bias (arXiv:1607.06450).

    Parameters
    ----------
    x : Tensor
    scale, bias : Tensor
        Of the normalized dimensions. The bias may be left out.
    axis : int, optional
        The first normalized dimension.
    epsilon : float, optional
        Added to the variance.

    Raises
    ------
    ConfigError
        Shapes that do not go together, or dtypes that do not mix.
    """
    given = [x, scale] if bias is None else [x, scale, bias]
    parts = promoted("layer_norm", *(_floating(part, "layer_norm") for part in given))
    first = axis_of(axis, parts[0].ndim, "layer_norm")
    for part in parts[1:]:
        if broadcast([parts[0].shape[first:], part.shape], "layer_norm") != parts[0].shape[first:]:
            raise ConfigError(f"layer_norm: {part!r} does not fit {written(parts[0].shape[first:])}")
    return emit("LayerNormalization", list(parts), parts[0].shape, axis=first, epsilon=float(epsilon))


def attention(
    q: Any, k: Any, v: Any, /, *, mask: Any = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """softmax(q k^T * scale) v, over the last two dimensions (arXiv:1706.03762); the others broadcast.

    Parameters
    ----------
    q : Tensor
        (..., queries, size).
    k : Tensor
        (..., keys, size).
    v : Tensor
        (..., keys, features).
    mask : Tensor, optional
        Of bools, true where a query may see a key; or of numbers, added to the scores. Broadcasts.
    is_causal : bool, optional
        Whether a query sees no key behind its own position.
    scale : float, optional
        1 / sqrt(size) if left out.

    Returns
    -------
    Tensor
        (..., queries, features).

    Raises
    ------
    ConfigError
        Shapes or dtypes that do not go together, or an unknown size without a scale.
    """
    queries, keys, values = promoted("attention", *(_floating(part, "attention") for part in (q, k, v)))
    size = queries.shape[-1]
    if scale is None and not isinstance(size, int):
        raise ConfigError(f"attention: the size of {queries!r} is not known; give a scale")
    factor = 1 / math.sqrt(size) if scale is None and isinstance(size, int) else scale
    scores = _masked((queries @ keys.mT) * factor, mask)
    return softmax(causal(scores) if is_causal else scores) @ values


def _masked(scores: Tensor, mask: Any) -> Tensor:
    if mask is None:
        return scores
    given = asarray(mask)
    return where(given, scores, float("-inf")) if given.type.dtype == ir.DataType.BOOL else scores + given


def causal(scores: Tensor) -> Tensor:
    """Scores of queries (rows) by keys (columns), -inf for keys that come later than the query."""
    rows = expand_dims(positions(scores, scores.ndim - 2), axis=1)
    return where(positions(scores, scores.ndim - 1) <= rows, scores, float("-inf"))


# ---- windows -----------------------------------------------------------------------------------------------


def _two(value: Pair, name: str) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(n, int) and n >= 0 for n in pair):
        raise ConfigError(f"{name}: a whole number, or one for height and one for width, got {value!r}")
    return pair


def _image(x: Any, where_: str) -> Tensor:
    tensor = _floating(x, where_)
    if tensor.ndim != 4:
        raise ConfigError(f"{where_}: takes (batch, channels, height, width), got {tensor!r}")
    return tensor


def _spatial(
    x: Tensor, kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair, where_: str
) -> tuple[tuple[Dim, ...], dict[str, Any]]:
    """Height and width of the result, and the attributes of the node."""
    strides, pads, spans = _two(stride, "stride"), _two(padding, "padding"), _two(dilation, "dilation")
    shape = tuple(
        window_size(x.shape[2 + i], kernel[i], strides[i], (pads[i], pads[i]), spans[i], where_)
        for i in (0, 1)
    )
    return shape, {"strides": list(strides), "pads": [*pads, *pads], "dilations": list(spans)}


def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    /,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Images convolved with a weight of (channels out, channels in / groups, height, width).

    Parameters
    ----------
    x : Tensor
        (batch, channels in, height, width).
    weight, bias : Tensor
        The bias is of (channels out), and may be left out.
    stride, padding, dilation : int or pair of int, optional
        Of height and width; padding is on both sides.
    groups : int, optional
        Parts of the channels that are convolved apart.

    Raises
    ------
    ConfigError
        Channels that do not meet, or a window larger than the image.
    """
    image = _image(x, "conv2d")
    given = [image, weight] if bias is None else [image, weight, bias]
    parts = promoted("conv2d", *map(asarray, given))
    w = parts[1]
    if w.ndim != 4 or not (isinstance(w.shape[2], int) and isinstance(w.shape[3], int)):
        raise ConfigError(f"conv2d: a weight is (out, in / groups, height, width), got {w!r}")
    if isinstance(w.shape[1], int) and not same(image.shape[1], w.shape[1] * groups):
        raise ConfigError(f"conv2d: {image.shape[1]!r} channels of {image!r} meet {w!r} in {groups} groups")
    shape, attributes = _spatial(image, (w.shape[2], w.shape[3]), stride, padding, dilation, "conv2d")
    return emit("Conv", list(parts), (image.shape[0], w.shape[0], *shape), group=groups, **attributes)


def max_pool2d(x: Any, size: Pair, /, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """The largest element of each window; the stride is the size if left out."""
    image, kernel = _image(x, "max_pool2d"), _two(size, "size")
    shape, attributes = _spatial(image, kernel, size if stride is None else stride, padding, 1, "max_pool2d")
    return emit("MaxPool", [image], (*image.shape[:2], *shape), kernel_shape=list(kernel), **attributes)


def avg_pool2d(x: Any, size: Pair, /, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """The mean of each window, padding not counted; the stride is the size if left out."""
    image, kernel = _image(x, "avg_pool2d"), _two(size, "size")
    shape, attributes = _spatial(image, kernel, size if stride is None else stride, padding, 1, "avg_pool2d")
    return emit("AveragePool", [image], (*image.shape[:2], *shape), kernel_shape=list(kernel), **attributes)


# ---- losses ------------------------------------------------------------------------------------------------


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction is 'mean', 'sum' or 'none', got {reduction!r}")
    return losses if reduction == "none" else mean(losses) if reduction == "mean" else sum(losses)


def cross_entropy(logits: Any, labels: Any, /, *, reduction: str = "mean") -> Tensor:
    """-log softmax(logits) at the labels.

    Parameters
    ----------
    logits : Tensor
        (..., classes).
    labels : Tensor
        (...) of int32 or int64, each the number of a class.
    reduction : {"mean", "sum", "none"}, optional
        Over all samples.

    Raises
    ------
    ConfigError
        Shapes that do not go together, or labels that are no integers.
    """
    scores, classes = _floating(logits, "cross_entropy"), asarray(labels)
    if broadcast([scores.shape[:-1], classes.shape], "cross_entropy") != scores.shape[:-1]:
        raise ConfigError(f"cross_entropy: labels {classes!r} for logits {scores!r}; give one a sample")
    picked = take_along_axis(log_softmax(scores), expand_dims(classes, axis=-1), axis=-1)
    return _reduced(-squeeze(picked, -1), reduction)


def mse(x1: Any, x2: Any, /, *, reduction: str = "mean") -> Tensor:
    """The squared difference; `reduction` as in `cross_entropy`."""
    difference = asarray(x1) - x2
    return _reduced(difference * difference, reduction)


__all__ = [
    "attention", "avg_pool2d", "causal", "conv2d", "cross_entropy", "embedding", "gelu", "layer_norm", "linear",
    "log_softmax", "max_pool2d", "mse", "relu", "sigmoid", "silu", "softmax", "softplus",
]  # fmt: skip
