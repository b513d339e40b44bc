"""Functions of tensors that move elements: shapes, joining and cutting, taking, repetition, and copies of a form.

Known sizes are written into the graph as constants.  A size that is only named is left open if ONNX can do that (0
and -1 in a Reshape); otherwise a Shape node reads it at run time.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.dtypes import INDEX
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor.dims import (
    Shape,
    axes_of,
    axis_of,
    broadcast,
    cut_size,
    format_shape,
    is_static,
    resolve_shape,
    same_dim,
    same_shape,
    sizes,
)  # fmt: skip
from dask_ferro.graph.tensor.dtypes import DTypeLike, dtype_of
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import (
    Node,
    Tensor,
    TensorLike,
    TensorType,
    asarray,
    cast,
    constant_of,
    emit,
    emit_all,
    of_kind,
    promote,
)  # fmt: skip

_INT64 = ir.DataType.INT64
# ONNX's "to the end" of a slice; its negative is "to before the start".
_END = np.iinfo(np.int64).max


def ints(values: Sequence[int]) -> Tensor:
    return asarray(np.asarray(values, np.int64))


def on_axis(x: TensorLike, axis: int, where: str) -> tuple[Tensor, int]:
    """Return a tensor, and one of its axes counted from the front."""
    tensor = asarray(x)
    return tensor, axis_of(axis, tensor.ndim, where)


def _replace_dim(shape: Shape, axis: int, *dims: Dim) -> Shape:
    return (*shape[:axis], *dims, *shape[axis + 1 :])


@example("concat([[1, 2], [3]]).compute()", "array([1, 2, 3])")
def concat(arrays: Sequence[TensorLike], /, *, axis: int | None = 0) -> Tensor:
    """Return the tensors joined along an axis; all their other dimensions agree.  None joins them flat."""
    if not arrays:
        raise InputError("concat: there is nothing to join; pass at least one tensor")
    parts = promote("concat", *arrays)
    if axis is None:
        parts, axis = tuple(reshape(x, (-1,)) for x in parts), 0
    at = axis_of(axis, parts[0].ndim, "concat")
    others = [_replace_dim(part.shape, at, 1) for part in parts]
    if not all(same_shape(others[0], shape) for shape in others):
        listed = ", ".join(format_shape(part.shape) for part in parts)
        raise InputError(f"concat: shapes differ in other dimensions than the axis: {listed}")
    along = [part.shape[at] for part in parts]
    known = [next((dim for dim in dims if dim is not None), None) for dims in zip(*others, strict=True)]
    known[at] = sum(sizes(along)) if is_static(along) else None
    return emit("Concat", parts, tuple(known), axis=at) if len(parts) > 1 else parts[0]


@example("split([1, 2, 3], [1, 2])", "(<Tensor Split: int64(1,)>, <Tensor Split: int64(2,)>)")
def split(x: TensorLike, lengths: Sequence[int], /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """Return pieces of the given lengths along an axis; the sum of the lengths is the size of the dimension."""
    tensor, at = on_axis(x, axis, "split")
    if any(length < 0 for length in lengths):
        raise InputError(f"split: lengths: got {list(lengths)}, wanted whole numbers of at least 0")
    if not same_dim(tensor.shape[at], sum(lengths)):
        raise InputError(
            f"split: lengths {list(lengths)} do not add up to the {tensor.shape[at]!r} of dimension {at} of"
            f" {tensor!r}"
        )
    types = [TensorType(tensor.type.dtype, _replace_dim(tensor.shape, at, length)) for length in lengths]
    return emit_all("Split", [tensor, ints(lengths)], types, axis=at)


def shape_of(x: Tensor) -> Tensor:
    return ints(sizes(x.shape)) if is_static(x.shape) else emit("Shape", [x], (x.ndim,), _INT64)


def size_of(x: Tensor, axis: int) -> Tensor:
    """Return the size of one dimension as a vector of one element."""
    dim = x.shape[axis]
    return ints([dim]) if isinstance(dim, int) else emit("Shape", [x], (1,), _INT64, start=axis, end=axis + 1)


def scalar_size(x: Tensor, axis: int, dtype: ir.DataType) -> int | Tensor:
    """Return the size of one dimension, as a scalar of `dtype` if it is not known."""
    dim = x.shape[axis]
    return dim if isinstance(dim, int) else cast(squeeze(size_of(x, axis), 0), dtype)


def _sizes_of(shape: Sequence[Dim], x: Tensor, where: str) -> Tensor:
    """Return `shape` as an int64 vector; named dimensions are read from the dimensions of `x`."""
    if is_static(shape):
        return ints(sizes(shape))
    places: dict[Dim, int] = {dim: i for i, dim in enumerate(x.shape) if dim is not None}
    unknown = [dim for dim in shape if not isinstance(dim, int) and dim not in places]
    if unknown:
        raise InputError(f"{where}: {x!r} has no dimension {unknown[0]!r}; give its size")
    return concat([ints([n]) if isinstance(n, int) else size_of(x, places[n]) for n in shape], axis=0)


@example('reshape(ft.input("x", ("N", 3, 8)), ("N", -1))', "<Tensor Reshape: float32(N, 24)>")
def reshape(x: TensorLike, /, shape: Sequence[int | str]) -> Tensor:
    """Return the elements in another shape; one size may be -1, and names of dimensions of `x` may be used."""
    tensor = asarray(x)
    new = resolve_shape(tensor.shape, tuple(shape), "reshape")
    if new == tensor.shape and None not in new:
        return tensor
    # A name at its own place is ONNX's 0, and one other name may be the -1.
    pattern = [
        0 if isinstance(d, str) and tensor.shape[i : i + 1] == (d,) else d for i, d in enumerate(shape)
    ]
    names = [i for i, dim in enumerate(pattern) if isinstance(dim, str)]
    if len(names) == 1 and -1 not in pattern:
        pattern[names[0]] = -1
    if is_static(pattern) and 0 not in shape:
        return emit("Reshape", [tensor, ints(sizes(pattern))], new)
    target = _sizes_of(shape, tensor, "reshape")
    return emit("Reshape", [tensor, target], new, allowzero=int(0 in shape))


def fold(x: Tensor, pattern: Sequence[int]) -> Tensor:
    """Return `x` in the shape of ONNX's pattern: 0 keeps the dimension at its place, and -1 takes the remainder."""
    left = [dim for i, dim in enumerate(x.shape) if i >= len(pattern) or pattern[i] != 0]
    rest = math.prod(sizes(left)) // math.prod(n for n in pattern if n > 0) if is_static(left) else None
    shape = (x.shape[i] if n == 0 else rest if n == -1 else n for i, n in enumerate(pattern))
    return emit("Reshape", [x, ints(pattern)], tuple(shape))


def reshape_like(x: Tensor, like: Tensor) -> Tensor:
    if x.shape == like.shape and None not in x.shape:
        return x
    unknown = [i for i, dim in enumerate(like.shape) if not isinstance(dim, int)]
    if len(unknown) > 1 or 0 in like.shape:
        return emit("Reshape", [x, shape_of(like)], like.shape, allowzero=1)
    pattern = [-1 if i in unknown else dim for i, dim in enumerate(like.shape)]
    return emit("Reshape", [x, ints(sizes(pattern))], like.shape)


@example("broadcast_to([1, 2], (2, 2)).compute()", "array([[1, 2],\n       [1, 2]])")
def broadcast_to(x: TensorLike, /, shape: Sequence[int | str]) -> Tensor:
    """Return `x` broadcast to `shape`: repeated along dimensions of size 1, with new ones in front."""
    tensor, new = asarray(x), tuple(shape)
    if broadcast([tensor.shape, new], "broadcast_to") != new:
        raise InputError(
            f"broadcast_to: {format_shape(tensor.shape)} does not broadcast to {format_shape(new)}"
        )
    if new == tensor.shape:
        return tensor
    own = (1,) * (len(new) - tensor.ndim) + tensor.shape
    # A size of 1 keeps the dimension of `x`.
    target = tuple(1 if isinstance(d, str) and d == o else d for d, o in zip(new, own, strict=True))
    return emit("Expand", [tensor, _sizes_of(target, tensor, "broadcast_to")], new)


def broadcast_like(x: Tensor, like: Tensor) -> Tensor:
    if x.shape == like.shape and None not in x.shape:
        return x
    return emit("Expand", [x, shape_of(like)], like.shape)


@example(
    'permute_dims(ft.input("x", ("N", 3, 8)), (0, 2, 1))',
    "<Tensor Transpose: float32(N, 8, 3)>",
)
def permute_dims(x: TensorLike, /, axes: Sequence[int]) -> Tensor:
    """Return `x` with its dimensions in the order `axes`."""
    tensor = asarray(x)
    order = [axis_of(axis, tensor.ndim, "permute_dims") for axis in axes]
    if sorted(order) != list(range(tensor.ndim)):
        raise InputError(
            f"permute_dims: {tuple(axes)} is not an order of {tensor.ndim} dimensions; name each once"
        )
    if order == list(range(tensor.ndim)):
        return tensor
    # The gradient of `x @ w.mT` transposes back what the product reads, which would be computed and kept.
    origin = tensor.origin
    if isinstance(origin, Node) and (origin.domain, origin.op_type) == ("", "Transpose"):
        (before,), perm = origin.inputs, origin.attribute("perm")
        if before is not None and perm and [perm[i] for i in order] == list(range(tensor.ndim)):
            return before
    return emit("Transpose", [tensor], tuple(tensor.shape[i] for i in order), perm=order)


@example("matrix_transpose([[1, 2], [3, 4]]).compute()", "array([[1, 3],\n       [2, 4]])")
def matrix_transpose(x: TensorLike, /) -> Tensor:
    """Return `x` with its last two dimensions exchanged."""
    tensor = asarray(x)
    if tensor.ndim < 2:
        raise InputError(f"matrix_transpose: {tensor!r} has fewer than 2 dimensions")
    return permute_dims(tensor, [*range(tensor.ndim - 2), tensor.ndim - 1, tensor.ndim - 2])


@example('moveaxis(ft.input("x", ("N", 3, 8)), 1, -1)', "<Tensor Transpose: float32(N, 8, 3)>")
def moveaxis(x: TensorLike, source: int | Sequence[int], destination: int | Sequence[int], /) -> Tensor:
    """Return `x` with some dimensions moved to new positions, the others in their order."""
    tensor = asarray(x)
    pair = ((axes,) if isinstance(axes, int) else axes for axes in (source, destination))
    old, new = ([axis_of(axis, tensor.ndim, "moveaxis") for axis in axes] for axes in pair)
    if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
        raise InputError(
            f"moveaxis: got {source!r} to {destination!r}, wanted as many positions as dimensions"
        )
    order = [i for i in range(tensor.ndim) if i not in old]
    for to, axis in sorted(zip(new, old, strict=True)):
        order.insert(to, axis)
    return permute_dims(tensor, order)


@example("expand_dims([1, 2], axis=0)", "<Tensor Unsqueeze: int64(1, 2)>")
def expand_dims(x: TensorLike, /, *, axis: int | Sequence[int] = 0) -> Tensor:
    """Return `x` with new dimensions of size 1 at the positions `axis` of the result."""
    tensor = asarray(x)
    rank = tensor.ndim + (1 if isinstance(axis, int) else len(axis))
    axes = axes_of(axis, rank, "expand_dims")
    old = iter(tensor.shape)
    shape = tuple(1 if i in axes else next(old) for i in range(rank))
    return emit("Unsqueeze", [tensor, ints(axes)], shape) if axes else tensor


@example('squeeze(ft.input("x", ("N", 1, 8)), 1)', "<Tensor Squeeze: float32(N, 8)>")
def squeeze(x: TensorLike, /, axis: int | Sequence[int]) -> Tensor:
    """Return `x` without some of its dimensions of size 1, each named once; negative ones count from the back."""
    tensor = asarray(x)
    axes = axes_of(axis, tensor.ndim, "squeeze")
    for i in axes:
        if not same_dim(tensor.shape[i], 1):
            raise InputError(f"squeeze: dimension {i} of {tensor!r} is {tensor.shape[i]!r}, not 1")
    shape = tuple(dim for i, dim in enumerate(tensor.shape) if i not in axes)
    return emit("Squeeze", [tensor, ints(axes)], shape) if axes else tensor


@example("stack([[1, 2], [3, 4]]).compute()", "array([[1, 2],\n       [3, 4]])")
def stack(arrays: Sequence[TensorLike], /, *, axis: int = 0) -> Tensor:
    """Return the tensors, all of one shape, joined along a new axis."""
    return concat([expand_dims(array, axis=axis) for array in arrays], axis=axis)


@example("flip([1, 2, 3]).compute()", "array([3, 2, 1])")
def flip(x: TensorLike, /, *, axis: int | Sequence[int] | None = None) -> Tensor:
    """Return the elements in reverse order along the axes; None means all of them."""
    tensor = asarray(x)
    axes = axes_of(axis, tensor.ndim, "flip")
    return slice_dims(tensor, {i: slice(None, None, -1) for i in axes})


def slice_dims(x: Tensor, cuts: dict[int, slice]) -> Tensor:
    """Return `x` with a slice along each of some dimensions, by number."""
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
    """Return x[index]: integers, slices, `...` and None; a tensor of integers selects rows."""
    if isinstance(index, (Tensor, np.ndarray)):
        return take(x, index, axis=0)
    items = _without_ellipsis(index if isinstance(index, tuple) else (index,), x)
    by_axis = [item for item in items if item is not None]
    cuts = {axis: _to_slice(x, axis, item) for axis, item in enumerate(by_axis)}
    dropped = [axis for axis, item in enumerate(by_axis) if not isinstance(item, slice)]
    left = [item for item in items if item is None or isinstance(item, slice)]
    new = [position for position, item in enumerate(left) if item is None]
    return expand_dims(squeeze(slice_dims(x, cuts), dropped), axis=new)


def _without_ellipsis(items: tuple[Any, ...], x: Tensor) -> list[Any]:
    used = len([item for item in items if item is not None and item is not Ellipsis])
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if used > x.ndim or len(dots) > 1:
        raise InputError(f"index: {used} indices for {x!r}, and at most one '...'")
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (x.ndim - used), *items[at + 1 :]]


def _to_slice(x: Tensor, axis: int, item: Any) -> slice:
    if isinstance(item, slice):
        if item.step == 0:
            raise InputError(f"index: a slice of {x!r} has step 0")
        return item
    if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
        raise InputError(
            f"index: {item!r} is not an index of a tensor; use integers, slices, `...`, None or take"
        )
    i, size = int(item), x.shape[axis]
    if isinstance(size, int) and not -size <= i < size:
        raise InputError(f"index: {i} is out of bounds for dimension {axis} of {x!r}")
    return slice(i, None if i == -1 else i + 1)


checked_indices = partial(of_kind, INDEX, "int32 or int64 indices")


@example("take([10, 20, 30], [2, 0]).compute()", "array([30, 10])")
def take(x: TensorLike, indices: TensorLike, /, *, axis: int = 0) -> Tensor:
    """Return the slices of `x` along an axis at `indices`, whose dimensions replace the axis.

    Indices are int32 or int64 of any shape; negative ones count from the back.  The engine refuses indices out of
    bounds.
    """
    (tensor, at), at_indices = on_axis(x, axis, "take"), checked_indices(indices, "take")
    shape = _replace_dim(tensor.shape, at, *at_indices.shape)
    return emit("Gather", [tensor, at_indices], shape, axis=at)


@example("take_along_axis([[10, 20], [30, 40]], [[1], [0]], axis=1).compute()", "array([[20],\n       [30]])")
def take_along_axis(x: TensorLike, indices: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Return for each index the element of `x` at that index along the axis, and at its own position elsewhere.

    Indices are int32 or int64, in the shape of `x` except along the axis, where any size will do; nothing broadcasts.
    """
    (tensor, at), at_indices = (
        on_axis(x, axis, "take_along_axis"),
        checked_indices(indices, "take_along_axis"),
    )
    if not same_shape(_replace_dim(tensor.shape, at, None), at_indices.shape):
        raise InputError(
            f"take_along_axis: indices: got {at_indices!r}, wanted the shape of {tensor!r} except axis"
            f" {at}; use take to index whole slices"
        )
    return emit("GatherElements", [tensor, at_indices], at_indices.shape, axis=at)


@example("full_like([1, 2], 7).compute()", "array([7, 7])")
def full_like(x: TensorLike, /, value: float, dtype: DTypeLike = None) -> Tensor:
    """Return a tensor of the shape (and dtype) of `x` whose elements are `value`."""
    tensor = asarray(x)
    filled = np.asarray(value, tensor.dtype if dtype is None else dtype_of(dtype).numpy())
    return broadcast_like(asarray(filled), tensor)


@example("zeros_like([1.5, 2.5]).compute()", "array([0., 0.], dtype=float32)")
def zeros_like(x: TensorLike, /, dtype: DTypeLike = None) -> Tensor:
    """Return zeros in the shape (and dtype) of `x`."""
    return full_like(x, 0, dtype)


@example("ones_like([1.5, 2.5]).compute()", "array([1., 1.], dtype=float32)")
def ones_like(x: TensorLike, /, dtype: DTypeLike = None) -> Tensor:
    """Return ones in the shape (and dtype) of `x`."""
    return full_like(x, 1, dtype)


@example('astype([1.7, 2.2], "int64").compute()', "array([1, 2], dtype=int64)")
def astype(x: TensorLike, dtype: DTypeLike, /) -> Tensor:
    """Return `x` in another dtype."""
    return asarray(x).astype(dtype)


def positions(x: Tensor, axis: int) -> Tensor:
    """Return 0, 1, ... along one dimension, as an int64 vector."""
    dim = x.shape[axis]
    return ints(range(dim)) if isinstance(dim, int) else count_up(squeeze(size_of(x, axis), 0), dim)


def count_up(end: int | Tensor, dim: Dim) -> Tensor:
    """Return 0, 1, ... below `end` as an int64 vector of size `dim`, which is computed when the graph runs."""
    zero, one, last = (asarray(n, np.int64) for n in (0, 1, end))
    return emit("Range", [zero, last, one], (dim,), _INT64)


@example("tile([1, 2], (2, 2)).compute()", "array([[1, 2, 1, 2],\n       [1, 2, 1, 2]])")
def tile(x: TensorLike, repetitions: Sequence[int], /) -> Tensor:
    """Return `x` repeated as a whole, `repetitions` times along each dimension; missing ones are added in front."""
    tensor, counts = asarray(x), [operator.index(n) for n in repetitions]
    if any(n < 0 for n in counts):
        raise InputError(f"tile: repetitions: got {tuple(repetitions)}, wanted whole numbers of at least 0")
    tensor = expand_dims(tensor, axis=list(range(len(counts) - tensor.ndim)))
    counts = [1] * (tensor.ndim - len(counts)) + counts
    if set(counts) <= {1}:
        return tensor
    pairs = zip(tensor.shape, counts, strict=True)
    shape = tuple(dim if n == 1 else dim * n if isinstance(dim, int) else None for dim, n in pairs)
    return emit("Tile", [tensor, ints(counts)], shape)


@example("repeat([1, 2], 2).compute()", "array([1, 1, 2, 2], dtype=int64)")
def repeat(x: TensorLike, repeats: int | Sequence[int] | Tensor, /, *, axis: int | None = None) -> Tensor:
    """Return `x` with each element repeated, one after the other; without an axis, `x` is flattened first.

    `repeats` is one number, or one for each position along the axis.  A computed tensor is refused: the size of the
    result would depend on its values.
    """
    tensor, at = on_axis(reshape(x, (-1,)) if axis is None else x, axis or 0, "repeat")
    counts = constant_of(repeats) if isinstance(repeats, Tensor) else np.asarray(repeats)
    if counts is None or counts.dtype.kind not in "iu" or counts.ndim > 1 or (counts < 0).any():
        raise InputError(f"repeat: repeats: got {repeats!r}, wanted constant whole numbers of at least 0")
    if not counts.ndim:
        columns = expand_dims(positions(tensor, at), axis=1)
        return take(tensor, reshape(tile(columns, (1, int(counts.item()))), (-1,)), axis=at)
    size = tensor.shape[at]
    if not isinstance(size, int) or len(counts) not in (1, size):
        wanted = f"wanted one, or one for each of {size!r}"
        raise InputError(f"repeat: repeats: got {len(counts)} numbers, {wanted}")
    return take(tensor, ints(np.repeat(np.arange(size), counts).tolist()), axis=at)


@example("roll([1, 2, 3], 1).compute()", "array([3, 1, 2])")
def roll(x: TensorLike, /, shift: int | Sequence[int], *, axis: int | Sequence[int] | None = None) -> Tensor:
    """Return `x` with its elements moved by `shift` places towards the end; elements that leave return at the front.

    A shift below 0 moves towards the start.  There is one shift for each axis; without an axis `x` is rolled as if it
    were flat.
    """
    tensor = asarray(x)
    if axis is None:
        return reshape_like(roll(reshape(tensor, (-1,)), shift, axis=0), tensor)
    axes = [axis] if isinstance(axis, int) else list(axis)
    shifts = [shift] * len(axes) if isinstance(shift, int) else list(shift)
    if len(axes) != len(shifts):
        raise InputError(f"roll: got {len(shifts)} shifts for {len(axes)} axes; give one for each axis")
    for by, at in zip(shifts, axes, strict=True):
        tensor = _roll(tensor, by, axis_of(at, tensor.ndim, "roll"))
    return tensor


def _roll(x: Tensor, by: int, axis: int) -> Tensor:
    size = x.shape[axis]
    if not isinstance(size, int):
        # The places modulo a size that only the run knows.
        return take(x, (positions(x, axis) - by) % scalar_size(x, axis, _INT64), axis=axis)
    cut = size - by % size if size else 0
    if cut in (0, size):
        return x
    return concat([slice_dims(x, {axis: slice(cut, None)}), slice_dims(x, {axis: slice(0, cut)})], axis=axis)


@example("unstack([[1, 2], [3, 4]])", "(<Tensor Squeeze: int64(2,)>, <Tensor Squeeze: int64(2,)>)")
def unstack(x: TensorLike, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """Return the slices of `x` along an axis of known size, without that axis."""
    tensor, at = on_axis(x, axis, "unstack")
    size = tensor.shape[at]
    if not isinstance(size, int):
        raise InputError(f"unstack: dimension {at} of {tensor!r} has no known size; declare it")
    return tuple(squeeze(part, at) for part in split(tensor, [1] * size, axis=at))


__all__ = [
    "astype", "broadcast_to", "concat", "expand_dims", "flip", "full_like", "matrix_transpose", "moveaxis", "ones_like",
    "permute_dims", "repeat", "reshape", "roll", "split", "squeeze", "stack", "take", "take_along_axis", "tile",
    "unstack", "zeros_like",
]  # fmt: skip
