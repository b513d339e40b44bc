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

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor.dims import alike, axis_of, broadcast, same, window_size, written
from dask_ferro.graph.tensor.manipulation import checked_indices, positions, size_of
from dask_ferro.graph.tensor.namespace import (
    expand_dims,
    matmul,
    mean,
    squeeze,
    sum,
    take,
    take_along_axis,
    where,
)
from dask_ferro.graph.tensor.statistical import reduce
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    cast,
    constant_of,
    elementwise,
    emit,
    promoted,
    widened,
)

_GELU_SINCE = 20
Pair = int | Sequence[int]


def _floating(x: TensorLike, where_: str) -> Tensor:
    tensor = asarray(x)
    if not tensor.is_floating:
        raise ConfigError(f"{where_}: takes floating point numbers, got {tensor!r}; use astype")
    return tensor


def _in_float32(op_type: str, x: Tensor, **attributes: Any) -> Tensor:
    """Return an elementwise node or a softmax, computed in float32 if `x` is of half precision.

    Engines round each step of theirs otherwise, or have no such op in bfloat16.
    """
    return cast(elementwise(op_type, widened(x), **attributes), x.type.dtype)


# ---- activations -------------------------------------------------------------------------------------------


def relu(x: TensorLike, /) -> Tensor:
    """Return max(x, 0), elementwise."""
    return elementwise("Relu", _floating(x, "relu"))


def sigmoid(x: TensorLike, /) -> Tensor:
    """Return 1 / (1 + exp(-x)), elementwise and without overflow."""
    return _in_float32("Sigmoid", _floating(x, "sigmoid"))


def silu(x: TensorLike, /) -> Tensor:
    """Return x * sigmoid(x), elementwise."""
    tensor = _floating(x, "silu")
    wide = widened(tensor)
    return cast(wide * sigmoid(wide), tensor.type.dtype)


def softplus(x: TensorLike, /) -> Tensor:
    """Return log(1 + exp(x)), elementwise and without overflow."""
    return _in_float32("Softplus", _floating(x, "softplus"))


def gelu(x: TensorLike, /, *, approximate: str = "none") -> Tensor:
    """Return x times the standard normal distribution function at x, elementwise (arXiv:1606.08415).

    Parameters
    ----------
    x : Tensor
    approximate : {"none", "tanh"}, optional
        By the error function, or by a hyperbolic tangent.
    """
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"gelu: approximate is 'none' or 'tanh', got {approximate!r}")
    return _in_float32("Gelu", _floating(x, "gelu"), approximate=approximate, opset=_GELU_SINCE)


def softmax(x: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Return exp(x) over its sum along an axis, without overflow."""
    tensor = _floating(x, "softmax")
    return _in_float32("Softmax", tensor, axis=axis_of(axis, tensor.ndim, "softmax"))


def log_softmax(x: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Return the logarithm of `softmax`, without loss of digits."""
    tensor = _floating(x, "log_softmax")
    return _in_float32("LogSoftmax", tensor, axis=axis_of(axis, tensor.ndim, "log_softmax"))


# ---- layers ------------------------------------------------------------------------------------------------


def linear(x: TensorLike, weight: TensorLike, bias: TensorLike | None = None, /) -> Tensor:
    """Return x @ weight + bias, with a weight of (features in, features out)."""
    product = matmul(x, weight)
    return product if bias is None else product + bias


def embedding(table: TensorLike, indices: TensorLike, /) -> Tensor:
    """Return the rows of `table` (entries, features) at `indices`; features are the last dimension."""
    return take(table, indices, axis=0)


def layer_norm(
    x: TensorLike,
    scale: TensorLike,
    bias: TensorLike | None = None,
    /,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
) -> Tensor:
    """Return x normalized over `axis` and all behind it, times scale, plus bias (arXiv:1607.06450).

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
    wide = [widened(part) for part in parts]
    found = emit("LayerNormalization", wide, parts[0].shape, axis=first, epsilon=float(epsilon))
    return cast(found, parts[0].type.dtype)


def attention(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike,
    /,
    *,
    mask: TensorLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(q k^T * scale) v, over the last two dimensions (arXiv:1706.03762); the others broadcast.

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
        (..., queries, features). A query that sees no key gets zeros.

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
    seen = causal(scores) if is_causal else scores
    # Causality leaves every query the first key, so only a mask of the caller's can hide all.
    weights = softmax(seen) if mask is None else softmax_of_seen(seen)
    return weights @ values


def _masked(scores: Tensor, mask: TensorLike | None) -> Tensor:
    if mask is None:
        return scores
    given = asarray(mask)
    return where(given, scores, float("-inf")) if given.type.dtype == ir.DataType.BOOL else scores + given


def softmax_of_seen(scores: Tensor) -> Tensor:
    """Return the softmax of scores over keys, and zeros for a query whose scores are all -inf (fully masked)."""
    # A softmax of nothing but -inf is NaN, and its gradient would spread NaN to every weight.
    blind = reduce("ReduceMax", scores, -1, keepdims=True) == float("-inf")
    return where(blind, 0.0, softmax(where(blind, 0.0, scores)))


def causal(scores: Tensor) -> Tensor:
    """Return scores of queries (rows) by keys (columns) with -inf for keys that come later than the query."""
    rows = expand_dims(positions(scores, scores.ndim - 2), axis=1)
    return where(positions(scores, scores.ndim - 1) <= rows, scores, float("-inf"))


# ---- windows -----------------------------------------------------------------------------------------------


def _two(value: Pair, name: str, where_: str, least: int = 1) -> tuple[int, int]:
    """Return the numbers for height and width, each at least `least`."""
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < least for n in pair):
        wanted = f"wanted a whole number from {least} on, or one for height and one for width"
        raise ConfigError(f"{where_}: {name}: got {value!r}, {wanted}")
    return pair


def _image(x: TensorLike, where_: str) -> Tensor:
    tensor = _floating(x, where_)
    if tensor.ndim != 4:
        raise ConfigError(f"{where_}: takes (batch, channels, height, width), got {tensor!r}")
    return tensor


def _spatial(
    x: Tensor, kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair, where_: str
) -> tuple[tuple[Dim, ...], dict[str, Any]]:
    """Return height and width of the result, and the attributes of the node."""
    strides, spans = _two(stride, "stride", where_), _two(dilation, "dilation", where_)
    pads = _two(padding, "padding", where_, 0)
    shape = tuple(
        window_size(x.shape[2 + i], kernel[i], strides[i], (pads[i], pads[i]), spans[i], where_)
        for i in (0, 1)
    )
    return shape, {"strides": list(strides), "pads": [*pads, *pads], "dilations": list(spans)}


def conv2d(
    x: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    /,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:
    """Return images convolved with a weight of (channels out, channels in / groups, height, width).

    Parameters
    ----------
    x : Tensor
        (batch, channels in, height, width).
    weight, bias : Tensor
        The bias is of (channels out), and may be left out.
    stride, dilation : int or pair of int, optional
        Of height and width, from 1 on.
    padding : int or pair of int, optional
        Zeros on both sides of height and width.
    groups : int, optional
        Parts of the channels, in and out, that are convolved apart.

    Returns
    -------
    Tensor
        (batch, channels out, height, width), in the promoted dtype of all that is given.

    Raises
    ------
    ConfigError
        Channels that do not meet, or that `groups` does not divide; a bias of another length; a stride or dilation
        of 0; or a window larger than the image.
    """
    image = _image(x, "conv2d")
    given = [image, weight] if bias is None else [image, weight, bias]
    parts = promoted("conv2d", *map(asarray, given))
    w = parts[1]
    if w.ndim != 4 or not (isinstance(w.shape[2], int) and isinstance(w.shape[3], int)):
        raise ConfigError(f"conv2d: a weight is (out, in / groups, height, width), got {w!r}")
    _check_channels(image, w, groups)
    if bias is not None and not alike(parts[2].shape, w.shape[:1]):
        wanted = f"{written(w.shape[:1])}, one for each channel out of {w!r}"
        raise ConfigError(f"conv2d: bias: got {parts[2]!r}, wanted {wanted}")
    shape, attributes = _spatial(image, (w.shape[2], w.shape[3]), stride, padding, dilation, "conv2d")
    return emit("Conv", list(parts), (image.shape[0], w.shape[0], *shape), group=groups, **attributes)


def _check_channels(image: Tensor, weight: Tensor, groups: int) -> None:
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ConfigError(f"conv2d: groups: got {groups!r}, wanted a whole number from 1 on")
    out, each = weight.shape[:2]
    if isinstance(each, int) and not same(image.shape[1], each * groups):
        raise ConfigError(
            f"conv2d: {image.shape[1]!r} channels of {image!r} meet {weight!r} in {groups} groups"
        )
    for what, channels in (("channels in", image.shape[1]), ("channels out", out)):
        if isinstance(channels, int) and channels % groups:
            raise ConfigError(
                f"conv2d: {channels} {what} in {groups} groups; take a number that divides them"
            )


def max_pool2d(x: TensorLike, size: Pair, /, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Return the largest element of each window, channel by channel.

    Parameters
    ----------
    x : Tensor
        (batch, channels, height, width), of floating point numbers.
    size : int or pair of int
        Of a window, in height and width; from 1 on.
    stride : int or pair of int, optional
        From a window to the next; the size if left out.
    padding : int or pair of int, optional
        Of -inf on both sides of height and width.

    Returns
    -------
    Tensor
        (batch, channels, windows in height, windows in width), in the dtype of `x`.

    Raises
    ------
    ConfigError
        `x` is no such image, a size or stride is below 1, or not one window fits.
    """
    image, kernel = _image(x, "max_pool2d"), _two(size, "size", "max_pool2d")
    shape, attributes = _spatial(image, kernel, size if stride is None else stride, padding, 1, "max_pool2d")
    return emit("MaxPool", [image], (*image.shape[:2], *shape), kernel_shape=list(kernel), **attributes)


def avg_pool2d(x: TensorLike, size: Pair, /, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Return the mean of each window, channel by channel; padding is not counted.

    Parameters, result and errors are those of `max_pool2d`.
    """
    image, kernel = _image(x, "avg_pool2d"), _two(size, "size", "avg_pool2d")
    shape, attributes = _spatial(image, kernel, size if stride is None else stride, padding, 1, "avg_pool2d")
    return emit("AveragePool", [image], (*image.shape[:2], *shape), kernel_shape=list(kernel), **attributes)


# ---- losses ------------------------------------------------------------------------------------------------


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction is 'mean', 'sum' or 'none', got {reduction!r}")
    return losses if reduction == "none" else mean(losses) if reduction == "mean" else sum(losses)


def cross_entropy(
    logits: TensorLike, labels: TensorLike, /, *, reduction: str = "mean", ignore_index: int | None = None
) -> Tensor:
    """Return -log softmax(logits) at the labels.

    Parameters
    ----------
    logits : Tensor
        (..., classes).
    labels : Tensor
        (...) of int32 or int64, each the number of a class, from 0 on; nothing broadcasts.
    reduction : {"mean", "sum", "none"}, optional
        Over all samples.
    ignore_index : int, optional
        The label of samples that do not count: their loss and their gradient are 0, and the mean is over the others.
        Means of micro-batches are weighted alike, so in a pipeline divide a "sum" yourself.

    Returns
    -------
    Tensor
        () or, without reduction, (...), in the dtype of the logits.

    Raises
    ------
    ConfigError
        Not one label a sample, labels that are no integers, or constant ones that number no class.

    Notes
    -----
    Labels that come when the graph runs are checked there: a sample whose label numbers no class, -1 among them,
    has the loss NaN, and so have the mean, the sum and the gradient of its logits, in every engine.
    """
    scores, classes = _floating(logits, "cross_entropy"), asarray(labels)
    if not scores.ndim or not alike(classes.shape, scores.shape[:-1]):
        wanted = f"one for each sample of {scores!r}: {written(scores.shape[:-1])}"
        raise ConfigError(f"cross_entropy: labels: got {classes!r}, wanted {wanted}; reshape them")
    _check_labels(classes, scores.shape[-1], ignore_index)
    found, labelled = log_softmax(scores), checked_indices(classes, "cross_entropy")
    end = scores.shape[-1]
    last = (
        end
        if isinstance(end, int)
        else cast(squeeze(size_of(scores, scores.ndim - 1), 0), labelled.type.dtype)
    )
    valid = (labelled >= 0) & (labelled < last)
    # The gather needs an index in range even where its result is masked afterwards.
    safe = where(valid, labelled, 0)
    picked = squeeze(take_along_axis(found, expand_dims(safe, axis=-1), axis=-1), -1)
    counts = None if ignore_index is None else labelled != ignore_index
    known = valid if counts is None else valid | ~counts
    # A product with NaN, so that the gradient is NaN too.
    losses = picked * where(known, _like(-1.0, picked), float("nan"))
    if counts is None:
        return _reduced(losses, reduction)
    losses = where(counts, losses, 0.0)
    if reduction != "mean":
        return _reduced(losses, reduction)
    # A count may be above float16's 65,504.
    wide = widened(losses)
    return cast(sum(wide) / sum(cast(counts, wide.type.dtype)), losses.type.dtype)


def _check_labels(labels: Tensor, classes: Dim, ignore_index: int | None) -> None:
    """Refuse constant labels that are no class number, and an `ignore_index` that is no integer."""
    if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, int)):
        raise ConfigError(f"cross_entropy: ignore_index: got {ignore_index!r}, wanted an integer or None")
    known = constant_of(labels)
    if known is None or known.dtype.kind not in "iu":
        return
    wrong = (known < 0) | (known >= classes) if isinstance(classes, int) else known < 0
    if ignore_index is not None:
        wrong &= known != ignore_index
    if wrong.any():
        wanted = f"classes from 0 to {classes - 1}" if isinstance(classes, int) else "classes from 0 on"
        raise ConfigError(
            f"cross_entropy: labels: got {known[wrong].flat[0]}, wanted {wanted}; name the label of samples that do"
            " not count with ignore_index="
        )


def _like(value: float, x: Tensor) -> Tensor:
    return asarray(np.asarray(value, x.dtype))


def mse(x1: TensorLike, x2: TensorLike, /, *, reduction: str = "mean") -> Tensor:
    """Return the squared difference, reduced to its mean by default.

    Parameters
    ----------
    x1, x2 : Tensor
        Of one shape; nothing broadcasts.
    reduction : {"mean", "sum", "none"}, optional
        Over all elements.

    Returns
    -------
    Tensor
        () or, without reduction, in the shape of both; in their promoted dtype.

    Raises
    ------
    ConfigError
        Shapes that differ, or dtypes that do not mix.
    """
    a, b = promoted("mse", x1, x2)
    if not alike(a.shape, b.shape):
        raise ConfigError(f"mse: got {a!r} and {b!r}, wanted one shape; reshape one, or use broadcast_to")
    difference = widened(a) - widened(b)
    return cast(_reduced(difference * difference, reduction), a.type.dtype)


__all__ = [
    "attention", "avg_pool2d", "causal", "conv2d", "cross_entropy", "embedding", "gelu", "layer_norm", "linear",
    "log_softmax", "max_pool2d", "mse", "relu", "sigmoid", "silu", "softmax", "softplus",
]  # fmt: skip
