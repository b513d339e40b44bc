"""Scaled dot-product attention (opset 23 and later) and rotary position embedding.

Grouped heads are broadcast, not copied.  The result of a query that may attend to no key is zero; the bias decides
this, because a score may be infinite.  The fourth output, the scores, is declared only if its definition is the same
in all opsets.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Kernel, Op, dtype, row
from dask_ferro.engines.array.ops.layout import pad_array
from dask_ferro.engines.array.ops.linear import product
from dask_ferro.graph.ir.dtypes import BOOL, FLOAT, INDEX, WIDE, D
from dask_ferro.graph.ir.nodes import attribute_of

# Values of qk_matmul_output_mode: scores after the bias, after softmax (0: the plain products).
_BIAS_MODE, _SOFTMAX_MODE = 2, 3


def _attention(xp: Namespace, op: Op) -> Fn:
    heads, kv_heads = op.get("q_num_heads", 0), op.get("kv_num_heads", 0)
    softcap, mode = op.get("softcap", 0.0), op.get("qk_matmul_output_mode", 0)
    precision = None if op.get("softmax_precision") is None else dtype(xp, op.get("softmax_precision"))

    def fn(
        q: Array,
        k: Array,
        v: Array,
        mask: Array = None,
        past_key: Array = None,
        past_value: Array = None,
        valid: Array = None,
    ) -> tuple[Array, Array, Array, Array]:
        flat = q.ndim == 3
        if flat:
            q, k, v = _split_heads(xp, q, heads), _split_heads(xp, k, kv_heads), _split_heads(xp, v, kv_heads)
        if past_key is not None:
            k, v = xp.concat((past_key, k), axis=2), xp.concat((past_value, v), axis=2)
        # Both factors are scaled by the root, as in the standard: a product of large values would overflow before
        # scaling.
        root = math.sqrt(op.get("scale") or 1 / math.sqrt(q.shape[3]))
        scores = _grouped_matmul(xp, q * root, xp.matrix_transpose(k * root))
        if softcap:
            scores = softcap * xp.tanh(scores / softcap)
        past = 0 if past_key is None else past_key.shape[2]
        bias = _bias(xp, op, q, k.shape[2], mask, past, valid)
        biased = scores if bias is None else scores + bias
        weights = _masked_softmax(xp, biased if precision is None else xp.astype(biased, precision), bias)
        weights = xp.astype(weights, q.dtype, copy=False)
        y = _grouped_matmul(xp, weights, v)
        if flat:
            y = xp.permute_dims(y, (0, 2, 1, 3))
            y = xp.reshape(y, (*y.shape[:2], y.shape[2] * y.shape[3]))
        return y, k, v, weights if mode == _SOFTMAX_MODE else biased if mode == _BIAS_MODE else scores

    return fn


def _split_heads(xp: Namespace, x: Array, heads: int) -> Array:
    """Return (batch, sequence, heads * size) as (batch, heads, sequence, size)."""
    batch, length, width = x.shape
    return xp.permute_dims(xp.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _grouped_matmul(xp: Namespace, a: Array, b: Array) -> Array:
    """Return matmul(a, b), where several heads of `a` may share one head of `b`."""
    share = a.shape[1] // b.shape[1]
    if share == 1:
        return product(xp, a, b)
    # The shared head broadcasts against a stack of groups, so `b` is not copied.
    batch, heads = a.shape[:2]
    a = xp.reshape(a, (batch, heads // share, share, *a.shape[2:]))
    y = product(xp, a, xp.expand_dims(b, axis=2))
    return xp.reshape(y, (batch, heads, *y.shape[3:]))


def _bias(xp: Namespace, op: Op, q: Array, keys: int, mask: Array, past: int, valid: Array) -> Array:
    """Return the bias of the scores: the mask, and -inf for keys that a query may not attend to; None for no bias."""
    zero, never = xp.zeros((), dtype=q.dtype), xp.full((), float("-inf"), dtype=q.dtype)
    bias = None
    if mask is not None:
        if mask.dtype == xp.bool:
            mask = xp.where(mask, zero, never)
        # Since opset 24 a mask may be shorter than the keys: keys beyond it are masked.
        missing = keys - mask.shape[-1]
        if missing:
            mask = pad_array(xp, mask, [*[(0, 0)] * (mask.ndim - 1), (0, missing)], fill=float("-inf"))
        bias = mask
    key = xp.arange(keys)
    ahead = xp.expand_dims(key, axis=0) - xp.expand_dims(xp.arange(q.shape[2]), axis=1) - past
    # If lengths of valid keys are passed, the caller manages the cache: the last `queries` valid keys belong to the
    # queries.
    if valid is not None:
        valid = xp.reshape(xp.astype(valid, key.dtype), (-1, 1, 1, 1))
        ahead = ahead - (valid - q.shape[2])
    left, right = op.get("left_window_size", -1), op.get("right_window_size", -1)
    limits = [ahead <= 0] if op.get("is_causal", 0) else []
    limits += [ahead >= -left] if left >= 0 else []
    limits += [ahead <= right] if right >= 0 else []
    limits += [key < valid] if valid is not None else []
    for allowed in limits:
        forbidden = xp.where(allowed, zero, never)
        bias = forbidden if bias is None else bias + forbidden
    return bias


def _masked_softmax(xp: Namespace, x: Array, bias: Array) -> Array:
    """Return the softmax over the last axis; zeros if the bias leaves no key."""
    # The maximum of a row of only -inf is -inf, and -inf - -inf would be NaN.
    top = xp.max(x, axis=-1, keepdims=True)
    e = xp.exp(x - xp.where(top == float("-inf"), xp.zeros_like(top), top))
    total = xp.sum(e, axis=-1, keepdims=True)
    weights = e / xp.where(total == 0, xp.ones_like(total), total)
    if bias is None:
        return weights
    # Decided by the bias: a score itself may be -inf, and then NaN is the correct result.
    nothing = xp.max(bias, axis=-1, keepdims=True) == float("-inf")
    return xp.where(nothing, xp.zeros((), dtype=weights.dtype), weights)


def _is_supported(node: ir.Node, opset: int) -> bool:
    """Return whether softmax runs in a supported dtype, and all opsets define requested scores in the same way."""
    if attribute_of(node, "softmax_precision", D.FLOAT) not in FLOAT:
        return False
    # The meaning of the scores with a soft cap changed between releases of the standard.
    scores_wanted = len(node.outputs) > 3 and bool(node.outputs[3].name)
    return not (scores_wanted and attribute_of(node, "softcap", 0.0))


def _rotary(
    xp: Namespace,
    x: Array,
    cosines: Array,
    sines: Array,
    positions: Array = None,
    *,
    interleaved: int,
    rotary_embedding_dim: int,
    num_heads: int,
) -> Array:
    shape = x.shape
    # Both layouts become (batch, sequence, heads, size), so that the cosines of a position broadcast over heads.
    if x.ndim == 3:
        x = xp.reshape(x, (*shape[:2], num_heads, shape[2] // num_heads))
    else:
        x = xp.permute_dims(x, (0, 2, 1, 3))
    size = rotary_embedding_dim or x.shape[3]
    turned, kept = x[..., :size], x[..., size:]
    if positions is not None:
        cosines, sines = _rows(xp, cosines, positions), _rows(xp, sines, positions)
    cosines, sines = xp.expand_dims(cosines, axis=2), xp.expand_dims(sines, axis=2)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : size // 2], turned[..., size // 2 :]
    real, imaginary = cosines * a - sines * b, sines * a + cosines * b
    if interleaved:
        turned = xp.reshape(xp.stack((real, imaginary), axis=-1), turned.shape)
    else:
        turned = xp.concat((real, imaginary), axis=-1)
    y = xp.concat((turned, kept), axis=-1)
    return xp.reshape(y, shape) if len(shape) == 3 else xp.permute_dims(y, (0, 2, 1, 3))


def _rows(xp: Namespace, cache: Array, positions: Array) -> Array:
    """Return the cache's rows at (batch, sequence) positions."""
    # Flat, and reshaped afterwards: the array API's `take` accepts only a vector of indices.
    rows = xp.take(cache, xp.reshape(positions, (-1,)), axis=0)
    return xp.reshape(rows, (*positions.shape, cache.shape[-1]))


TABLE: dict[str, Kernel] = {
    "Attention": Kernel(
        _attention, (FLOAT, FLOAT, FLOAT, FLOAT | BOOL, FLOAT, FLOAT, INDEX), range(23, 29), _is_supported
    ),
    "RotaryEmbedding": row(
        _rotary,
        *(FLOAT, FLOAT, FLOAT, WIDE),
        opsets=range(23, 29),
        interleaved=0,
        rotary_embedding_dim=0,
        num_heads=0,
    ),
}
