"""Functions of tensors that move elements (reshape, transpose, join, cut, take), and matrix products.

Known sizes are written into the graph as constants.  A size that is only named is left open where ONNX can do that
(0 and -1 in a Reshape); elsewhere a Shape node reads it at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import INDEX
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor.dims import (
    Shape,
    alike,
    axes_of,
    axis_of,
    broadcast,
    cut_size,
    is_static,
    reshaped,
    same,
    sizes,
    written,
)
from dask_ferro.graph.tensor.origin import TensorType
from dask_ferro.graph.tensor.tensor import DTypeLike, Tensor, TensorLike, asarray, emit, emit_all, promoted

_INT64 = ir.DataType.INT64
# ONNX's "to the end" of a slice; its negative is "to before the start".
_END = np.iinfo(np.int64).max


def ints(values: Sequence[int]) -> Tensor:
    """Return a constant int64 vector, for axes, starts or pads."""
    return asarray(np.asarray(values, np.int64))


# ---- sizes at run time -------------------------------------------------------------------------------------


def shape_of(x: Tensor) -> Tensor:
    """Return the shape as an int64 vector, a constant if the shape is known."""
    return ints(sizes(x.shape)) if is_static(x.shape) else emit("Shape", [x], (x.ndim,), _INT64)


def size_of(x: Tensor, axis: int) -> Tensor:
    """Return the size of one dimension as an int64 vector of one element."""
    dim = x.shape[axis]
    return ints([dim]) if isinstance(dim, int) else emit("Shape", [x], (1,), _INT64, start=axis, end=axis + 1)


def _sizes_of(shape: Sequence[Dim], like: Sequence[Tensor], where: str) -> Tensor:
    """Return `shape` as an int64 vector; named dimensions are read from tensors that have them."""
    if is_static(shape):
        return ints(sizes(shape))
    places: dict[Dim, tuple[Tensor, int]] = {}
    for x in like:
        places |= {dim: (x, i) for i, dim in enumerate(x.shape)}
    unknown = [dim for dim in shape if not isinstance(dim, int) and (dim is None or dim not in places)]
    if unknown:
        raise ConfigError(f"{where}: no tensor here has a dimension {unknown[0]!r}; give its size")
    parts = [ints([dim]) if isinstance(dim, int) else size_of(*places[dim]) for dim in shape]
    return concat(parts, axis=0)


# ---- shape -------------------------------------------------------------------------------------------------


def reshape(x: TensorLike, /, shape: Sequence[int | str]) -> Tensor:
    """Return the elements in another shape; one size may be -1, and names of dimensions of `x` may be used.

    Raises
    ------
    ConfigError
        The number of elements differs, as far as the sizes are known.
    """
    tensor = asarray(x)
    new = reshaped(tensor.shape, tuple(shape), "reshape")
    if new == tensor.shape and None not in new:
        return tensor
    wanted = [0 if isinstance(d, str) and tensor.shape[i : i + 1] == (d,) else d for i, d in enumerate(shape)]
    named = [i for i, dim in enumerate(wanted) if isinstance(dim, str)]
    if len(named) == 1 and -1 not in wanted:
        wanted[named[0]] = -1
    if is_static(wanted) and 0 not in shape:
        return emit("Reshape", [tensor, ints(sizes(wanted))], new)
    target = _sizes_of(shape, [tensor], "reshape")
    return emit("Reshape", [tensor, target], new, allowzero=int(0 in shape))


def reshape_like(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` in the shape of `like`, which has the same number of elements."""
    if x.shape == like.shape and None not in x.shape:
        return x
    unknown = [i for i, dim in enumerate(like.shape) if not isinstance(dim, int)]
    if len(unknown) > 1 or 0 in like.shape:
        return emit("Reshape", [x, shape_of(like)], like.shape, allowzero=1)
    wanted = [-1 if i in unknown else dim for i, dim in enumerate(like.shape)]
    return emit("Reshape", [x, ints(sizes(wanted))], like.shape)


def broadcast_to(x: TensorLike, /, shape: Sequence[int | str]) -> Tensor:
    """Return `x` broadcast to `shape`: repeated along dimensions of size 1, with new ones in front."""
    tensor, new = asarray(x), tuple(shape)
    if broadcast([tensor.shape, new], "broadcast_to") != new:
        raise ConfigError(f"broadcast_to: {written(tensor.shape)} does not broadcast to {written(new)}")
    if new == tensor.shape:
        return tensor
    own = (1,) * (len(new) - tensor.ndim) + tensor.shape
    wanted = tuple(1 if isinstance(d, str) and d == o else d for d, o in zip(new, own, strict=True))
    # A size of 1 keeps the dimension of `x`.
    return emit("Expand", [tensor, _sizes_of(wanted, [tensor], "broadcast_to")], new)


def broadcast_like(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` broadcast to the shape of `like`."""
    if x.shape == like.shape and None not in x.shape:
        return x
    return emit("Expand", [x, shape_of(like)], like.shape)


def permute_dims(x: TensorLike, /, axes: Sequence[int]) -> Tensor:
    """Return `x` with its dimensions in the order `axes`."""
    tensor = asarray(x)
    order = [axis_of(axis, tensor.ndim, "permute_dims") for axis in axes]
    if sorted(order) != list(range(tensor.ndim)):
        raise ConfigError(
            f"permute_dims: {tuple(axes)} is not an order of {tensor.ndim} dimensions; name each once"
        )
    if order == list(range(tensor.ndim)):
        return tensor
    return emit("Transpose", [tensor], tuple(tensor.shape[i] for i in order), perm=order)


def matrix_transpose(x: TensorLike, /) -> Tensor:
    """Return `x` with its last two dimensions exchanged."""
    tensor = asarray(x)
    if tensor.ndim < 2:
        raise ConfigError(f"matrix_transpose: {tensor!r} has fewer than 2 dimensions")
    return permute_dims(tensor, [*range(tensor.ndim - 2), tensor.ndim - 1, tensor.ndim - 2])


def moveaxis(x: Tensor, source: int, destination: int) -> Tensor:
    """Return `x` with one dimension moved, the others in their order."""
    order = [i for i in range(x.ndim) if i != source % x.ndim]
    order.insert(destination % x.ndim, source % x.ndim)
    return permute_dims(x, order)


def expand_dims(x: TensorLike, /, *, axis: int | Sequence[int] = 0) -> Tensor:
    """Return `x` with new dimensions of size 1 at the positions `axis` of the result."""
    tensor = asarray(x)
    rank = tensor.ndim + (1 if isinstance(axis, int) else len(axis))
    axes = axes_of(axis, rank, "expand_dims")
    old = iter(tensor.shape)
    shape = tuple(1 if i in axes else next(old) for i in range(rank))
    return emit("Unsqueeze", [tensor, ints(axes)], shape) if axes else tensor


def squeeze(x: TensorLike, /, axis: int | Sequence[int]) -> Tensor:
    """Return `x` without some of its dimensions of size 1.

    Parameters
    ----------
    x : Tensor
    axis : int or sequence of int
        The dimensions to remove, each once; negative ones count from the back.

    Returns
    -------
    Tensor
        The other dimensions in their order, in the dtype of `x`.

    Raises
    ------
    ConfigError
        There is no such dimension, or its size is known and not 1.
    """
    tensor = asarray(x)
    axes = axes_of(axis, tensor.ndim, "squeeze")
    for i in axes:
        if not same(tensor.shape[i], 1):
            raise ConfigError(f"squeeze: dimension {i} of {tensor!r} is {tensor.shape[i]!r}, not 1")
    shape = tuple(dim for i, dim in enumerate(tensor.shape) if i not in axes)
    return emit("Squeeze", [tensor, ints(axes)], shape) if axes else tensor


# ---- join and cut ------------------------------------------------------------------------------------------


def concat(arrays: Sequence[TensorLike], /, *, axis: int = 0) -> Tensor:
    """Return the tensors joined along an axis; all their other dimensions agree."""
    if not arrays:
        raise ConfigError("concat: there is nothing to join; give at least one tensor")
    parts = promoted("concat", *map(asarray, arrays))
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


def _first_known(dims: Iterable[Dim]) -> Dim:
    return next((dim for dim in dims if dim is not None), None)


def _check_alike(shapes: Sequence[Shape], parts: Sequence[Tensor]) -> None:
    for shape in shapes[1:]:
        if not all(same(a, b) for a, b in zip(shapes[0], shape, strict=True)):
            raise ConfigError(
                f"concat: shapes differ beside the axis: {', '.join(written(p.shape) for p in parts)}"
            )


def stack(arrays: Sequence[TensorLike], /, *, axis: int = 0) -> Tensor:
    """Return the tensors, all of one shape, joined along a new axis."""
    return concat([expand_dims(array, axis=axis) for array in arrays], axis=axis)


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


def flip(x: TensorLike, /, *, axis: int | Sequence[int] | None = None) -> Tensor:
    """Return the elements in reverse order along the axes; None means all of them."""
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


# ---- take and products -------------------------------------------------------------------------------------


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


def matmul(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the matrix product over the last dimension of `x1` and the last but one of `x2`; the rest broadcasts.

    Raises
    ------
    ConfigError
        A scalar, or sizes that do not match.
    """
    a, b = promoted("matmul", asarray(x1), asarray(x2))
    if a.ndim == 0 or b.ndim == 0:
        raise ConfigError(f"matmul: {a!r} @ {b!r}: a scalar has no rows; use *")
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    if not same(a.shape[-1], inner):
        raise ConfigError(
            f"matmul: {written(a.shape)} @ {written(b.shape)}: {a.shape[-1]!r} columns do not match {inner!r} rows"
        )
    batch = broadcast([a.shape[:-2], b.shape[:-2]], "matmul")
    return emit("MatMul", [a, b], (*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ())))


# ---- creation ----------------------------------------------------------------------------------------------


def full_like(x: TensorLike, /, value: float, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return a tensor of the shape (and dtype) of `x` whose elements are `value`."""
    tensor = asarray(x)
    filled = np.asarray(value, tensor.dtype if dtype is None else dtype)
    return broadcast_like(asarray(filled), tensor)


def zeros_like(x: TensorLike, /, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return zeros in the shape (and dtype) of `x`."""
    return full_like(x, 0, dtype)


def ones_like(x: TensorLike, /, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return ones in the shape (and dtype) of `x`."""
    return full_like(x, 1, dtype)


def astype(x: TensorLike, dtype: DTypeLike, /) -> Tensor:
    """Return `x` in another dtype."""
    return asarray(x).astype(dtype)


def positions(x: Tensor, axis: int) -> Tensor:
    """Return 0, 1, ... along one dimension, as an int64 vector."""
    dim = x.shape[axis]
    if isinstance(dim, int):
        return ints(range(dim))
    end = squeeze(size_of(x, axis), 0)
    zero, one = (asarray(np.asarray(n, np.int64)) for n in (0, 1))
    return emit("Range", [zero, end, one], (dim,), _INT64)


__all__ = [
    "astype", "broadcast_to", "concat", "expand_dims", "flip", "full_like", "matmul", "matrix_transpose",
    "ones_like", "permute_dims", "reshape", "split", "squeeze", "stack", "take", "take_along_axis", "zeros_like",
]  # fmt: skip
