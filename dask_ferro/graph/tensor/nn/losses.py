"""Losses: numbers that a training step makes smaller."""

from __future__ import annotations

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import alike, written
from dask_ferro.graph.tensor.manipulation import checked_indices, size_of
from dask_ferro.graph.tensor.nn.activations import log_softmax
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    cast,
    constant_of,
    floating,
    promoted,
    widened,
)


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

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.nn.cross_entropy([[0.0, 0.0], [0.0, 0.0]], [1, 0]).compute().round(3)
    np.float32(0.693)
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

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.nn.mse([1.0, 2.0], [1.0, 4.0]).compute()
    array(2., dtype=float32)
    """
    a, b = promoted("mse", x1, x2)
    if not alike(a.shape, b.shape):
        raise ConfigError(f"mse: got {a!r} and {b!r}, wanted one shape; reshape one, or use broadcast_to")
    difference = widened(a) - widened(b)
    return cast(_reduced(difference * difference, reduction), a.type.dtype)


__all__ = ["cross_entropy", "mse"]
