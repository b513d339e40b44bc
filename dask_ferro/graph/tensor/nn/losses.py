"""Losses: numbers that a training step makes smaller."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import alike, axis_of, written
from dask_ferro.graph.tensor.manipulation import checked_indices, scalar_size
from dask_ferro.graph.tensor.nn.activations import log_softmax, softplus
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, cast, constant_of, floating, promoted, widened


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction is 'mean', 'sum' or 'none', got {reduction!r}")
    return losses if reduction == "none" else xp.mean(losses) if reduction == "mean" else xp.sum(losses)


@example("nn.cross_entropy([[0.0, 0.0], [0.0, 0.0]], [1, 0]).compute().round(3)", "np.float32(0.693)")
def cross_entropy(
    logits: TensorLike,
    labels: TensorLike,
    /,
    *,
    axis: int | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return -log softmax(logits) at the labels.

    Parameters
    ----------
    logits : Tensor
        (classes), (samples, classes) or (samples, classes, ...), as in PyTorch; (..., classes) with `axis=-1`.
    labels : Tensor
        Of int32 or int64, class numbers from 0, in the shape of the logits without the classes; nothing broadcasts.
    axis : int, optional
        The dimension of the classes.
    reduction : {"mean", "sum", "none"}, optional
        Over all samples.
    ignore_index : int, optional
        The label of samples to leave out: their loss and gradient are 0, and the mean is over the other samples.
        Micro-batches weight their means by all of their rows, so divide a "sum" yourself there.
    label_smoothing : float, optional
        From 0 to 1: the part of each label that is spread over all classes evenly (arXiv:1512.00567).

    Returns
    -------
    Tensor
        () or, without reduction, in the shape of the labels; in the dtype of the logits.

    Raises
    ------
    ConfigError
        Other than one label per sample, labels that are not integers, constant labels outside the classes, or a
        smoothing outside 0 to 1.

    Notes
    -----
    Labels that are inputs are checked when the graph runs: if one of them is outside the classes (-1 too), the
    sample's loss, the mean, the sum and the gradient of its logits are NaN, in every engine.
    """
    scores, classes = floating(logits, "cross_entropy"), xp.asarray(labels)
    at = axis_of(min(1, scores.ndim - 1) if axis is None else axis, scores.ndim, "cross_entropy")
    samples = scores.shape[:at] + scores.shape[at + 1 :]
    if not alike(classes.shape, samples):
        wanted = (
            f"one for each sample of {scores!r}, whose dimension {at} has the classes: {written(samples)}"
        )
        remedy = "reshape them, or name the dimension of the classes by axis="
        raise ConfigError(f"cross_entropy: labels: got {classes!r}, wanted {wanted}; {remedy}")
    _check_labels(classes, scores.shape[at], ignore_index)
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(
            f"cross_entropy: label_smoothing: got {label_smoothing!r}, wanted a number from 0 to 1"
        )
    labelled = checked_indices(classes, "cross_entropy")
    picked, valid = _picked(log_softmax(scores, axis=at), labelled, at, label_smoothing)
    counts = None if ignore_index is None else labelled != ignore_index
    known = valid if counts is None else valid | ~counts
    # A product with NaN, so that the gradient is NaN too.
    losses = picked * xp.where(known, np.asarray(-1.0, picked.dtype), float("nan"))
    if counts is not None:
        losses = xp.where(counts, losses, 0.0)
    if counts is None or reduction != "mean":
        return _reduced(losses, reduction)
    # A count may exceed float16's largest number, 65,504.
    wide = widened(losses)
    return cast(xp.sum(wide) / xp.sum(cast(counts, wide.type.dtype)), losses.type.dtype)


def _picked(found: Tensor, labelled: Tensor, at: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the logarithm at each label, smoothed over the classes; and whether the label is a class."""
    valid = (labelled >= 0) & (labelled < scalar_size(found, at, labelled.type.dtype))
    # The gather needs an index in range even where its result is masked afterwards.
    safe = xp.where(valid, labelled, 0)
    picked = xp.squeeze(xp.take_along_axis(found, xp.expand_dims(safe, axis=at), axis=at), at)
    if smoothing:
        mean = xp.mean(widened(found), axis=at)
        picked = picked * (1 - smoothing) + cast(mean * smoothing, found.type.dtype)
    return picked, valid


def _check_labels(labels: Tensor, classes: Dim, ignore_index: int | None) -> None:
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


@example("nn.mse([1.0, 2.0], [1.0, 4.0]).compute()", "array(2., dtype=float32)")
def mse(x1: TensorLike, x2: TensorLike, /, *, reduction: str = "mean") -> Tensor:
    """Return the squared difference, reduced to its mean by default.

    Parameters
    ----------
    x1, x2 : Tensor
        Of one shape; nothing broadcasts.
    reduction : {"mean", "sum", "none"}, optional
        Over all elements: without one, the result has the shape of both.
    """
    return _loss("mse", x1, x2, reduction, lambda a, b: xp.square(a - b))


def _loss(
    where: str, x1: TensorLike, x2: TensorLike, reduction: str, each: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the reduced losses of two tensors of one shape; those of half precision are computed in float32."""
    a, b = promoted(where, x1, x2)
    if not alike(a.shape, b.shape):
        raise ConfigError(f"{where}: got {a!r} and {b!r}, wanted one shape; reshape one, or use broadcast_to")
    return cast(_reduced(each(widened(a), widened(b)), reduction), a.type.dtype)


@example("nn.huber([1.0, 5.0], [2.0, 2.0]).compute()", "array(1.5, dtype=float32)")
def huber(x1: TensorLike, x2: TensorLike, /, *, delta: float = 1.0, reduction: str = "mean") -> Tensor:
    """Return half the squared difference up to `delta`, and a line of slope `delta` beyond, reduced to its mean.

    Parameters and result are those of `mse`; `delta` is above 0.
    """
    if not delta > 0:
        raise ConfigError(f"huber: delta: got {delta!r}, wanted a number above 0")
    return _huber("huber", x1, x2, delta, 1.0, reduction)


@example("nn.smooth_l1([1.0, 5.0], [2.0, 2.0], beta=2.0).compute()", "array(1.125, dtype=float32)")
def smooth_l1(x1: TensorLike, x2: TensorLike, /, *, beta: float = 1.0, reduction: str = "mean") -> Tensor:
    """Return the absolute difference with a parabola below `beta`: `huber` over beta; 0 leaves no parabola.

    Parameters and result are those of `mse`; `beta` is not below 0.
    """
    if not beta >= 0:
        raise ConfigError(f"smooth_l1: beta: got {beta!r}, wanted a number from 0 on")
    return _huber("smooth_l1", x1, x2, beta, beta, reduction)


def _huber(where: str, x1: TensorLike, x2: TensorLike, bound: float, over: float, reduction: str) -> Tensor:
    """Return the parabola up to a bound and the line beyond, divided by `over`; the distance itself if that is 0."""

    def each(a: Tensor, b: Tensor) -> Tensor:
        distance = xp.abs(a - b)
        if over == 0:
            return distance
        # The parabola is of the bounded distance, so that it does not overflow where the line is taken.
        near = xp.minimum(distance, bound)
        return near * near * (0.5 / over) + (distance - near) * (bound / over)

    return _loss(where, x1, x2, reduction, each)


@example("nn.binary_cross_entropy([0.5, 0.9], [0.0, 1.0]).compute().round(3)", "np.float32(0.399)")
def binary_cross_entropy(x1: TensorLike, x2: TensorLike, /, *, reduction: str = "mean") -> Tensor:
    """Return -(t log p + (1 - t) log(1 - p)) of probabilities p and targets t, reduced to its mean by default.

    A logarithm is not below -100, as in PyTorch; there its gradient is 0.  The loss of a probability outside 0 to 1 is
    NaN.  `binary_cross_entropy_with_logits` loses no digits near 0 and 1.

    Parameters
    ----------
    x1 : Tensor
        Probabilities, from 0 to 1.
    x2 : Tensor
        Targets from 0 to 1, in the same shape.
    reduction : {"mean", "sum", "none"}, optional
        Over all elements.
    """
    where = "binary_cross_entropy"
    return _loss(where, x1, x2, reduction, lambda p, t: -(t * _log(p) + (1 - t) * _log(1 - p)))


def _log(p: Tensor) -> Tensor:
    """Return the logarithm, -100 of what is too small, with a finite gradient; NaN of NaN and below 0."""
    small = (p >= 0.0) & (p <= math.exp(-100))
    return xp.where(small, -100.0, xp.log(xp.where(small, 1.0, p)))


@example("nn.binary_cross_entropy_with_logits([0.0, 2.0], [0.0, 1.0]).compute().round(3)", "np.float32(0.41)")
def binary_cross_entropy_with_logits(
    x1: TensorLike,
    x2: TensorLike,
    /,
    *,
    positive_weight: TensorLike | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the `binary_cross_entropy` of sigmoid(x1) and targets x2, without loss of digits.

    Parameters are those of `binary_cross_entropy`, with any scores as x1; `positive_weight` is the weight of the term
    of the targets, and broadcasts to them.
    """
    weight: TensorLike = 1.0 if positive_weight is None else positive_weight

    def each(scores: Tensor, t: Tensor) -> Tensor:
        return (1 - t) * scores + (1 + (weight - 1) * t) * softplus(-scores)  # type: ignore[operator]

    return _loss("binary_cross_entropy_with_logits", x1, x2, reduction, each)
