"""Tensors joined along an axis, and cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor.dims import Shape, axis_of, is_static, same, sizes, written
from dask_ferro.graph.tensor.origin import TensorType
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, emit, emit_all, promoted


def ints(values: Sequence[int]) -> Tensor:
    """Return a constant int64 vector, for axes, starts or pads."""
    return asarray(np.asarray(values, np.int64))


def concat(arrays: Sequence[TensorLike], /, *, axis: int | None = 0) -> Tensor:
    """Return the tensors joined along an axis; all their other dimensions agree.  None joins them flat.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.concat([[1, 2], [3]]).compute()
    array([1, 2, 3])
    """
    if not arrays:
        raise ConfigError("concat: there is nothing to join; give at least one tensor")
    parts = promoted("concat", *map(asarray, arrays))
    if axis is None:
        parts, axis = tuple(_flat(part) for part in parts), 0
    at = axis_of(axis, parts[0].ndim, "concat")
    if len({part.ndim for part in parts}) > 1:
        raise ConfigError(f"concat: ranks differ: {', '.join(written(p.shape) for p in parts)}")
    along = [part.shape[at] for part in parts]
    others = [(*part.shape[:at], 1, *part.shape[at + 1 :]) for part in parts]
    _check_alike(others, parts)
    joined = sum(sizes(along)) if is_static(along) else None
    known = [_first_known(dims) for dims in zip(*others, strict=True)]
    known[at] = joined
    return emit("Concat", parts, tuple(known), axis=at) if len(parts) > 1 else parts[0]


def _flat(x: Tensor) -> Tensor:
    return emit("Reshape", [x, ints([-1])], (x.size,))


def _first_known(dims: Iterable[Dim]) -> Dim:
    return next((dim for dim in dims if dim is not None), None)


def _check_alike(shapes: Sequence[Shape], parts: Sequence[Tensor]) -> None:
    for shape in shapes[1:]:
        if not all(same(a, b) for a, b in zip(shapes[0], shape, strict=True)):
            raise ConfigError(
                f"concat: shapes differ beside the axis: {', '.join(written(p.shape) for p in parts)}"
            )


def split(x: TensorLike, lengths: Sequence[int], /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """Return pieces of the given lengths along an axis.

    Parameters
    ----------
    x : Tensor
    lengths : sequence of int
        The length of each piece, at least 0; their sum is the size of the dimension.
    axis : int, optional
        The dimension to cut.

    Returns
    -------
    tuple of Tensor
        The pieces in order, in the dtype of `x`, and in its shape except along the axis.

    Raises
    ------
    ConfigError
        There is no such axis, a length is below 0, or the lengths do not add up to the size.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.split([1, 2, 3], [1, 2])
    (<Tensor Split: int64(1,)>, <Tensor Split: int64(2,)>)
    """
    tensor = asarray(x)
    at = axis_of(axis, tensor.ndim, "split")
    if any(length < 0 for length in lengths):
        raise ConfigError(f"split: lengths: got {list(lengths)}, wanted whole numbers from 0 on")
    if not same(tensor.shape[at], sum(lengths)):
        raise ConfigError(
            f"split: lengths {list(lengths)} do not add up to the {tensor.shape[at]!r} of dimension {at} of {tensor!r}"
        )
    shapes = [(*tensor.shape[:at], length, *tensor.shape[at + 1 :]) for length in lengths]
    types = [TensorType(tensor.type.dtype, shape) for shape in shapes]
    return emit_all("Split", [tensor, ints(lengths)], types, axis=at)


__all__ = [
    "concat", "split",
]  # fmt: skip
