"""Elements repeated, rotated, and taken apart."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.dims import axis_of
from dask_ferro.graph.tensor.manipulation.creation import positions
from dask_ferro.graph.tensor.manipulation.indexing import sliced, take
from dask_ferro.graph.tensor.manipulation.joining import concat, ints
from dask_ferro.graph.tensor.manipulation.shapes import expand_dims, reshape, reshape_like, size_of, squeeze
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, constant_of, emit


def tile(x: TensorLike, repetitions: Sequence[int], /) -> Tensor:
    """Return `x` repeated as a whole, so many times along each dimension; missing dimensions are added in front.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.tile([1, 2], (2, 2)).compute()
    array([[1, 2, 1, 2],
           [1, 2, 1, 2]])
    """
    tensor = asarray(x)
    counts = [operator.index(n) for n in repetitions]
    if any(n < 0 for n in counts):
        raise ConfigError(f"tile: repetitions: got {tuple(repetitions)}, wanted whole numbers from 0 on")
    tensor = expand_dims(tensor, axis=list(range(len(counts) - tensor.ndim)))
    counts = [1] * (tensor.ndim - len(counts)) + counts
    if set(counts) <= {1}:
        return tensor
    shape = tuple(_times(dim, n) for dim, n in zip(tensor.shape, counts, strict=True))
    return emit("Tile", [tensor, ints(counts)], shape)


def _times(dim: int | str | None, count: int) -> int | str | None:
    return dim if count == 1 else dim * count if isinstance(dim, int) else None


def repeat(x: TensorLike, repeats: int | Sequence[int] | Tensor, /, *, axis: int | None = None) -> Tensor:
    """Return `x` with each element repeated, one after the other.

    Parameters
    ----------
    x : Tensor
    repeats : int, or sequence of int
        For all elements, or for each position along the axis.  A computed tensor is refused: the size of the result
        would depend on its values.
    axis : int, optional
        The dimension that becomes longer; by default `x` is flattened first.

    Raises
    ------
    ConfigError
        A number below 0, or not as many numbers as there are positions.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.repeat([1, 2], 2).compute()
    array([1, 1, 2, 2], dtype=int64)
    """
    tensor = reshape(asarray(x), (-1,)) if axis is None else asarray(x)
    at = axis_of(axis or 0, tensor.ndim, "repeat")
    counts = constant_of(repeats) if isinstance(repeats, Tensor) else np.asarray(repeats)
    if counts is None or counts.dtype.kind not in "iu" or counts.ndim > 1 or (counts < 0).any():
        raise ConfigError(f"repeat: repeats: got {repeats!r}, wanted constant whole numbers from 0 on")
    if counts.ndim:
        return take(tensor, _repeated(tensor, at, counts), axis=at)
    count = int(counts.item())
    columns = expand_dims(positions(tensor, at), axis=1)
    shape = (_times(columns.shape[0], count),)
    return take(tensor, emit("Reshape", [tile(columns, (1, count)), ints([-1])], shape), axis=at)


def _repeated(x: Tensor, axis: int, counts: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
    """Return the position that each element of the result is read from."""
    size = x.shape[axis]
    if isinstance(size, int) and len(counts) in (1, size):
        return ints(np.repeat(np.arange(size), counts).tolist())
    raise ConfigError(f"repeat: repeats: got {len(counts)} numbers, wanted one, or one for each of {size!r}")


def roll(x: TensorLike, /, shift: int | Sequence[int], *, axis: int | Sequence[int] | None = None) -> Tensor:
    """Return `x` with its elements moved by `shift` places towards the end; those that leave come in at the front.

    Parameters
    ----------
    x : Tensor
    shift : int or sequence of int
        Below 0 it moves towards the start.
    axis : int or sequence of int, optional
        The dimensions, one for each shift; by default `x` is rolled as if it were flat.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.roll([1, 2, 3], 1).compute()
    array([3, 1, 2])
    """
    tensor = asarray(x)
    if axis is None:
        return reshape_like(roll(reshape(tensor, (-1,)), shift, axis=0), tensor)
    axes = [axis] if isinstance(axis, int) else list(axis)
    shifts = [shift] * len(axes) if isinstance(shift, int) else list(shift)
    if len(axes) != len(shifts):
        raise ConfigError(f"roll: got {len(shifts)} shifts for {len(axes)} axes; give one for each axis")
    for by, at in zip(shifts, axes, strict=True):
        tensor = _rolled(tensor, by, axis_of(at, tensor.ndim, "roll"))
    return tensor


def _rolled(x: Tensor, by: int, axis: int) -> Tensor:
    size = x.shape[axis]
    if not isinstance(size, int):
        # The places modulo a size that only the run knows.
        return take(x, (positions(x, axis) - by) % squeeze(size_of(x, axis), 0), axis=axis)
    cut = size - by % size if size else 0
    if cut in (0, size):
        return x
    return concat([sliced(x, {axis: slice(cut, None)}), sliced(x, {axis: slice(0, cut)})], axis=axis)


def unstack(x: TensorLike, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """Return the slices of `x` along an axis of known size, without that axis.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> [part.shape for part in ff.unstack([[1, 2, 3], [4, 5, 6]])]
    [(3,), (3,)]
    """
    tensor = asarray(x)
    at = axis_of(axis, tensor.ndim, "unstack")
    size = tensor.shape[at]
    if not isinstance(size, int):
        raise ConfigError(f"unstack: dimension {at} of {tensor!r} has no known size; declare it")
    return tuple(squeeze(sliced(tensor, {at: slice(i, i + 1)}), at) for i in range(size))


__all__ = ["repeat", "roll", "tile", "unstack"]
