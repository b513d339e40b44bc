"""Linear layers, embeddings, normalization and attention."""

from __future__ import annotations

import math

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import axis_of, broadcast, written
from dask_ferro.graph.tensor.manipulation import positions
from dask_ferro.graph.tensor.nn.activations import softmax
from dask_ferro.graph.tensor.statistical import reduce
from dask_ferro.graph.tensor.tensor import (
    Tensor,
    TensorLike,
    asarray,
    cast,
    emit,
    floating,
    promoted,
    widened,
)


def linear(x: TensorLike, weight: TensorLike, bias: TensorLike | None = None, /) -> Tensor:
    """Return x @ weight + bias; the weight is (features in, features out).

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.nn.linear([[1.0, 2.0]], [[1.0, 0.0], [0.0, 3.0]], [0.5, 0.5]).compute()
    array([[1.5, 6.5]], dtype=float32)
    """
    product = xp.matmul(x, weight)
    return product if bias is None else product + bias


def embedding(table: TensorLike, indices: TensorLike, /) -> Tensor:
    """Return the rows of `table` (entries, features) at `indices`; features are the last dimension.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.nn.embedding([[1.0, 2.0], [3.0, 4.0]], [1, 0, 1]).compute()
    array([[3., 4.],
           [1., 2.],
           [3., 4.]], dtype=float32)
    """
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

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.nn.layer_norm([[1.0, 3.0]], [1.0, 1.0], [0.0, 0.0]).compute().round(3)
    array([[-1.,  1.]], dtype=float32)
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

    Examples
    --------
    >>> import dask_ferro as ff
    >>> x = ff.argument("x", ("N", 4, 16, 8))
    >>> ff.nn.attention(x, x, x, is_causal=True)
    <Tensor MatMul: float32(N, 4, 16, 8)>
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
    """Return scores of queries (rows) by keys (columns), with -inf for keys after the query's position.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.nn.causal(ff.asarray([[1.0, 1.0], [1.0, 1.0]])).compute()
    array([[  1., -inf],
           [  1.,   1.]], dtype=float32)
    """
    rows = xp.expand_dims(positions(scores, scores.ndim - 2), axis=1)
    return xp.where(positions(scores, scores.ndim - 1) <= rows, scores, float("-inf"))


__all__ = ["attention", "causal", "embedding", "layer_norm", "linear"]
