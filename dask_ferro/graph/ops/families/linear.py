"""Matrix products, einsum, determinants and Fourier transforms."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.facts import OpFacts, per_input
from dask_ferro.graph.ops.labels import Dims, Rule, TypedNode, align, first_dimension, mask_dims, names

# FLOPs.


def product_flops(o: Operands) -> float:
    """Return the FLOPs of a matrix product: a multiply-add for each element and inner index."""
    return 2.0 * o.out() * (o.shape(0)[-1:] or (1,))[0]


def _gemm_flops(o: Operands) -> float:
    a = o.shape(0) or (1,)
    inner = a[0 if o.attribute("transA", 0) else -1]
    return o.out() * (2.0 * inner + o.has(2))


def _einsum_flops(o: Operands) -> float:
    """Every combination of index values takes a multiplication for each further factor, and an addition."""
    inputs, arrow, output = str(o.attribute("equation", "")).replace(" ", "").partition("->")
    terms = inputs.split(",")
    sizes: dict[str, int] = {}
    for position, term in enumerate(terms):
        for letter, size in zip(_indices(term, len(o.shape(position))), o.shape(position), strict=False):
            sizes[letter] = max(size, sizes.get(letter, 1))
    if arrow:
        summed = any(letter not in output for letter in sizes if letter.isalpha())
    else:  # without an arrow, letters that occur twice are summed over
        summed = any(inputs.count(letter) > 1 for letter in sizes if letter.isalpha())
    return float(prod(sizes.values()) * (len(terms) - 1 + summed))


def _indices(term: str, rank: int) -> list[str]:
    """One name for each dimension; dimensions under an ellipsis are named from the right, because they broadcast."""
    head, dots, tail = term.partition("...")
    hidden = rank - len(head) - len(tail) if dots else 0
    return [*head, *(f"...{i}" for i in range(hidden, 0, -1)), *tail]


# Labels.


def _matmul(o: TypedNode) -> Rule:
    a, b, out = o.shape(0), o.shape(1), o.out_shape()
    rows: Dims = ("i",) if len(a) > 1 else ()
    columns: Dims = ("j",) if len(b) > 1 else ()
    batch = out[: len(out) - len(rows) - len(columns)]
    left = (*align(a[:-2], batch), *rows, "k")
    right = (*align(b[:-2], batch), "k", *columns)
    return Rule((left, right), ((*names(len(batch)), *rows, *columns),), "sum", ((0,), (1,)))


def _gemm(o: TypedNode) -> Rule:
    a: Dims = ("k", "i") if o.attribute("transA", 0) else ("i", "k")
    b: Dims = ("j", "k") if o.attribute("transB", 0) else ("k", "j")
    c = tuple({"0": "i", "1": "j", None: None}[label] for label in align(o.shape(2), o.out_shape()))
    if not o.is_float() or (o.opset < 11 and o.has(2)):
        # alpha and beta truncate whole numbers; and up to opset 10 no rank could leave C to another
        return Rule((a, b, c), (("i", "j"),))
    return Rule((a, b, c), (("i", "j"),), "sum", ((0,), (1,)), once=(2,))


def _einsum(o: TypedNode) -> Rule | None:
    """Each letter is a label; equations with an ellipsis or a diagonal are not split."""
    left, arrow, right = str(o.attribute("equation", "")).replace(" ", "").partition("->")
    terms = left.split(",")
    if "." in left or any(len(set(term)) < len(term) for term in terms):
        return None
    if not arrow:
        right = "".join(sorted(x for x in set(left) - {","} if left.count(x) == 1))
    linear = tuple((i,) for i in range(len(terms)))
    return Rule(tuple(tuple(term) for term in terms), (tuple(right),), "sum", linear)


def _matrices(o: TypedNode) -> Rule:
    """All inputs except the matrix."""
    dims = mask_dims(names(o.rank()), range(o.rank() - 2, o.rank()))
    return Rule((dims,), (dims[:-2],))


TABLE: Mapping[str, OpFacts] = {
    "MatMul": OpFacts(product_flops, labels=_matmul),
    "Gemm": OpFacts(_gemm_flops, labels=_gemm),
    "Einsum": OpFacts(_einsum_flops, labels=_einsum),
    "Det": OpFacts(per_input(10), labels=_matrices),
    # 5 log2 n for each number of a transform of n (Cooley and Tukey 1965).
    "DFT": OpFacts(50),
    "STFT": OpFacts(50, labels=first_dimension(0)),
}
