"""Linear layers, embeddings, and values without a gradient."""

from __future__ import annotations

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import INDEX
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import alike, same
from dask_ferro.graph.tensor.manipulation import scalar_size
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import Node, Tensor, TensorLike, asarray, constant_of, promoted


@example("nn.linear([[1.0, 2.0]], [[3.0, 4.0]], [0.5]).compute()", "array([[11.5]], dtype=float32)")
def linear(x: TensorLike, weight: TensorLike, bias: TensorLike | None = None, /) -> Tensor:
    """Return x @ weight.T + bias; the weight is (features out, features in), as in PyTorch.

    Parameters
    ----------
    x : Tensor
        (..., features in).
    weight : Tensor
        (features out, features in), or (features in) for one feature out, which the result has no dimension for.
    bias : Tensor, optional
        (features out).

    Raises
    ------
    ConfigError
        Shapes that do not match, as where the weight is transposed and not square; or dtypes that do not mix.
    """
    data, w = promoted("linear", asarray(x), asarray(weight))
    if not data.ndim or w.ndim not in (1, 2) or not same(data.shape[-1], w.shape[-1]):
        wanted = f"(features out, features in) for {data!r}, as in PyTorch"
        raise ConfigError(f"linear: weight: got {w!r}, wanted {wanted}; weight.T if it is (in, out)")
    product = xp.matmul(data, w.mT if w.ndim == 2 else w)
    if bias is None:
        return product
    result = product + bias
    if result.ndim != product.ndim or not alike(result.shape, product.shape):
        raise ConfigError(f"linear: bias: got {asarray(bias)!r}, wanted (features out) of {w!r}; reshape it")
    return result


@example("nn.embedding([1, 0], [[1.0], [2.0]]).compute()", "array([[2.],\n       [1.]], dtype=float32)")
def embedding(input: TensorLike, weight: TensorLike, /) -> Tensor:
    """Return the rows of a table at indices, in PyTorch's order of arguments.

    Parameters
    ----------
    input : Tensor
        Indices from 0 on, int32 or int64, of any shape. The engine refuses others, as PyTorch does; its message names
        one below 0 less the number of entries.
    weight : Tensor
        (entries, features).

    Returns
    -------
    Tensor
        The shape of the indices and (features), in the dtype of the weight.

    Raises
    ------
    ConfigError
        Indices that are no integers, as where both arguments are exchanged; constant indices that number no row;
        or a weight that is no matrix.
    """
    indices, table = asarray(input), asarray(weight)
    if indices.type.dtype not in INDEX or table.ndim != 2:
        got = f"got {indices!r} and {table!r}, wanted int32 or int64 indices and then a weight of (entries, features)"
        raise ConfigError(f"embedding: {got}; the order is PyTorch's: embedding(indices, weight)")
    known, rows = constant_of(indices), table.shape[0]
    if known is None:
        # Below 0 an index would count from the end; so far below, the engine refuses it.
        below = indices - scalar_size(table, 0, indices.type.dtype)
        return xp.take(table, xp.where(indices < 0, below, indices), axis=0)
    wrong = known[(known < 0) | (known >= rows)] if isinstance(rows, int) else known[known < 0]
    if wrong.size:
        raise ConfigError(f"embedding: indices: got {wrong[0]}, wanted rows of {table!r}, from 0 on")
    return xp.take(table, indices, axis=0)


@example("nn.stop_gradient([1.0, 2.0]).compute()", "array([1., 2.], dtype=float32)")
def stop_gradient(x: TensorLike, /) -> Tensor:
    """Return x as a constant for gradients: none passes through it."""
    tensor = asarray(x)
    return Tensor(Node("Identity", (tensor,), (tensor.type,), {}, is_stop=True), 0, tensor.type)
