"""Products of matrices: MatMul, Gemm, Einsum.

CuPy computes a product of two matrices by one call of cuBLAS, which obeys `CUPY_TF32`.  A product with more dimensions
is a batched call, which ignores `CUPY_TF32` and computes (N, S, K) by (K, M) as N small products.  So products are of
two matrices wherever that is possible.  On numpy, matmul is used unchanged: both forms call BLAS, and in a taller
product the last bits of a row depend on the number of rows.
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Kernel, row
from dask_ferro.graph.ir.dtypes import FLOAT, NUMERIC


def product(xp: Namespace, a: Array, b: Array) -> Array:
    """Return matmul(a, b)."""
    # The bits of a row must not depend on the number of rows.
    if isinstance(a, np.ndarray):
        return xp.matmul(a, b)
    if a.ndim > 2 and b.ndim == 2:
        rows = xp.reshape(a, (prod(a.shape[:-1]), a.shape[-1]))
        return xp.reshape(xp.matmul(rows, b), (*a.shape[:-1], b.shape[1]))
    if b.ndim > 2 and a.ndim >= 2 and prod(a.shape[:-2]) == prod(b.shape[:-2]) == 1:
        y = xp.matmul(xp.reshape(a, a.shape[-2:]), xp.reshape(b, b.shape[-2:]))
        return xp.reshape(y, (1,) * (max(a.ndim, b.ndim) - 2) + y.shape)
    return xp.matmul(a, b)


def _gemm(
    xp: Namespace, a: Array, b: Array, c: Array = None, *, alpha: float, beta: float, transA: int, transB: int
) -> Array:
    # Transposes are views: BLAS takes a transposed factor without a copy.
    y = xp.matmul(a.T if transA else a, b.T if transB else b)
    if alpha != 1:
        y *= alpha
    if c is not None and beta != 0:
        y += c if beta == 1 else beta * c
    return y


def _einsum(xp: Namespace, *arrays: Array, equation: str) -> Array:
    if hasattr(xp, "einsum"):
        return xp.einsum(equation.replace(" ", ""), *arrays, optimize=True)
    # The standard has none.
    found = np.einsum(equation.replace(" ", ""), *map(np.from_dlpack, arrays), optimize=True)
    return xp.from_dlpack(np.array(found))


def _keeps_ellipses(node: ir.Node, opset: int) -> bool:
    """Return whether the result has all axes under an ellipsis; NumPy sums over none of them."""
    terms, arrow, result = node.attributes["equation"].as_string().partition("->")
    return not arrow or "..." not in terms or "..." in result


TABLE: dict[str, Kernel] = {
    "MatMul": row(product, NUMERIC),
    "Gemm": row(_gemm, FLOAT, alpha=1.0, beta=1.0, transA=0, transB=0),
    "Einsum": row(_einsum, NUMERIC, when=_keeps_ellipses, equation=""),
}
