"""New tensors of a given shape: filled, counted, or with ones on a diagonal; triangles, and grids.

Nothing of the result's size is stored in the model: a node fills it when the graph runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor.dims import broadcast
from dask_ferro.graph.tensor.dtypes import DTypeLike, dtype_of
from dask_ferro.graph.tensor.elementwise import where
from dask_ferro.graph.tensor.manipulation import broadcast_to, count_up, expand_dims, moveaxis, shape_of
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, cast, emit


@example("full(2, 7).compute()", "array([7, 7])")
def full(shape: int | Sequence[int], fill_value: float, *, dtype: DTypeLike = None) -> Tensor:
    """Return a tensor whose elements are `fill_value`; by default of bool, int64 or float32, like the value."""
    value = fill_value if dtype is None else np.asarray(fill_value).astype(dtype_of(dtype).numpy())
    return broadcast_to(value, _sizes(shape, "full"))


def _sizes(shape: int | Sequence[int], where_: str) -> tuple[int, ...]:
    numbers = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in numbers):
        wanted = (
            "sizes of at least 0; a named dimension is copied from a tensor that has it, as in zeros_like"
        )
        raise InputError(f"{where_}: shape: got {shape!r}, wanted {wanted}")
    return tuple(map(int, numbers))


@example("zeros((1, 2)).compute()", "array([[0., 0.]], dtype=float32)")
def zeros(shape: int | Sequence[int], *, dtype: DTypeLike = np.float32) -> Tensor:
    """Return zeros, of float32 by default."""
    return full(shape, 0, dtype=dtype)


@example("ones((1, 2)).compute()", "array([[1., 1.]], dtype=float32)")
def ones(shape: int | Sequence[int], *, dtype: DTypeLike = np.float32) -> Tensor:
    """Return ones, of float32 by default."""
    return full(shape, 1, dtype=dtype)


@example("arange(1, 7, 2).compute()", "array([1, 3, 5])")
def arange(start: float, /, stop: float | None = None, step: float = 1, *, dtype: DTypeLike = None) -> Tensor:
    """Return numbers from `start` up to but not including `stop`, `step` apart; a single number is the end, from 0.

    The step is not 0, and below 0 to count down.  The dtype is int64 if all numbers are integers, else float32.
    """
    first, last = (0, start) if stop is None else (start, stop)
    if step == 0:
        raise InputError("arange: step: got 0, wanted another number")
    whole = all(isinstance(n, (int, np.integer)) for n in (first, last, step))
    to = dtype_of(dtype if dtype is not None else np.int64 if whole else np.float32)
    # The number of elements is part of the shape, so it is computed here, in double precision.
    count = max(0, int(-((first - last) // step)) if whole else math.ceil((last - first) / step))
    # Integers are counted in int64 whatever the dtype: a product in int8 would overflow on the way.
    places = count_up(count, count)
    if whole:
        return cast(places * int(step) + int(first), to)
    return (places.astype(np.float64) * float(step) + float(first)).astype(to)


@example("linspace(0, 1, 5).compute()", "array([0.  , 0.25, 0.5 , 0.75, 1.  ], dtype=float32)")
def linspace(
    start: float, stop: float, /, num: int, *, dtype: DTypeLike = np.float32, endpoint: bool = True
) -> Tensor:
    """Return `num` numbers at equal distances from `start` to `stop`, the end included or not."""
    (count,) = _sizes(num, "linspace")
    gaps = count - 1 if endpoint else count
    places = count_up(count, count).astype(np.float64)
    values = places * ((stop - start) / gaps if gaps > 0 else 0.0) + float(start)
    if endpoint and count > 1:
        # The last one is exactly the end, whatever the steps round to.
        values = where(places == float(gaps), float(stop), values)
    return values.astype(dtype)


@example("eye(2).compute()", "array([[1., 0.],\n       [0., 1.]], dtype=float32)")
def eye(n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: DTypeLike = np.float32) -> Tensor:
    """Return a matrix with ones on the diagonal `k` (above the main one if positive), and zeros elsewhere."""
    rows, columns = _sizes((n_rows, n_rows if n_cols is None else n_cols), "eye")
    return (expand_dims(count_up(rows, rows), axis=1) + int(k) == count_up(columns, columns)).astype(dtype)


@example("tril([[1, 2], [3, 4]]).compute()", "array([[1, 0],\n       [3, 4]])")
def tril(x: TensorLike, /, *, k: int = 0) -> Tensor:
    """Return matrices with zeros above the diagonal `k`, in the last two dimensions."""
    return _triangle(asarray(x), k, "tril")


@example("triu([[1, 2], [3, 4]]).compute()", "array([[1, 2],\n       [0, 4]])")
def triu(x: TensorLike, /, *, k: int = 0) -> Tensor:
    """Return matrices with zeros below the diagonal `k`, in the last two dimensions."""
    return _triangle(asarray(x), k, "triu")


def _triangle(x: Tensor, k: int, where_: str) -> Tensor:
    if x.ndim < 2:
        raise InputError(f"{where_}: {x!r} has fewer than 2 dimensions")
    at = asarray(operator.index(k), np.int64)
    return emit("Trilu", [x, at], x.shape, upper=int(where_ == "triu"))


@example("broadcast_shapes((3, 1), (4,))", "(3, 4)")
def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int | str | None, ...]:
    """Return the shape to which shapes broadcast; names of dimensions may be among their sizes."""
    return broadcast([tuple(shape) for shape in shapes], "broadcast_shapes")


@example("broadcast_arrays([[1], [2]], [1, 2, 3])[0].shape", "(2, 3)")
def broadcast_arrays(*arrays: TensorLike) -> list[Tensor]:
    """Return the tensors in the shape to which they broadcast."""
    tensors = [asarray(array) for array in arrays]
    results = []
    for x in tensors:
        for other in tensors:
            shape = broadcast([x.shape, other.shape], "broadcast_arrays")
            # ONNX's Expand broadcasts both ways, so a size that is not known yet may be 1 on either side.
            if shape != x.shape or None in shape:
                x = emit("Expand", [x, shape_of(other)], shape)
        results.append(x)
    return results


@example("meshgrid([1, 2, 3], [10, 20])[1].compute()", "array([[10, 10, 10],\n       [20, 20, 20]])")
def meshgrid(*arrays: TensorLike, indexing: str = "xy") -> list[Tensor]:
    """Return the coordinates of all points of a grid, one tensor for each of the vectors.

    If `indexing` is "ij", the dimensions have the order of the vectors; if it is "xy", the first two are exchanged.
    """
    if indexing not in ("xy", "ij"):
        raise InputError(f"meshgrid: indexing: got {indexing!r}, wanted 'xy' or 'ij'")
    tensors = [asarray(array) for array in arrays]
    for tensor in tensors:
        if tensor.ndim != 1:
            raise InputError(f"meshgrid: takes vectors, got {tensor!r}; reshape it to (-1,)")
    rank = len(tensors)
    others = ([j for j in range(rank) if j != i] for i in range(rank))
    grids = broadcast_arrays(*(expand_dims(x, axis=axes) for x, axes in zip(tensors, others, strict=True)))
    return [moveaxis(grid, 0, 1) for grid in grids] if indexing == "xy" and rank > 1 else grids


__all__ = [
    "arange", "broadcast_arrays", "broadcast_shapes", "eye", "full", "linspace", "meshgrid", "ones", "tril", "triu",
    "zeros",
]  # fmt: skip
