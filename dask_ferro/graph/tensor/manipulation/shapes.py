"""Tensors in another shape, or with their dimensions in another order.

Known sizes are written into the graph as constants.  A size that is only named is left open where ONNX can do that
(0 and -1 in a Reshape); elsewhere a Shape node reads it at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor.dims import (
    axes_of,
    axis_of,
    broadcast,
    is_static,
    reshaped,
    same,
    sizes,
    written,
)
from dask_ferro.graph.tensor.manipulation.joining import concat, ints
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, cast, emit

_INT64 = ir.DataType.INT64


def shape_of(x: Tensor) -> Tensor:
    """Return the shape as an int64 vector, a constant if the shape is known."""
    return ints(sizes(x.shape)) if is_static(x.shape) else emit("Shape", [x], (x.ndim,), _INT64)


def size_of(x: Tensor, axis: int) -> Tensor:
    """Return the size of one dimension as an int64 vector of one element."""
    dim = x.shape[axis]
    return ints([dim]) if isinstance(dim, int) else emit("Shape", [x], (1,), _INT64, start=axis, end=axis + 1)


def scalar_size(x: Tensor, axis: int, dtype: ir.DataType) -> int | Tensor:
    """Return the size of one dimension, as a scalar of `dtype` if it is not known."""
    dim = x.shape[axis]
    return dim if isinstance(dim, int) else cast(squeeze(size_of(x, axis), 0), dtype)


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


def reshape(x: TensorLike, /, shape: Sequence[int | str]) -> Tensor:
    """Return the elements in another shape; one size may be -1, and names of dimensions of `x` may be used.

    Raises
    ------
    ConfigError
        The number of elements differs, as far as the sizes are known.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.reshape(ff.argument("x", ("N", 3, 8)), ("N", -1))
    <Tensor Reshape: float32(N, 24)>
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
    """Return `x` broadcast to `shape`: repeated along dimensions of size 1, with new ones in front.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.broadcast_to([1, 2], (2, 2)).compute()
    array([[1, 2],
           [1, 2]])
    """
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
    """Return `x` with its dimensions in the order `axes`.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.permute_dims(ff.argument("x", ("N", 3, 8)), (0, 2, 1))
    <Tensor Transpose: float32(N, 8, 3)>
    """
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
    """Return `x` with its last two dimensions exchanged.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.matrix_transpose([[1, 2], [3, 4]]).compute()
    array([[1, 3],
           [2, 4]])
    """
    tensor = asarray(x)
    if tensor.ndim < 2:
        raise ConfigError(f"matrix_transpose: {tensor!r} has fewer than 2 dimensions")
    return permute_dims(tensor, [*range(tensor.ndim - 2), tensor.ndim - 1, tensor.ndim - 2])


def moveaxis(x: TensorLike, source: int | Sequence[int], destination: int | Sequence[int], /) -> Tensor:
    """Return `x` with some dimensions moved to new positions, the others in their order.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.moveaxis(ff.argument("x", ("N", 3, 8)), 1, -1)
    <Tensor Transpose: float32(N, 8, 3)>
    """
    tensor = asarray(x)
    old = [axis_of(a, tensor.ndim, "moveaxis") for a in ((source,) if isinstance(source, int) else source)]
    places = (destination,) if isinstance(destination, int) else destination
    new = [axis_of(a, tensor.ndim, "moveaxis") for a in places]
    if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
        raise ConfigError(
            f"moveaxis: got {source!r} to {destination!r}, wanted as many positions as dimensions"
        )
    order = [i for i in range(tensor.ndim) if i not in old]
    for to, axis in sorted(zip(new, old, strict=True)):
        order.insert(to, axis)
    return permute_dims(tensor, order)


def expand_dims(x: TensorLike, /, *, axis: int | Sequence[int] = 0) -> Tensor:
    """Return `x` with new dimensions of size 1 at the positions `axis` of the result.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.expand_dims([1, 2], axis=0)
    <Tensor Unsqueeze: int64(1, 2)>
    """
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

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.squeeze(ff.argument("x", ("N", 1, 8)), 1)
    <Tensor Squeeze: float32(N, 8)>
    """
    tensor = asarray(x)
    axes = axes_of(axis, tensor.ndim, "squeeze")
    for i in axes:
        if not same(tensor.shape[i], 1):
            raise ConfigError(f"squeeze: dimension {i} of {tensor!r} is {tensor.shape[i]!r}, not 1")
    shape = tuple(dim for i, dim in enumerate(tensor.shape) if i not in axes)
    return emit("Squeeze", [tensor, ints(axes)], shape) if axes else tensor


def stack(arrays: Sequence[TensorLike], /, *, axis: int = 0) -> Tensor:
    """Return the tensors, all of one shape, joined along a new axis.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.stack([[1, 2], [3, 4]]).compute()
    array([[1, 2],
           [3, 4]])
    """
    return concat([expand_dims(array, axis=axis) for array in arrays], axis=axis)


__all__ = [
    "broadcast_to", "expand_dims", "matrix_transpose", "moveaxis", "permute_dims", "reshape", "squeeze", "stack",
]  # fmt: skip
