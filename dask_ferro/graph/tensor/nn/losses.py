"""Losses: numbers that training minimizes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import axis_of
from dask_ferro.graph.tensor.manipulation import checked_indices, scalar_size
from dask_ferro.graph.tensor.nn.layers import check_range, check_shape, log_softmax, softplus
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, cast, floating, promote, widen


def _reduce(losses: Tensor, reduction: str, where: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f"{where}: reduction: got {reduction!r}, wanted 'mean', 'sum' or 'none'")
    return losses if reduction == "none" else xp.mean(losses) if reduction == "mean" else xp.sum(losses)


@example("nn.cross_entropy([[0.0, 0.0], [0.0, 0.0]], [1, 0]).compute().round(3)", "np.float32(0.693)")
def cross_entropy(
    input: TensorLike,
    target: TensorLike,
    *,
    axis: int | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return -log softmax(input) at the labels of the target.

    Parameters
    ----------
    input : Tensor
        Scores (logits): (classes), (samples, classes) or (samples, classes, ...); (..., classes) with `axis=-1`.
    target : Tensor
        Labels of int32 or int64, class numbers from 0, in the shape of the input without the classes; nothing
        broadcasts.  Constants are checked immediately.  If a label outside the classes (-1 too) is known only when
        the graph runs, the sample's loss, the mean, the sum and the gradient of its scores are NaN, in every engine.
    axis : int, optional
        The dimension of the classes.
    ignore_index : int, optional
        The label of samples to leave out: their loss and gradient are 0, and the mean is over the other samples.
        Micro-batches weight their means by all of their rows, so divide a "sum" yourself in a pipeline.
    reduction : {"mean", "sum", "none"}, optional
        Reduction over all samples; if "none", the result has the shape of the target.
    label_smoothing : float, optional
        Part of each label, from 0 to 1, that is spread over all classes evenly (arXiv:1512.00567).
    """
    where = "cross_entropy"
    scores, labels = floating(input, where), xp.asarray(target)
    at = axis_of(min(1, scores.ndim - 1) if axis is None else axis, scores.ndim, where)
    meaning = (
        f"one for each sample of {scores!r}, whose dimension {at} has the classes; reshape them, or name the"
        " dimension of the classes with axis="
    )
    check_shape(f"{where}: target", labels, scores.shape[:at] + scores.shape[at + 1 :], meaning)
    if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, int)):
        raise InputError(f"{where}: ignore_index: got {ignore_index!r}, wanted an integer or None")
    if not 0 <= label_smoothing <= 1:
        raise InputError(f"{where}: label_smoothing: got {label_smoothing!r}, wanted a number from 0 to 1")
    labels, logs = checked_indices(labels, f"{where}: target"), log_softmax(scores, axis=at)
    remedy = "name the label of samples that do not count with ignore_index="
    check_range(f"{where}: target", labels, scores.shape[at], remedy, ignore_index)
    is_known = (labels >= 0) & (labels < scalar_size(logs, at, labels.type.dtype))
    # The gather needs an index in range even if its result is masked afterwards.
    index = xp.expand_dims(xp.where(is_known, labels, 0), axis=at)
    picked = xp.squeeze(xp.take_along_axis(logs, index, axis=at), at)
    if label_smoothing:
        mean = xp.mean(widen(logs), axis=at)
        picked = picked * (1 - label_smoothing) + cast(mean * label_smoothing, logs.type.dtype)
    counts = None if ignore_index is None else labels != ignore_index
    is_known = is_known if counts is None else is_known | ~counts
    # A product with NaN, so that the gradient is NaN too.
    losses = picked * xp.where(is_known, np.asarray(-1.0, picked.dtype), float("nan"))
    losses = losses if counts is None else xp.where(counts, losses, 0.0)
    if counts is None or reduction != "mean":
        return _reduce(losses, reduction, where)
    # A count may exceed float16's largest number, 65,504.
    wide = widen(losses)
    return cast(xp.sum(wide) / xp.sum(cast(counts, wide.type.dtype)), losses.type.dtype)


def _loss(
    where: str, x: TensorLike, t: TensorLike, reduction: str, each: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the reduced losses of two tensors of one shape; half precision is computed in float32."""
    a, b = promote(where, x, t)
    check_shape(f"{where}: target", b, a.shape, f"the shape of {a!r}; reshape one, or use broadcast_to")
    return cast(_reduce(each(widen(a), widen(b)), reduction, where), a.type.dtype)


@example("nn.mse_loss([1.0, 2.0], [1.0, 4.0]).compute()", "array(2., dtype=float32)")
def mse_loss(input: TensorLike, target: TensorLike, *, reduction: str = "mean") -> Tensor:
    """Return the squared difference of tensors of one shape, reduced to its mean by default; nothing broadcasts.

    `reduction` is "mean", "sum" or "none", over all elements: if "none", the result has the shape of both.
    """
    return _loss("mse_loss", input, target, reduction, lambda a, b: xp.square(a - b))


@example("nn.huber_loss([1.0, 5.0], [2.0, 2.0]).compute()", "array(1.5, dtype=float32)")
def huber_loss(input: TensorLike, target: TensorLike, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Return half the squared difference up to `delta`, and a line of slope `delta` beyond, reduced to its mean.

    Parameters and result are the same as in `mse_loss`; `delta` is above 0.
    """
    if not delta > 0:
        raise InputError(f"huber_loss: delta: got {delta!r}, wanted a number above 0")
    return _huber("huber_loss", input, target, reduction, delta, 1.0)


@example("nn.smooth_l1_loss([1.0, 5.0], [2.0, 2.0], beta=2.0).compute()", "array(1.125, dtype=float32)")
def smooth_l1_loss(
    input: TensorLike, target: TensorLike, *, reduction: str = "mean", beta: float = 1.0
) -> Tensor:
    """Return the absolute difference with a parabola below `beta`: `huber_loss` over beta; 0 leaves no parabola.

    Parameters and result are the same as in `mse_loss`; `beta` is not below 0.
    """
    if not beta >= 0:
        raise InputError(f"smooth_l1_loss: beta: got {beta!r}, wanted a number of at least 0")
    return _huber("smooth_l1_loss", input, target, reduction, beta, beta)


def _huber(
    where: str, input: TensorLike, target: TensorLike, reduction: str, bound: float, over: float
) -> Tensor:
    """Return the parabola up to a bound and the line beyond, divided by `over`; the distance itself if that is 0."""

    def each(a: Tensor, b: Tensor) -> Tensor:
        distance = xp.abs(a - b)
        if over == 0:
            return distance
        # The parabola has the bounded distance, so that it does not overflow beyond the bound.
        near = xp.minimum(distance, bound)
        return near * near * (0.5 / over) + (distance - near) * (bound / over)

    return _loss(where, input, target, reduction, each)


@example("nn.binary_cross_entropy([0.5, 0.9], [0.0, 1.0]).compute().round(3)", "np.float32(0.399)")
def binary_cross_entropy(input: TensorLike, target: TensorLike, *, reduction: str = "mean") -> Tensor:
    """Return -(t log p + (1 - t) log(1 - p)) of probabilities p and targets t, reduced to its mean by default.

    A logarithm is not below -100, as in PyTorch; there its gradient is 0.  Both tensors have one shape; the loss of a
    probability outside 0 to 1 is NaN.  `binary_cross_entropy_with_logits` loses no digits near 0 and 1.  `reduction`
    is the same as in `mse_loss`.
    """

    def log(p: Tensor) -> Tensor:
        # Too small numbers give -100, with a finite gradient; NaN and numbers below 0 give NaN.
        small = (p >= 0.0) & (p <= math.exp(-100))
        return xp.where(small, -100.0, xp.log(xp.where(small, 1.0, p)))

    where = "binary_cross_entropy"
    return _loss(where, input, target, reduction, lambda p, t: -(t * log(p) + (1 - t) * log(1 - p)))


@example("nn.binary_cross_entropy_with_logits([0.0, 2.0], [0.0, 1.0]).compute().round(3)", "np.float32(0.41)")
def binary_cross_entropy_with_logits(
    input: TensorLike, target: TensorLike, *, reduction: str = "mean", pos_weight: TensorLike | None = None
) -> Tensor:
    """Return the `binary_cross_entropy` of sigmoid(input) and the target, without loss of digits.

    Parameters are the same as in `binary_cross_entropy`, with any scores (logits) as input; `pos_weight` is the
    weight of the term of the targets, and broadcasts to them.
    """
    where = "binary_cross_entropy_with_logits"

    def each(scores: Tensor, t: Tensor) -> Tensor:
        weight = 1.0 if pos_weight is None else promote(where, scores, pos_weight)[1]
        return (1 - t) * scores + (1 + (weight - 1) * t) * softplus(-scores)

    return _loss(where, input, target, reduction, each)
