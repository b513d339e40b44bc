"""Matrix products in the form that a GPU library computes fast: of two matrices wherever that is possible.

CuPy computes a product of two matrices by one call of cuBLAS, which obeys `CUPY_TF32`.  A product with more dimensions
is a batched call, which ignores `CUPY_TF32` and computes (N, S, K) by (K, M) as N small products.  On numpy, matmul is
used unchanged: both forms call BLAS, and in a taller product the last bits of a row depend on the number of rows.
"""

from __future__ import annotations

from math import prod

import numpy as np

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn


def product(xp: Namespace) -> Fn:
    """Return the function (a, b) -> matmul(a, b) of a namespace."""
    matmul: Fn = xp.matmul
    # The bits of a row must not depend on the number of rows.
    if isinstance(xp.empty(0), np.ndarray):
        return matmul

    def fn(a: Array, b: Array) -> Array:
        if a.ndim > 2 and b.ndim == 2:
            rows = xp.reshape(a, (prod(a.shape[:-1]), a.shape[-1]))
            return xp.reshape(matmul(rows, b), (*a.shape[:-1], b.shape[1]))
        if b.ndim > 2 and a.ndim >= 2 and prod(a.shape[:-2]) == prod(b.shape[:-2]) == 1:
            y = matmul(xp.reshape(a, a.shape[-2:]), xp.reshape(b, b.shape[-2:]))
            return xp.reshape(y, (1,) * (max(a.ndim, b.ndim) - 2) + y.shape)
        return matmul(a, b)

    return fn
