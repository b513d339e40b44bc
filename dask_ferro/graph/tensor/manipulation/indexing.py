"""Parts of tensors: slices and indices, and elements taken at given places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import INDEX
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor.dims import alike, axes_of, axis_of, cut_size
from dask_ferro.graph.tensor.manipulation.joining import ints
from dask_ferro.graph.tensor.manipulation.shapes import expand_dims, squeeze
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, emit

# ONNX's "to the end" of a slice; its negative is "to before the start".
_END = np.iinfo(np.int64).max


def flip(x: TensorLike, /, *, axis: int | Sequence[int] | None = None) -> Tensor:
    """Return the elements in reverse order along the axes; None means all of them.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.flip([1, 2, 3]).compute()
    array([3, 2, 1])
    """
    tensor = asarray(x)
    axes = axes_of(axis, tensor.ndim, "flip")
    return sliced(tensor, {i: slice(None, None, -1) for i in axes})


def sliced(x: Tensor, cuts: dict[int, slice]) -> Tensor:
    """Return `x` with one slice along each of some dimensions."""
    cuts = {axis: cut for axis, cut in cuts.items() if cut != slice(None)}
    if not cuts:
        return x
    # One Slice for all axes, since each node is a pass over the data.
    bounds = [_bounds(cut, x.shape[axis]) for axis, cut in cuts.items()]
    starts, ends, steps = (ints(column) for column in zip(*bounds, strict=True))
    shape = tuple(cut_size(dim, cuts[i]) if i in cuts else dim for i, dim in enumerate(x.shape))
    return emit("Slice", [x, starts, ends, ints(list(cuts)), steps], shape)


def _bounds(cut: slice, dim: Dim) -> tuple[int, int, int]:
    """Return start, end and step of a slice as ONNX writes them."""
    step = 1 if cut.step is None else int(cut.step)
    if cut_size(dim, cut) == 0:
        # numpy and ONNX differ if the start is before the first element, so an empty slice is explicit.
        return 0, 0, 1
    start = (0 if step > 0 else _END) if cut.start is None else int(cut.start)
    end = (_END if step > 0 else -_END) if cut.stop is None else int(cut.stop)
    return start, end, step


def getitem(x: Tensor, index: Any) -> Tensor:
    """Return x[index]: integers, slices, `...` and None; a tensor of integers selects rows.

    Raises
    ------
    ConfigError
        Anything else, too many indices, or an integer out of bounds.
    """
    if isinstance(index, (Tensor, np.ndarray)):
        return take(x, index, axis=0)
    items = _without_ellipsis(index if isinstance(index, tuple) else (index,), x)
    cuts: dict[int, slice] = {}
    dropped: list[int] = []
    new: list[int] = []
    axis = position = 0
    for item in items:
        if item is None:
            new.append(position)
            position += 1
            continue
        cuts[axis] = _cut(x, axis, item)
        if isinstance(item, slice):
            position += 1
        else:
            dropped.append(axis)
        axis += 1
    result = squeeze(sliced(x, cuts), dropped)
    return expand_dims(result, axis=new) if new else result


def _without_ellipsis(items: tuple[Any, ...], x: Tensor) -> list[Any]:
    """Return the index with one item per dimension, and its Nones."""
    used = len([item for item in items if item is not None and item is not Ellipsis])
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if used > x.ndim or len(dots) > 1:
        raise ConfigError(f"index: {used} indices for {x!r}, and at most one '...'")
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (x.ndim - used), *items[at + 1 :]]


def _cut(x: Tensor, axis: int, item: Any) -> slice:
    if isinstance(item, slice):
        if item.step == 0:
            raise ConfigError(f"index: a slice of {x!r} has step 0")
        return item
    if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
        raise ConfigError(
            f"index: {item!r} is not an index of a tensor; use integers, slices, `...`, None or take"
        )
    i, size = int(item), x.shape[axis]
    if isinstance(size, int) and not -size <= i < size:
        raise ConfigError(f"index: {i} is out of bounds for dimension {axis} of {x!r}")
    return slice(i, None if i == -1 else i + 1)


def checked_indices(indices: TensorLike, where: str) -> Tensor:
    """Return indices as a tensor of integers.

    Raises
    ------
    ConfigError
        Their dtype is neither int32 nor int64.
    """
    tensor = asarray(indices)
    if tensor.type.dtype not in INDEX:
        raise ConfigError(f"{where}: indices are int32 or int64, got {tensor!r}; use astype")
    return tensor


def take(x: TensorLike, indices: TensorLike, /, *, axis: int = 0) -> Tensor:
    """Return the slices of `x` along an axis at `indices`, whose dimensions replace the axis.

    Parameters
    ----------
    x : Tensor
    indices : Tensor
        Of int32 or int64, in any shape; negative ones count from the back. The engine refuses indices out of bounds.
    axis : int, optional
        The indexed dimension.

    Returns
    -------
    Tensor
        (x.shape before the axis, indices.shape, x.shape after it), in the dtype of `x`.

    Raises
    ------
    ConfigError
        There is no such axis, or the indices are neither int32 nor int64.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.take([10, 20, 30], [2, 0]).compute()
    array([30, 10])
    """
    tensor, at_indices = asarray(x), checked_indices(indices, "take")
    at = axis_of(axis, tensor.ndim, "take")
    shape = (*tensor.shape[:at], *at_indices.shape, *tensor.shape[at + 1 :])
    return emit("Gather", [tensor, at_indices], shape, axis=at)


def take_along_axis(x: TensorLike, indices: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Return for each index the element of `x` at that index along the axis, and at its own position elsewhere.

    Parameters
    ----------
    x : Tensor
    indices : Tensor
        Of int32 or int64, in the shape of `x` except along the axis, where any size will do; nothing broadcasts.
    axis : int, optional
        The indexed dimension.

    Returns
    -------
    Tensor
        In the shape of `indices` and the dtype of `x`.

    Raises
    ------
    ConfigError
        There is no such axis, the indices are neither int32 nor int64, or the other dimensions differ.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.take_along_axis([[10, 20], [30, 40]], [[1], [0]], axis=1).compute()
    array([[20],
           [30]])
    """
    tensor, at_indices = asarray(x), checked_indices(indices, "take_along_axis")
    at = axis_of(axis, tensor.ndim, "take_along_axis")
    if at_indices.ndim != tensor.ndim:
        raise ConfigError(f"take_along_axis: {at_indices!r} does not have the rank of {tensor!r}")
    sides = [(*t.shape[:at], *t.shape[at + 1 :]) for t in (tensor, at_indices)]
    if not alike(*sides):
        raise ConfigError(
            f"take_along_axis: indices: got {at_indices!r}, wanted the shape of {tensor!r} but for axis {at}; "
            "use take to index whole slices"
        )
    return emit("GatherElements", [tensor, at_indices], at_indices.shape, axis=at)


__all__ = [
    "flip", "take", "take_along_axis",
]  # fmt: skip
