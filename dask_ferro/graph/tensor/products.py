"""Products of tensors, summed over some of their dimensions."""

from __future__ import annotations

import string
from collections.abc import Sequence

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor.dims import axis_of, broadcast, format_shape, same_dim, same_shape
from dask_ferro.graph.tensor.manipulation import expand_dims, moveaxis, squeeze
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, emit, promote


@example("matmul([[1, 2], [3, 4]], [1, 1]).compute()", "array([3, 7])")
def matmul(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the matrix product over the last dimension of `x1` and the last but one of `x2`; the others broadcast."""
    a, b = promote("matmul", x1, x2)
    if a.ndim == 0 or b.ndim == 0:
        raise InputError(f"matmul: {a!r} @ {b!r}: a scalar has no rows; use *")
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if not same_dim(a.shape[-1], inner):
        raise InputError(
            f"matmul: {format_shape(a.shape)} @ {format_shape(b.shape)}: {a.shape[-1]!r} columns do not match"
            f" {inner!r} rows"
        )
    batch = broadcast([a.shape[:-2], b.shape[:-2]], "matmul")
    return emit("MatMul", [a, b], (*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ())))


@example("vecdot([[1, 2], [3, 4]], [1, 1]).compute()", "array([3, 7], dtype=int64)")
def vecdot(x1: TensorLike, x2: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Return the sum of products along an axis, counted from the end (-1 is the last); other dimensions broadcast."""
    a, b = promote("vecdot", x1, x2)
    if not -min(a.ndim, b.ndim) <= axis < 0:
        raise InputError(
            f"vecdot: axis: got {axis}, wanted one from {-min(a.ndim, b.ndim)} to -1, of both tensors"
        )
    left, right = moveaxis(a, axis, -1), moveaxis(b, axis, -1)
    product = matmul(expand_dims(left, axis=-2), expand_dims(right, axis=-1))
    return squeeze(product, (-2, -1))


@example("tensordot([[1, 2], [3, 4]], [1, 1], axes=1).compute()", "array([3, 7])")
def tensordot(x1: TensorLike, x2: TensorLike, /, *, axes: int | Sequence[Sequence[int]] = 2) -> Tensor:
    """Return the sum of products over several dimensions of both; the result has the others, of `x1` first.

    `axes` is how many of the last dimensions of `x1` and of the first of `x2` to sum over, or the numbers of both.
    """
    a, b = promote("tensordot", x1, x2)
    if isinstance(axes, int):
        if not 0 <= axes <= min(a.ndim, b.ndim):
            raise InputError(
                f"tensordot: axes: got {axes} for {a!r} and {b!r}; take at most their dimensions"
            )
        axes = (range(a.ndim - axes, a.ndim), range(axes))
    left = [axis_of(i, a.ndim, "tensordot") for i in axes[0]]
    right = [axis_of(i, b.ndim, "tensordot") for i in axes[1]]
    sides = [a.shape[i] for i in left], [b.shape[i] for i in right]
    if len(set(left)) != len(left) or len(set(right)) != len(right) or not same_shape(*sides):
        raise InputError(
            f"tensordot: axes: got {left} of {a!r} and {right} of {b!r}, wanted pairs of one size"
        )
    letters = string.ascii_lowercase
    first, second = letters[: a.ndim], [letters[a.ndim + i] for i in range(b.ndim)]
    for i, j in zip(left, right, strict=True):
        second[j] = first[i]
    size = dict(zip([*first, *second], [*a.shape, *b.shape], strict=True))
    rest = [c for c in [*first, *second] if (c in first) != (c in second)]
    equation = f"{first},{''.join(second)}->{''.join(rest)}"
    return emit("Einsum", [a, b], tuple(size[c] for c in rest), equation=equation)


__all__ = ["matmul", "tensordot", "vecdot"]
