"""Attention, its causal mask, and rotary positions."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.manipulation import checked_indices, positions, reshape_like
from dask_ferro.graph.tensor.nn.activations import softmax
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.statistical import reduce
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, cast, floating, promoted, widened


@example('nn.attention(*[ff.argument("x", ("N", 4, 16, 8))] * 3)', "<Tensor MatMul: float32(N, 4, 16, 8)>")
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
        Whether a query attends only to keys up to its own position, and that `mask` allows.
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
    for part in (queries, keys, values):
        _check_rank(part, "attention")
    size = queries.shape[-1]
    if scale is None and not isinstance(size, int):
        raise ConfigError(f"attention: the size of {queries!r} is not known; give a scale")
    factor = 1 / math.sqrt(size) if scale is None and isinstance(size, int) else scale
    return attention_of((queries @ keys.mT) * factor, values, mask, is_causal)


def attention_of(scores: Tensor, values: Tensor, mask: TensorLike | None, is_causal: bool) -> Tensor:
    """Return the attention of scaled scores (..., queries, keys)."""
    if mask is not None:
        given = asarray(mask)
        is_bool = given.type.dtype == ir.DataType.BOOL
        scores = xp.where(given, scores, float("-inf")) if is_bool else scores + given
    seen = causal(scores) if is_causal else scores
    # A causal mask leaves every query the first key, so only the caller's mask can hide all keys.
    weights = softmax(seen, axis=-1) if mask is None else softmax_of_seen(seen)
    return weights @ values


def _check_rank(x: Tensor, where: str) -> None:
    if x.ndim < 2:
        raise ConfigError(f"{where}: got {x!r}, wanted (..., rows, columns); use expand_dims")


def softmax_of_seen(scores: Tensor) -> Tensor:
    """Return the softmax of scores over keys, and zeros for a query whose scores are all -inf (fully masked)."""
    # The softmax of a row of -inf is NaN, and its gradient would spread NaN to every weight.
    masked = reduce("ReduceMax", scores, -1, keepdims=True) == float("-inf")
    return xp.where(masked, 0.0, softmax(xp.where(masked, 0.0, scores), axis=-1))


@example("nn.causal(ff.ones((2, 2))).compute()", "array([[  1., -inf],\n       [  1.,   1.]], dtype=float32)")
def causal(scores: Tensor) -> Tensor:
    """Return scores of queries (rows) by keys (columns), with -inf for keys after the query's position."""
    _check_rank(scores, "causal")
    rows = xp.expand_dims(positions(scores, scores.ndim - 2), axis=1)
    return xp.where(positions(scores, scores.ndim - 1) <= rows, scores, float("-inf"))


@example(
    "nn.rotary_embedding([[1.0, 0.0], [1.0, 0.0]]).compute().round(3)",
    "array([[1.   , 0.   ],\n       [0.54 , 0.841]], dtype=float32)",
)
def rotary_embedding(
    x: TensorLike, /, *, places: TensorLike | None = None, base: float = 10000.0, interleaved: bool = False
) -> Tensor:
    """Return queries or keys with each pair of features turned by an angle that grows with the position.

    Pair i of `size` features is turned by position * base ** (-2 i / size) radians (RoFormer, arXiv:2104.09864).

    Parameters
    ----------
    x : Tensor
        (..., sequence, size), the size known and even.
    places : Tensor, optional
        The positions, int32 or int64, in a shape that broadcasts to (..., sequence); 0, 1, ... if left out.
    base : float, optional
    interleaved : bool, optional
        Whether a pair is two neighbours (2 i, 2 i + 1), or one of each half (i, i + size / 2), as most models have it.

    Returns
    -------
    Tensor
        In the shape and dtype of `x`; half precision is computed in float32.

    Raises
    ------
    ConfigError
        A size that is odd or not known, or positions that are no integers.
    """
    tensor = floating(x, "rotary_embedding")
    size = tensor.shape[-1] if tensor.ndim > 1 else None
    if not isinstance(size, int) or size % 2:
        raise ConfigError(
            f"rotary_embedding: takes (..., sequence, size) of a known even size, got {tensor!r}"
        )
    wide = widened(tensor)
    at = positions(tensor, tensor.ndim - 2) if places is None else checked_indices(places, "rotary_embedding")
    # Angles are in double precision: those of float32 lose digits far from the start.
    frequencies = np.asarray(base ** (-np.arange(0, size, 2) / size))
    angles = xp.expand_dims(cast(at, ir.DataType.DOUBLE), axis=-1) * frequencies
    cosines, sines = (cast(turn(angles), wide.type.dtype) for turn in (xp.cos, xp.sin))
    pairs = (slice(0, None, 2), slice(1, None, 2))
    halves = (slice(None, size // 2), slice(size // 2, None))
    first, second = (wide[..., cut] for cut in (pairs if interleaved else halves))
    turned = first * cosines - second * sines, first * sines + second * cosines
    joined = reshape_like(xp.stack(turned, axis=-1), wide) if interleaved else xp.concat(turned, axis=-1)
    return cast(joined, tensor.type.dtype)
