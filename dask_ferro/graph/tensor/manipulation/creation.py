"""Tensors made like another one, or of another dtype."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dask_ferro.graph.tensor.manipulation.joining import ints
from dask_ferro.graph.tensor.manipulation.shapes import broadcast_like, size_of, squeeze
from dask_ferro.graph.tensor.tensor import DTypeLike, Tensor, TensorLike, asarray, emit

_INT64 = ir.DataType.INT64


def full_like(x: TensorLike, /, value: float, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return a tensor of the shape (and dtype) of `x` whose elements are `value`.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.full_like([1, 2], 7).compute()
    array([7, 7])
    """
    tensor = asarray(x)
    filled = np.asarray(value, tensor.dtype if dtype is None else dtype)
    return broadcast_like(asarray(filled), tensor)


def zeros_like(x: TensorLike, /, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return zeros in the shape (and dtype) of `x`.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.zeros_like([1.5, 2.5]).compute()
    array([0., 0.], dtype=float32)
    """
    return full_like(x, 0, dtype)


def ones_like(x: TensorLike, /, dtype: npt.DTypeLike | None = None) -> Tensor:
    """Return ones in the shape (and dtype) of `x`.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.ones_like([1.5, 2.5]).compute()
    array([1., 1.], dtype=float32)
    """
    return full_like(x, 1, dtype)


def astype(x: TensorLike, dtype: DTypeLike, /) -> Tensor:
    """Return `x` in another dtype.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.astype([1.7, 2.2], "int64").compute()
    array([1, 2], dtype=int64)
    """
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
    "astype", "full_like", "ones_like", "zeros_like",
]  # fmt: skip
