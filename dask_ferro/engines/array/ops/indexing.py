"""Operators that select or write elements by index: gather, scatter, one-hot, triangles, TopK, NonZero, Compress.

Indices may be negative.  The array API indexes by a vector along one axis (`take`), so n-dimensional indices
are flattened; GatherND turns tuples of indices into positions in the flattened array.

On numpy and CuPy, a scatter assigns through index arrays; with a reduction it uses `ufunc.at`, which applies repeated
indices.  CuPy's `ufunc.at` has no products, which are left to other engines, and supports only some dtypes
(`_ATOMIC`).  For other dtypes, and on namespaces with nothing beyond the standard, numpy scatters.
"""

from __future__ import annotations

import math

import numpy as np

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import (
    NEWEST,
    Fn,
    Kernel,
    Op,
    axis_shape,
    from_front,
    index_at,
    one_of,
    row,
    row_of,
)
from dask_ferro.graph.ir.dtypes import BOOL, DTYPES, INDEX, INTEGER, NUMERIC, WIDE

_UFUNCS = {"add": "add", "max": "maximum", "min": "minimum"}
# Dtypes that CuPy's `ufunc.at` supports, because CUDA has atomics for them.
_EXTREMA = frozenset({"int32", "uint32", "uint64", "float32", "float64"})
_ATOMIC = {"add": _EXTREMA | {"float16"}, "max": _EXTREMA, "min": _EXTREMA}


def _gather(xp: Namespace, op: Op) -> Fn:
    axis = op.get("axis", 0)
    # A single constant index, such as the index of a shape's first dimension, is a view.
    if 1 in op.constants and op.constants[1].ndim == 0 and axis >= 0:
        at = index_at(axis, int(op.constants[1]))
        return lambda x, indices: x[at]

    def fn(x: Array, indices: Array) -> Array:
        at = from_front(axis, x.ndim)
        flat = xp.reshape(_positive(xp, indices, x.shape[at]), (-1,))
        return xp.reshape(xp.take(x, flat, axis=at), x.shape[:at] + indices.shape + x.shape[at + 1 :])

    return fn


def _positive(xp: Namespace, indices: Array, size: int) -> Array:
    """Return indices counted from the front; those below -size stay as they are, so that a read refuses them."""
    return xp.where((indices < 0) & (indices >= -size), indices + size, indices)


def _gather_elements(xp: Namespace, x: Array, indices: Array, axis: int) -> Array:
    at = from_front(axis, x.ndim)
    # The indices may cover only a corner of the other axes.
    corner = tuple(slice(None) if i == at else slice(0, n) for i, n in enumerate(indices.shape))
    return xp.take_along_axis(x[corner], _positive(xp, indices, x.shape[at]), axis=at)


def _gather_nd(xp: Namespace, x: Array, indices: Array, batch_dims: int) -> Array:
    end = batch_dims + indices.shape[-1]
    outer, inner, rest = x.shape[:batch_dims], x.shape[batch_dims:end], x.shape[end:]
    position = xp.zeros(indices.shape[:-1], dtype=indices.dtype)
    for i, size in enumerate(inner):
        position = position * size + _positive(xp, indices[..., i], size)
    # Each batch starts at the end of the previous one.
    if batch_dims:
        first = xp.arange(math.prod(outer), dtype=indices.dtype) * math.prod(inner)
        position += xp.reshape(first, outer + (1,) * (indices.ndim - 1 - batch_dims))
    rows = xp.reshape(x, (math.prod(outer) * math.prod(inner), *rest))
    return xp.reshape(xp.take(rows, xp.reshape(position, (-1,)), axis=0), indices.shape[:-1] + rest)


def _scatter(xp: Namespace, x: Array, at: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    on_cupy = xp.__name__.rpartition(".")[2] == "cupy"
    # The sum of two's complements is the same whether they are read as signed or not.
    unsigned = on_cupy and reduction == "add" and x.dtype == xp.int64
    lacking = on_cupy and reduction != "none" and x.dtype.name not in _ATOMIC[reduction] and not unsigned
    if lacking or not hasattr(xp, "ndarray"):
        return _on_numpy(xp, x, at, updates, reduction)
    # A kernel never writes to its input.
    y = xp.asarray(x, copy=True)
    if reduction == "none":
        y[at] = updates
    elif unsigned:
        xp.add.at(y.view(xp.uint64), at, updates.view(xp.uint64))
    else:
        getattr(xp, _UFUNCS[reduction]).at(y, at, updates)
    return y


def _on_numpy(xp: Namespace, x: Array, at: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    """Scatter on the host, if the namespace has no way to apply repeated indices."""
    down = getattr(xp, "asnumpy", np.from_dlpack)
    return xp.asarray(_scatter(np, down(x), tuple(map(down, at)), down(updates), reduction))


def _scatter_nd(xp: Namespace, x: Array, indices: Array, updates: Array, reduction: str) -> Array:
    at = tuple(_positive(xp, indices[..., i], x.shape[i]) for i in range(indices.shape[-1]))
    return _scatter(xp, x, at, updates, reduction)


def _scatter_elements(
    xp: Namespace, x: Array, indices: Array, updates: Array, axis: int, reduction: str
) -> Array:
    at = [xp.reshape(xp.arange(n), axis_shape(i, x.ndim)) for i, n in enumerate(indices.shape)]
    front = from_front(axis, x.ndim)
    at[front] = _positive(xp, indices, x.shape[front])
    return _scatter(xp, x, tuple(at), updates, reduction)


def _tensor_scatter(
    xp: Namespace, cache: Array, update: Array, starts: Array | None = None, *, axis: int, mode: str
) -> Array:
    front = from_front(axis, cache.ndim)
    shape = update.shape[: front + 1]
    at = [xp.reshape(xp.arange(n), axis_shape(i, front + 1)) for i, n in enumerate(shape)]
    if starts is not None:
        at[front] = at[front] + xp.reshape(starts, (-1,) + (1,) * front)
    if mode == "circular":
        at[front] = at[front] % cache.shape[front]
    return _scatter(xp, cache, tuple(at), update, "none")


_known_reduction = one_of("reduction", ("none", *_UFUNCS), "none")


def _one_hot(xp: Namespace, op: Op, depths: tuple[int, ...]) -> Fn:
    axis, (depth,) = op.get("axis", -1), depths

    def fn(indices: Array, _: Array, values: Array) -> Array:
        at = axis % (indices.ndim + 1)
        wide = xp.astype(indices, xp.int64)  # a narrow or unsigned dtype may not hold index + depth
        places = xp.reshape(xp.arange(depth, dtype=xp.int64), (-1,) + (1,) * (indices.ndim - at))
        hot = xp.expand_dims(_positive(xp, wide, depth), axis=at) == places
        return xp.where(hot, values[1], values[0])

    return fn


def _trilu(xp: Namespace, op: Op, diagonals: tuple[int, ...] | None) -> Fn:
    cut, k = xp.triu if op.get("upper", 1) else xp.tril, diagonals[0] if diagonals else 0
    return lambda x, *_: cut(x, k=k)


def _top_k(xp: Namespace, op: Op, counts: tuple[int, ...] | int) -> Fn:
    axis, largest = op.get("axis", -1), bool(op.get("largest", 1))
    # An attribute until opset 9.
    count = counts if isinstance(counts, int) else counts[0]

    def fn(x: Array, *_: Array) -> tuple[Array, Array]:
        at = from_front(axis, x.ndim)
        if not 0 <= count <= x.shape[at]:
            raise ValueError(f"k is {count}, wanted 0 to {x.shape[at]}, the size of axis {axis}")
        # Stable: ONNX puts the lower index of equal elements first.
        order = xp.argsort(x, axis=axis, descending=largest, stable=True)
        order = order[index_at(at, slice(0, count))]
        return xp.take_along_axis(x, order, axis=axis), xp.astype(order, xp.int64, copy=False)

    return fn


def _non_zero(xp: Namespace, x: Array) -> Array:
    # The standard differs from numpy here: no coordinates, and one column if the number is not zero.
    if x.ndim == 0:
        return xp.zeros((0, int(bool(x))), dtype=xp.int64)
    return xp.astype(xp.stack(xp.nonzero(x), axis=0), xp.int64, copy=False)


def _compress(xp: Namespace, x: Array, condition: Array, axis: int | None) -> Array:
    (chosen,) = xp.nonzero(condition)
    return xp.take(xp.reshape(x, (-1,)) if axis is None else x, chosen, axis=axis or 0)


TABLE: dict[str, Kernel] = {
    "Gather": Kernel(_gather, (DTYPES, INDEX)),
    "GatherElements": row(_gather_elements, DTYPES, INDEX, axis=0),
    "GatherND": row(_gather_nd, DTYPES, WIDE, batch_dims=0),
    "ScatterND": row(_scatter_nd, NUMERIC, WIDE, NUMERIC, when=_known_reduction, reduction="none"),
    "ScatterElements": row(
        _scatter_elements, NUMERIC, INDEX, NUMERIC, when=_known_reduction, axis=0, reduction="none"
    ),
    "TensorScatter": row(
        _tensor_scatter, DTYPES, DTYPES, WIDE, opsets=range(24, NEWEST + 1), axis=-2, mode="linear"
    ),
    "OneHot": row_of(_one_hot, NUMERIC, NUMERIC, DTYPES),
    "Trilu": row_of(_trilu, DTYPES, WIDE),
    "TopK": row_of(_top_k, NUMERIC, INTEGER, since=10, attributes=("k",)),
    "NonZero": row(_non_zero, DTYPES),
    "Compress": row(_compress, DTYPES, BOOL, axis=None),
}
