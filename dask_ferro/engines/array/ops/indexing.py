"""Operators that select or write elements by index: gather, scatter, one-hot, triangles, TopK, NonZero, Compress.

Indices may be negative.  The array API indexes by a vector along one axis (`take`), so n-dimensional indices
are flattened; GatherND turns tuples of indices into positions in the flattened array.

On numpy and CuPy, a scatter assigns through index arrays; with a reduction it uses `ufunc.at`, which applies repeated
indices.  CuPy's `ufunc.at` has no products, which are left to other engines, and supports some dtypes alone
(`_ATOMIC`).  For other dtypes, and on namespaces with nothing beyond the standard, a scatter sorts (`_by_rounds`).
"""

from __future__ import annotations

import math

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import (
    NEWEST,
    Fn,
    Kernel,
    Op,
    along,
    axis_shape,
    from_front,
    late,
    listed,
    only,
)
from dask_ferro.graph.ir.dtypes import ANY, BOOL, INDEX, INTEGER, NUMERIC, WIDE

_AT = {"add": "add", "max": "maximum", "min": "minimum"}
# Dtypes that CuPy's `ufunc.at` supports, because CUDA has atomics for them.
_EXTREMA = frozenset({"int32", "uint32", "uint64", "float32", "float64"})
_ATOMIC = {"add": _EXTREMA | {"float16"}, "max": _EXTREMA, "min": _EXTREMA}


def _gather(xp: Namespace, op: Op) -> Fn:
    axis = op.get("axis", 0)
    # A single constant index, such as that of a shape's first dimension, is a view.
    if 1 in op.constants and op.constants[1].ndim == 0 and axis >= 0:
        at = along(axis, int(op.constants[1]))
        return lambda x, indices: x[at]

    def fn(x: Array, indices: Array) -> Array:
        at = from_front(axis, x.ndim)
        flat = xp.reshape(_positive(xp, indices, x.shape[at]), (-1,))
        return xp.reshape(xp.take(x, flat, axis=at), x.shape[:at] + indices.shape + x.shape[at + 1 :])

    return fn


def _positive(xp: Namespace, indices: Array, size: int) -> Array:
    """Return indices counted from the front; those below -size stay as they are, so that a read refuses them."""
    return xp.where((indices < 0) & (indices >= -size), indices + size, indices)


def _gather_elements(xp: Namespace, op: Op) -> Fn:
    axis = op.get("axis", 0)

    def fn(x: Array, indices: Array) -> Array:
        at = from_front(axis, x.ndim)
        # The indices may cover only a corner of the other axes.
        corner = tuple(slice(None) if i == at else slice(0, n) for i, n in enumerate(indices.shape))
        return xp.take_along_axis(x[corner], _positive(xp, indices, x.shape[at]), axis=at)

    return fn


def _gather_nd(xp: Namespace, op: Op) -> Fn:
    batch = op.get("batch_dims", 0)

    def fn(x: Array, indices: Array) -> Array:
        depth = indices.shape[-1]
        outer, inner, rest = x.shape[:batch], x.shape[batch : batch + depth], x.shape[batch + depth :]
        position = xp.zeros(indices.shape[:-1], dtype=indices.dtype)
        for i, size in enumerate(inner):
            position = position * size + _positive(xp, indices[..., i], size)
        # Each batch starts where the previous one ends.
        if batch:
            first = xp.arange(math.prod(outer), dtype=indices.dtype) * math.prod(inner)
            position += xp.reshape(first, outer + (1,) * (indices.ndim - 1 - batch))
        rows = xp.reshape(x, (math.prod(outer) * math.prod(inner), *rest))
        return xp.reshape(xp.take(rows, xp.reshape(position, (-1,)), axis=0), indices.shape[:-1] + rest)

    return fn


def _scatter(xp: Namespace, x: Array, at: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    on_cupy = xp.__name__.rpartition(".")[2] == "cupy"
    # The sum of two's complements is the same whether they are read as signed or not.
    unsigned = on_cupy and reduction == "add" and x.dtype == xp.int64
    lacking = on_cupy and reduction != "none" and x.dtype.name not in _ATOMIC[reduction] and not unsigned
    if lacking or not hasattr(xp, "ndarray"):
        return _by_rounds(xp, x, at, updates, reduction)
    # A kernel never writes to its input.
    y = xp.asarray(x, copy=True)
    if reduction == "none":
        y[at] = updates
    elif unsigned:
        xp.add.at(y.view(xp.uint64), at, updates.view(xp.uint64))
    else:
        getattr(xp, _AT[reduction]).at(y, at, updates)
    return y


def _by_rounds(xp: Namespace, x: Array, at: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    """Scatter with functions of the standard alone, in rounds that write each position at most once."""
    combine = {"none": lambda old, new: new, "add": xp.add, "max": xp.maximum, "min": xp.minimum}[reduction]
    depth = len(at)
    width = math.prod(x.shape[depth:])
    rows = xp.reshape(x, (math.prod(x.shape[:depth]), width))
    position = xp.zeros((), dtype=xp.int64)
    for index, size in zip(at, x.shape, strict=False):
        position = position * size + xp.astype(index, xp.int64)
    position = xp.reshape(position, (-1,))
    # After sorting, equal positions are adjacent, and bisection finds the update of a position; stable, since the last
    # update wins.
    order = xp.argsort(position, stable=True)
    position = xp.take(position, order)
    updates = xp.take(xp.reshape(updates, (position.shape[0], width)), order, axis=0)
    # The number of an update among those of the same position, which is the round that writes it.
    turn = xp.arange(position.shape[0], dtype=xp.int64) - xp.searchsorted(position, position)
    for number in range(int(xp.max(turn)) + 1 if position.shape[0] else 0):
        (now,) = xp.nonzero(turn == number)
        written, values = xp.take(position, now), xp.take(updates, now, axis=0)
        place = xp.arange(rows.shape[0], dtype=xp.int64)
        found = xp.minimum(xp.searchsorted(written, place), written.shape[0] - 1)
        hit = xp.expand_dims(xp.take(written, found) == place, axis=1)
        rows = xp.where(hit, combine(rows, xp.take(values, found, axis=0)), rows)
    return xp.reshape(rows, x.shape)


def _scatter_nd(xp: Namespace, op: Op) -> Fn:
    reduction = op.get("reduction", "none")

    def fn(x: Array, indices: Array, updates: Array) -> Array:
        at = tuple(_positive(xp, indices[..., i], x.shape[i]) for i in range(indices.shape[-1]))
        return _scatter(xp, x, at, updates, reduction)

    return fn


def _scatter_elements(xp: Namespace, op: Op) -> Fn:
    axis, reduction = op.get("axis", 0), op.get("reduction", "none")

    def fn(x: Array, indices: Array, updates: Array) -> Array:
        rank = x.ndim
        at = [xp.reshape(xp.arange(n), axis_shape(i, rank)) for i, n in enumerate(indices.shape)]
        front = from_front(axis, rank)
        at[front] = _positive(xp, indices, x.shape[front])
        return _scatter(xp, x, tuple(at), updates, reduction)

    return fn


def _tensor_scatter(xp: Namespace, op: Op) -> Fn:
    axis, circular = op.get("axis", -2), op.get("mode", "linear") == "circular"

    def fn(cache: Array, update: Array, starts: Array | None = None) -> Array:
        front = from_front(axis, cache.ndim)
        at = [
            xp.reshape(xp.arange(n), axis_shape(i, front + 1))
            for i, n in enumerate(update.shape[: front + 1])
        ]
        if starts is not None:
            at[front] = at[front] + xp.reshape(starts, (-1,) + (1,) * front)
        if circular:
            at[front] = at[front] % cache.shape[front]
        return _scatter(xp, cache, tuple(at), update, "none")

    return fn


_known_reduction = only("reduction", ("none", *_AT), "none")


def _one_hot(xp: Namespace, op: Op) -> Fn:
    axis = op.get("axis", -1)

    def make(depths: tuple[int, ...]) -> Fn:
        (depth,) = depths

        def fn(indices: Array, _: Array, values: Array) -> Array:
            at = axis % (indices.ndim + 1)
            wide = xp.astype(indices, xp.int64)  # a narrow or unsigned dtype may not hold index + depth
            places = xp.reshape(xp.arange(depth, dtype=xp.int64), (-1,) + (1,) * (indices.ndim - at))
            hot = xp.expand_dims(_positive(xp, wide, depth), axis=at) == places
            return xp.where(hot, values[1], values[0])

        return fn

    return late(op, make, 1)


def _trilu(xp: Namespace, op: Op) -> Fn:
    cut = xp.triu if op.get("upper", 1) else xp.tril

    def make(diagonals: tuple[int, ...] | None) -> Fn:
        k = diagonals[0] if diagonals else 0
        return lambda x, *_: cut(x, k=k)

    return late(op, make, 1)


def _top_k(xp: Namespace, op: Op) -> Fn:
    axis, largest = op.get("axis", -1), bool(op.get("largest", 1))

    def make(counts: tuple[int, ...]) -> Fn:
        (count,) = counts

        def fn(x: Array, *_: Array) -> tuple[Array, Array]:
            at = from_front(axis, x.ndim)
            if not 0 <= count <= x.shape[at]:
                raise ValueError(f"k is {count}, wanted 0 to {x.shape[at]}, the size of axis {axis}")
            # Stable: ONNX puts the lower index of equal elements first.
            order = xp.argsort(x, axis=axis, descending=largest, stable=True)
            order = order[along(at, slice(0, count))]
            return xp.take_along_axis(x, order, axis=axis), xp.astype(order, xp.int64, copy=False)

        return listed(op, fn)

    return make((op.get("k"),)) if op.opset < 10 else late(op, make, 1)


def _non_zero(xp: Namespace, op: Op) -> Fn:
    def fn(x: Array) -> Array:
        # The standard differs from numpy here: no coordinates, and one column if the number is not zero.
        if x.ndim == 0:
            return xp.zeros((0, int(bool(x))), dtype=xp.int64)
        return xp.astype(xp.stack(xp.nonzero(x), axis=0), xp.int64, copy=False)

    return fn


def _compress(xp: Namespace, op: Op) -> Fn:
    axis = op.get("axis")

    def fn(x: Array, condition: Array) -> Array:
        (chosen,) = xp.nonzero(condition)
        return xp.take(xp.reshape(x, (-1,)) if axis is None else x, chosen, axis=axis or 0)

    return fn


TABLE: dict[str, Kernel] = {
    "Gather": Kernel(_gather, (ANY, INDEX)),
    "GatherElements": Kernel(_gather_elements, (ANY, INDEX)),
    "GatherND": Kernel(_gather_nd, (ANY, WIDE)),
    "ScatterND": Kernel(_scatter_nd, (NUMERIC, WIDE, NUMERIC), when=_known_reduction),
    "ScatterElements": Kernel(_scatter_elements, (NUMERIC, INDEX, NUMERIC), when=_known_reduction),
    "TensorScatter": Kernel(_tensor_scatter, (ANY, ANY, WIDE), range(24, NEWEST + 1)),
    "OneHot": Kernel(_one_hot, (NUMERIC, NUMERIC, ANY), reads=(1,)),
    "Trilu": Kernel(_trilu, (ANY, WIDE), reads=(1,)),
    "TopK": Kernel(_top_k, (NUMERIC, INTEGER), reads=(1,)),
    "NonZero": Kernel(_non_zero, (ANY,)),
    "Compress": Kernel(_compress, (ANY, BOOL)),
}
