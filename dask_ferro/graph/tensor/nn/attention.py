"""Attention, and rotary positions."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.manipulation import checked_indices, reshape_like
from dask_ferro.graph.tensor.manipulation import positions as places
from dask_ferro.graph.tensor.nn.layers import softmax
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.statistical import reduce
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, cast, floating, promote, widen


@example(
    'nn.scaled_dot_product_attention(*[ft.input("x", ("N", 4, 16, 8))] * 3)',
    "<Tensor MatMul: float32(N, 4, 16, 8)>",
)
def scaled_dot_product_attention(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    attn_mask: TensorLike | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(query key^T * scale) value, over the last two dimensions (arXiv:1706.03762); the others broadcast.

    Parameters
    ----------
    query, key, value : Tensor
        (..., queries, size), (..., keys, size) and (..., keys, features). The result is (..., queries, features).
    attn_mask : Tensor, optional
        Boolean mask, true if a query may attend to a key, or numbers that are added to the scores. Broadcasts. The
        result of a query that may attend to no key is zeros.
    is_causal : bool, optional
        Whether a query attends only to keys up to its own position (and only if `attn_mask` allows them).
    scale : float, optional
        Factor of the scores; 1 / sqrt(size) by default.
    """
    where = "scaled_dot_product_attention"
    q, k, v = parts = promote(where, *(floating(part, where) for part in (query, key, value)))
    for part in parts:
        if part.ndim < 2:
            raise InputError(f"{where}: got {part!r}, wanted (..., rows, columns); use expand_dims")
    if scale is None:
        if not isinstance(size := q.shape[-1], int):
            raise InputError(f"{where}: the size of {q!r} is not known; give a scale")
        scale = 1 / math.sqrt(size)
    return attention_of((q @ k.mT) * scale, v, attn_mask, is_causal)


def attention_of(scores: Tensor, values: Tensor, mask: TensorLike | None, is_causal: bool) -> Tensor:
    """Return the attention of scaled scores (..., queries, keys); zeros for a query without keys."""
    if mask is not None:
        allowed = asarray(mask)
        is_bool = allowed.type.dtype == ir.DataType.BOOL
        scores = xp.where(allowed, scores, float("-inf")) if is_bool else scores + allowed
    if is_causal:
        rows = xp.expand_dims(places(scores, scores.ndim - 2), axis=1)
        scores = xp.where(places(scores, scores.ndim - 1) <= rows, scores, float("-inf"))
    # A causal mask leaves every query the first key, so only the caller's mask can hide all keys.
    if mask is None:
        return softmax(scores, axis=-1) @ values
    # The softmax of a row of -inf is NaN, and its gradient would spread NaN to every weight.
    blind = reduce("ReduceMax", scores, -1, keepdims=True) == float("-inf")
    return xp.where(blind, 0.0, softmax(xp.where(blind, 0.0, scores), axis=-1)) @ values


@example(
    "nn.rotary_embedding([[1.0, 0.0], [1.0, 0.0]]).compute().round(3)",
    "array([[1.   , 0.   ],\n       [0.54 , 0.841]], dtype=float32)",
)
def rotary_embedding(
    input: TensorLike,
    *,
    positions: TensorLike | None = None,
    base: float = 10000.0,
    interleaved: bool = False,
) -> Tensor:
    """Return queries or keys (..., sequence, size), of known even size, with each pair of features turned by an angle.

    Pair i of `size` features is turned by position * base ** (-2 i / size) radians (RoFormer, arXiv:2104.09864), in
    float32 for half precision.  A pair is one feature of each half (i, i + size / 2), as in most models, or
    `interleaved`: two neighbours (2 i, 2 i + 1).  `positions` are int32 or int64, in a shape that broadcasts to (...,
    sequence); 0, 1, ... by default.
    """
    x = floating(input, "rotary_embedding")
    size = x.shape[-1] if x.ndim > 1 else None
    if not isinstance(size, int) or size % 2:
        raise InputError(f"rotary_embedding: takes (..., sequence, size) of a known even size, got {x!r}")
    wide = widen(x)
    at = checked_indices(
        places(x, x.ndim - 2) if positions is None else positions, "rotary_embedding: positions"
    )
    # Angles are in double precision: float32 angles lose digits far from the start.
    frequencies = np.asarray(base ** (-np.arange(0, size, 2) / size))
    angles = xp.expand_dims(cast(at, ir.DataType.DOUBLE), axis=-1) * frequencies
    cosines, sines = (cast(turn(angles), wide.type.dtype) for turn in (xp.cos, xp.sin))
    pairs = (slice(0, None, 2), slice(1, None, 2))
    halves = (slice(None, size // 2), slice(size // 2, None))
    first, second = (wide[..., cut] for cut in (pairs if interleaved else halves))
    turned = first * cosines - second * sines, first * sines + second * cosines
    joined = reshape_like(xp.stack(turned, axis=-1), wide) if interleaved else xp.concat(turned, axis=-1)
    return cast(joined, x.type.dtype)
