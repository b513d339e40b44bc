"""Matrix products of tensors."""

from __future__ import annotations

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.dims import broadcast, same, written
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, emit, promoted


def matmul(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the matrix product over the last dimension of `x1` and the last but one of `x2`; the rest broadcasts.

    Raises
    ------
    ConfigError
        A scalar, or sizes that do not match.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.matmul([[1, 2], [3, 4]], [1, 1]).compute()
    array([3, 7])
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


__all__ = [
    "matmul",
]  # fmt: skip
