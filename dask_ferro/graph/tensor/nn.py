"""Layers as functions of tensors: activations, normalization, attention, convolution, losses.

No layer holds parameters: they are arguments, so that one function serves for inference, for training and for
weights from a file.  A layer is one ONNX operator where there is one; only attention is written as products and a
softmax, since those can be sharded and every engine computes them in every dtype.  Images are (batch, channels,
height, width).

Examples
--------
>>> import dask_ferro as ff
>>> ff.nn.relu([-1.0, 2.0]).compute()
array([0., 2.], dtype=float32)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import alike, axis_of, broadcast, same, window_size, written
from dask_ferro.graph.tensor.manipulation import checked_indices, positions, size_of
from dask_ferro.graph.tensor.statistical import reduce
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    cast,
    constant_of,
    elementwise,
    emit,
    floating,
    promoted,
    widened,
)
from dask_ferro.options import is_count

_GELU_SINCE = 20
Pair = int | Sequence[int]


def _in_float32(op_type: str, x: Tensor, **attributes: Any) -> Tensor:
    """Return an elementwise node or a softmax, computed in float32 if `x` has half precision.

    Otherwise engines would round each of their own steps, or have no such op in bfloat16.
    """
    return cast(elementwise(op_type, widened(x), **attributes), x.type.dtype)


# ---- activations -------------------------------------------------------------------------------------------


def relu(x: TensorLike, /) -> Tensor:
    """Return max(x, 0), elementwise."""
    return elementwise("Relu", floating(x, "relu"))


def sigmoid(x: TensorLike, /) -> Tensor:
    """Return 1 / (1 + exp(-x)), elementwise and without overflow."""
    return _in_float32("Sigmoid", floating(x, "sigmoid"))


def silu(x: TensorLike, /) -> Tensor:
    """Return x * sigmoid(x), elementwise."""
    tensor = floating(x, "silu")
    wide = widened(tensor)
    return cast(wide * sigmoid(wide), tensor.type.dtype)


def softplus(x: TensorLike, /) -> Tensor:
    """Return log(1 + exp(x)), elementwise and without overflow."""
    return _in_float32("Softplus", floating(x, "softplus"))


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


def softmax(x: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Return exp(x) divided by its sum along an axis, without overflow."""
    tensor = floating(x, "softmax")
    return _in_float32("Softmax", tensor, axis=axis_of(axis, tensor.ndim, "softmax"))


def log_softmax(x: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Return the logarithm of `softmax`, without loss of digits."""
    tensor = floating(x, "log_softmax")
    return _in_float32("LogSoftmax", tensor, axis=axis_of(axis, tensor.ndim, "log_softmax"))


# ---- layers ------------------------------------------------------------------------------------------------


def linear(x: TensorLike, weight: TensorLike, bias: TensorLike | None = None, /) -> Tensor:
    """Return x @ weight + bias; the weight is (features in, features out)."""
    product = xp.matmul(x, weight)
    return product if bias is None else product + bias


def embedding(table: TensorLike, indices: TensorLike, /) -> Tensor:
    """Return the rows of `table` (entries, features) at `indices`; features are the last dimension."""
    return xp.take(table, indices, axis=0)


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

    Raises
    ------
    ConfigError
        Shapes that do not match, or dtypes that do not mix.
    """
    given = [x, scale] if bias is None else [x, scale, bias]
    parts = promoted("layer_norm", *(floating(part, "layer_norm") for part in given))
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
        Of bools, true where a query may attend to a key; or of numbers, added to the scores. Broadcasts.
    is_causal : bool, optional
        Whether a query attends only to keys up to its own position.
    scale : float, optional
        1 / sqrt(size) if left out.

    Returns
    -------
    Tensor
        (..., queries, features). The result of a fully masked query is zeros.

    Raises
    ------
    ConfigError
        Shapes or dtypes that do not match, or an unknown size without a scale.
    """
    queries, keys, values = promoted("attention", *(floating(part, "attention") for part in (q, k, v)))
    size = queries.shape[-1]
    if scale is None and not isinstance(size, int):
        raise ConfigError(f"attention: the size of {queries!r} is not known; give a scale")
    factor = 1 / math.sqrt(size) if scale is None and isinstance(size, int) else scale
    scores = _masked((queries @ keys.mT) * factor, mask)
    seen = causal(scores) if is_causal else scores
    # A causal mask leaves every query the first key, so only the caller's mask can hide all keys.
    weights = softmax(seen) if mask is None else softmax_of_seen(seen)
    return weights @ values


def _masked(scores: Tensor, mask: TensorLike | None) -> Tensor:
    if mask is None:
        return scores
    given = asarray(mask)
    return xp.where(given, scores, float("-inf")) if given.type.dtype == ir.DataType.BOOL else scores + given


def softmax_of_seen(scores: Tensor) -> Tensor:
    """Return the softmax of scores over keys, and zeros for a query whose scores are all -inf (fully masked)."""
    # The softmax of a row of -inf is NaN, and its gradient would spread NaN to every weight.
    masked = reduce("ReduceMax", scores, -1, keepdims=True) == float("-inf")
    return xp.where(masked, 0.0, softmax(xp.where(masked, 0.0, scores)))


def causal(scores: Tensor) -> Tensor:
    """Return scores of queries (rows) by keys (columns), with -inf for keys after the query's position."""
    rows = xp.expand_dims(positions(scores, scores.ndim - 2), axis=1)
    return xp.where(positions(scores, scores.ndim - 1) <= rows, scores, float("-inf"))


# ---- windows -----------------------------------------------------------------------------------------------


def _two(value: Pair, name: str, where: str, least: int = 1) -> tuple[int, int]:
    """Return the numbers for height and width, each checked to be at least `least`."""
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(is_count(n, least) for n in pair):
        wanted = f"wanted a whole number from {least} on, or one for height and one for width"
        raise ConfigError(f"{where}: {name}: got {value!r}, {wanted}")
    return pair


def _image(x: TensorLike, where: str) -> Tensor:
    tensor = floating(x, where)
    if tensor.ndim != 4:
        raise ConfigError(f"{where}: takes (batch, channels, height, width), got {tensor!r}")
    return tensor


def _spatial(
    x: Tensor, kernel: Sequence[int], stride: Pair, padding: Pair, dilation: Pair, where: str
) -> tuple[tuple[Dim, ...], dict[str, Any]]:
    """Return height and width of the result, and the attributes of the node."""
    strides, spans = _two(stride, "stride", where), _two(dilation, "dilation", where)
    pads = _two(padding, "padding", where, 0)
    shape = tuple(
        window_size(x.shape[2 + i], kernel[i], strides[i], (pads[i], pads[i]), spans[i], where)
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
        The number of groups of channels that are convolved separately.

    Returns
    -------
    Tensor
        (batch, channels out, height, width), in the promoted dtype of the arguments.

    Raises
    ------
    ConfigError
        Channels of image and weight that differ, or that `groups` does not divide; a bias of another length; a stride
        or dilation of 0; or a window larger than the image.
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
    if not is_count(groups):
        raise ConfigError(f"conv2d: groups: got {groups!r}, wanted a whole number from 1 on")
    out, each = weight.shape[:2]
    if isinstance(each, int) and not same(image.shape[1], each * groups):
        raise ConfigError(
            f"conv2d: {image.shape[1]!r} channels of {image!r} do not match {weight!r} in {groups} groups"
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
        Of a window, in height and width; at least 1.
    stride : int or pair of int, optional
        From one window to the next; the size if left out.
    padding : int or pair of int, optional
        Elements of -inf on both sides of height and width.

    Returns
    -------
    Tensor
        (batch, channels, windows in height, windows in width), in the dtype of `x`.

    Raises
    ------
    ConfigError
        `x` is no such image, a size or stride is below 1, or no window fits.
    """
    return _pooled("MaxPool", x, size, stride, padding, "max_pool2d")


def avg_pool2d(x: TensorLike, size: Pair, /, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """Return the mean of each window, channel by channel; padding is not counted.

    Parameters, result and errors are those of `max_pool2d`.
    """
    return _pooled("AveragePool", x, size, stride, padding, "avg_pool2d")


def _pooled(
    op_type: str, x: TensorLike, size: Pair, stride: Pair | None, padding: Pair, where: str
) -> Tensor:
    image, kernel = _image(x, where), _two(size, "size", where)
    shape, attributes = _spatial(image, kernel, size if stride is None else stride, padding, 1, where)
    return emit(op_type, [image], (*image.shape[:2], *shape), kernel_shape=list(kernel), **attributes)


# ---- losses ------------------------------------------------------------------------------------------------


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction is 'mean', 'sum' or 'none', got {reduction!r}")
    return losses if reduction == "none" else xp.mean(losses) if reduction == "mean" else xp.sum(losses)


def cross_entropy(
    logits: TensorLike, labels: TensorLike, /, *, reduction: str = "mean", ignore_index: int | None = None
) -> Tensor:
    """Return -log softmax(logits) at the labels.

    Parameters
    ----------
    logits : Tensor
        (..., classes).
    labels : Tensor
        (...) of int32 or int64, class numbers from 0; nothing broadcasts.
    reduction : {"mean", "sum", "none"}, optional
        Over all samples.
    ignore_index : int, optional
        The label of samples to leave out: their loss and gradient are 0, and the mean is over the other samples.
        A pipeline gives every micro-batch's mean the same weight, so divide a "sum" yourself there.

    Returns
    -------
    Tensor
        () or, without reduction, (...), in the dtype of the logits.

    Raises
    ------
    ConfigError
        Other than one label per sample, labels that are not integers, or constant labels outside the classes.

    Notes
    -----
    Labels that are inputs are checked when the graph runs: if one of them is outside the classes (-1 too), the
    sample's loss, the mean, the sum and the gradient of its logits are NaN, in every engine.
    """
    scores, classes = floating(logits, "cross_entropy"), asarray(labels)
    if not scores.ndim or not alike(classes.shape, scores.shape[:-1]):
        wanted = f"one for each sample of {scores!r}: {written(scores.shape[:-1])}"
        raise ConfigError(f"cross_entropy: labels: got {classes!r}, wanted {wanted}; reshape them")
    _check_labels(classes, scores.shape[-1], ignore_index)
    found, labelled = log_softmax(scores), checked_indices(classes, "cross_entropy")
    end: Dim | Tensor = scores.shape[-1]
    if not isinstance(end, int):
        end = cast(xp.squeeze(size_of(scores, scores.ndim - 1), 0), labelled.type.dtype)
    valid = (labelled >= 0) & (labelled < end)
    # The gather needs an index in range even where its result is masked afterwards.
    safe = xp.where(valid, labelled, 0)
    picked = xp.squeeze(xp.take_along_axis(found, xp.expand_dims(safe, axis=-1), axis=-1), -1)
    counts = None if ignore_index is None else labelled != ignore_index
    known = valid if counts is None else valid | ~counts
    # A product with NaN, so that the gradient is NaN too.
    losses = picked * xp.where(known, np.asarray(-1.0, picked.dtype), float("nan"))
    if counts is None:
        return _reduced(losses, reduction)
    losses = xp.where(counts, losses, 0.0)
    if reduction != "mean":
        return _reduced(losses, reduction)
    # A count may exceed float16's largest number, 65,504.
    wide = widened(losses)
    return cast(xp.sum(wide) / xp.sum(cast(counts, wide.type.dtype)), losses.type.dtype)


def _check_labels(labels: Tensor, classes: Dim, ignore_index: int | None) -> None:
    """Refuse constant labels outside the classes, and an `ignore_index` that is not an integer."""
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
