"""TopK, NonZero and Compress: which elements, rather than what values."""

from __future__ import annotations

from typing import Any

from dask_ferro.engines.array.kernel import (
    ANY,
    BOOL,
    INTEGER,
    NUMERIC,
    Array,
    Fn,
    Kernel,
    Op,
    along,
    from_front,
    late,
    listed,
)


def _top_k(xp: Any, op: Op) -> Fn:
    axis, largest = op.get("axis", -1), bool(op.get("largest", 1))

    def make(counts: tuple[int, ...]) -> Fn:
        (count,) = counts

        def fn(x: Array, *_: Array) -> tuple[Array, Array]:
            at = from_front(axis, x.ndim)
            if not 0 <= count <= x.shape[at]:
                raise ValueError(f"k is {count}, wanted 0 to {x.shape[at]}, the size of axis {axis}")
            order = xp.argsort(
                x, axis=axis, descending=largest, stable=True
            )  # of equals, the lower index first
            order = order[along(at, slice(0, count))]
            return xp.take_along_axis(x, order, axis=axis), xp.astype(order, xp.int64, copy=False)

        return listed(op, fn)

    return make((op.get("k"),)) if op.opset < 10 else late(op, make, 1)


def _non_zero(xp: Any, op: Op) -> Fn:
    def fn(x: Array) -> Array:
        if x.ndim == 0:  # the spec's corner, unlike numpy: no coordinates, one column if non-zero
            return xp.zeros((0, int(bool(x))), dtype=xp.int64)
        return xp.astype(xp.stack(xp.nonzero(x), axis=0), xp.int64, copy=False)

    return fn


def _compress(xp: Any, op: Op) -> Fn:
    axis = op.get("axis")

    def fn(x: Array, condition: Array) -> Array:
        (chosen,) = xp.nonzero(condition)
        return xp.take(xp.reshape(x, (-1,)) if axis is None else x, chosen, axis=axis or 0)

    return fn


TABLE: dict[str, Kernel] = {
    "TopK": Kernel(_top_k, (NUMERIC, INTEGER)),
    "NonZero": Kernel(_non_zero, (ANY,)),
    "Compress": Kernel(_compress, (ANY, BOOL)),
}
