"""Products of matrices: MatMul, Gemm, Einsum.

CuPy computes a product of two matrices by one call of cuBLAS, which obeys `CUPY_TF32`.  A product with more dimensions
is a batched call, which ignores `CUPY_TF32` and computes (N, S, K) by (K, M) as N small products.  So products are of
two matrices wherever that is possible.  On numpy, matmul is used unchanged: both forms call BLAS, and in a taller
product the last bits of a row depend on the number of rows.

The array API has no einsum, and NumPy's does not use BLAS for batches, so `Einsum` is computed pair by pair: each
pair of operands is laid out as (batch, rows, summed) and (batch, summed, columns) and multiplied by matmul.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Kernel, Op
from dask_ferro.graph.ir.dtypes import FLOAT, NUMERIC


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


def _gemm(xp: Namespace, op: Op) -> Fn:
    alpha, beta = op.get("alpha", 1.0), op.get("beta", 1.0)
    left, right = op.get("transA", 0), op.get("transB", 0)

    def fn(a: Array, b: Array, c: Array = None) -> Array:
        # Transposes are views: BLAS takes a transposed factor without a copy.
        y = xp.matmul(a.T if left else a, b.T if right else b)
        if alpha != 1:
            y *= alpha
        if c is not None and beta != 0:
            y += c if beta == 1 else beta * c
        return y

    return fn


class _Term(NamedTuple):
    """An operand of an Einsum, and the label of each of its axes."""

    array: Array
    labels: str


def _einsum(xp: Namespace, op: Op) -> Fn:
    sides = op.attributes["equation"].replace(" ", "").split("->")
    terms = sides[0].split(",")

    def fn(*arrays: Array) -> Array:
        stretch = max(x.ndim - len(t.replace("...", "")) for x, t in zip(arrays, terms, strict=True))
        operands = [_Term(x, _spell(t, x.ndim, stretch)) for x, t in zip(arrays, terms, strict=True)]
        if len(sides) == 2:
            wanted = sides[1].replace("...", _DOTS[:stretch])
        else:
            # Without an arrow: the labels that occur once, in alphabetical order.
            wanted = _DOTS[:stretch] + "".join(
                sorted(x for x in set(sides[0]) - {",", "."} if sides[0].count(x) == 1)
            )
        # From left to right: a better order would need the sizes, which differ from call to call.
        while len(operands) > 1:
            a, b, *rest = operands
            needed = set(wanted).union(*(t.labels for t in rest))
            operands = [_contract(xp, a, b, needed), *rest]
        last = _sum_out(xp, operands[0], set(wanted))
        return xp.permute_dims(last.array, tuple(last.labels.index(x) for x in wanted))

    return fn


# Labels of the axes under an ellipsis, aligned to the right; letters are the equation's own.
_DOTS = "0123456789"


def _spell(term: str, rank: int, stretch: int) -> str:
    """Return the term with its ellipsis written out."""
    own = rank - len(term.replace("...", ""))
    return term.replace("...", _DOTS[stretch - own : stretch])


def _sum_out(xp: Namespace, term: _Term, needed: set[str]) -> _Term:
    """Return the term summed over the labels that are not needed."""
    axes = tuple(i for i, x in enumerate(term.labels) if x not in needed)
    if not axes:
        return term
    kept = "".join(x for x in term.labels if x in needed)
    return _Term(xp.sum(term.array, axis=axes, dtype=term.array.dtype), kept)


def _contract(xp: Namespace, a: _Term, b: _Term, needed: set[str]) -> _Term:
    # Labels of one operand alone are summed first, which makes the product smaller.
    a = _sum_out(xp, a, needed | set(b.labels))
    b = _sum_out(xp, b, needed | set(a.labels))
    shared = [x for x in a.labels if x in b.labels]
    batch = [x for x in shared if x in needed]
    summed = [x for x in shared if x not in needed]
    rows = [x for x in a.labels if x not in b.labels]
    columns = [x for x in b.labels if x not in a.labels]
    labels = "".join(batch + rows + columns)
    left = _laid_out(xp, a, batch, rows, summed)
    right = _laid_out(xp, b, batch, summed, columns)
    made = product(xp)(left, right) if summed else left * right
    head = made.shape[: len(batch)]
    sizes = {
        **dict(zip(a.labels, a.array.shape, strict=True)),
        **dict(zip(b.labels, b.array.shape, strict=True)),
    }
    return _Term(xp.reshape(made, (*head, *(sizes[x] for x in rows + columns))), labels)


def _laid_out(
    xp: Namespace, term: _Term, batch: Sequence[str], first: Sequence[str], second: Sequence[str]
) -> Array:
    """Return the operand as a stack of matrices (batch..., first, second)."""
    x = xp.permute_dims(term.array, tuple(term.labels.index(label) for label in (*batch, *first, *second)))
    middle = len(batch) + len(first)
    return xp.reshape(x, (*x.shape[: len(batch)], prod(x.shape[len(batch) : middle]), prod(x.shape[middle:])))


def _no_diagonals(node: ir.Node, opset: int) -> bool:
    """Return whether no term repeats a label ("ii->i" takes a diagonal, which is left to other engines)."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    terms = equation.split("->")[0].split(",")
    plain = all(re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", t) for t in terms)
    letters = [t.replace("...", "") for t in terms]
    summed_dots = "->" in equation and "..." in equation and "..." not in equation.split("->")[1]
    return plain and not summed_dots and all(len(set(t)) == len(t) for t in letters)


TABLE: dict[str, Kernel] = {
    "MatMul": Kernel(lambda xp, op: product(xp), (NUMERIC,)),
    "Gemm": Kernel(_gemm, (FLOAT,)),
    "Einsum": Kernel(_einsum, (NUMERIC,), when=_no_diagonals),
}
