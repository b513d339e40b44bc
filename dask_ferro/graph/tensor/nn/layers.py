"""Linear layers, embeddings, and values without a gradient."""

from __future__ import annotations

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import INDEX
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, stopped


def linear(x: TensorLike, weight: TensorLike, bias: TensorLike | None = None, /) -> Tensor:
    """Return x @ weight + bias; the weight is (features in, features out).

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.nn.linear([[1.0, 2.0]], [[1.0, 0.0], [0.0, 3.0]], [0.5, 0.5]).compute()
    array([[1.5, 6.5]], dtype=float32)
    """
    product = xp.matmul(x, weight)
    return product if bias is None else product + bias


def embedding(input: TensorLike, weight: TensorLike, /) -> Tensor:
    """Return the rows of a table at indices, in PyTorch's order of arguments.

    Parameters
    ----------
    input : Tensor
        Indices, int32 or int64, of any shape.
    weight : Tensor
        (entries, features).

    Returns
    -------
    Tensor
        The shape of the indices and (features), in the dtype of the weight.

    Raises
    ------
    ConfigError
        Indices that are no integers, as where both arguments are exchanged; or a weight that is no matrix.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.nn.embedding([1, 0, 1], [[1.0, 2.0], [3.0, 4.0]]).compute()
    array([[3., 4.],
           [1., 2.],
           [3., 4.]], dtype=float32)
    """
    indices, table = asarray(input), asarray(weight)
    if indices.type.dtype not in INDEX or table.ndim != 2:
        got = f"got {indices!r} and {table!r}, wanted int32 or int64 indices and then a weight of (entries, features)"
        raise ConfigError(f"embedding: {got}; the order is PyTorch's: embedding(indices, weight)")
    return xp.take(table, indices, axis=0)


def stop_gradient(x: TensorLike, /) -> Tensor:
    """Return x as a constant for gradients: none passes through it.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> w = ff.asarray([1.0, 2.0], name="w")
    >>> ff.grad((w * ff.nn.stop_gradient(w)).sum(), w).compute()
    array([1., 2.], dtype=float32)
    """
    return stopped(asarray(x))


__all__ = ["embedding", "linear", "stop_gradient"]
