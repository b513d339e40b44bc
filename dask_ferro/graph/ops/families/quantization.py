"""Whole numbers for floats: to and from them, and products and convolutions of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.graph.ops.facts import OpFacts, per_input
from dask_ferro.graph.ops.families.convolution import conv_flops
from dask_ferro.graph.ops.families.linear import product_flops
from dask_ferro.graph.ops.labels import Dims, Labels, Rule, TypedNode, align, first_dimension, names

RANGE_OF_ALL = "quantizes them by the range of all"


def _quantize(o: TypedNode) -> Rule | None:
    """One scale for all, or one for each index of `axis`; blocks that share a scale are not split."""
    if o.rank(1) > 1 or o.attribute("block_size", 0):
        return None
    dims = names(o.rank())
    scale: Dims = (dims[o.axis(1)],) if o.size(1) > 1 else (None,) * o.rank(1)
    return Rule((dims, scale, scale), (dims,))


def _product(left: int, right: int, by_row: Sequence[int], by_column: Sequence[int]) -> Labels:
    """A matrix product whose operands are at these positions, and whose scales and zero points are at the others."""

    def labels(o: TypedNode) -> Rule | None:
        a, b, out = o.shape(left), o.shape(right), o.out_shape()
        each = [*by_row, *by_column]
        if len(a) < 2 or len(b) < 2 or any(o.size(i) > 1 and o.rank(i) > 1 for i in each):
            return None
        batch = out[:-2]
        inputs: list[Dims] = [()] * len(o.node.inputs)
        inputs[left] = (*align(a[:-2], batch), "i", None)
        inputs[right] = (*align(b[:-2], batch), None, "j")
        for position in (i for i in each if o.size(i) > 1):
            inputs[position] = ("i" if position in by_row else "j",)
        return Rule(tuple(inputs), ((*names(len(batch)), "i", "j"),))

    return labels


TABLE: Mapping[str, OpFacts] = {
    "QuantizeLinear": OpFacts(4, labels=_quantize),
    "DequantizeLinear": OpFacts(2, labels=_quantize),
    "DynamicQuantizeLinear": OpFacts(per_input(7), combines=RANGE_OF_ALL),
    "QLinearMatMul": OpFacts(product_flops, labels=_product(0, 3, (1, 2, 6, 7), (4, 5))),
    "MatMulInteger": OpFacts(product_flops, labels=_product(0, 1, (2,), (3,))),
    "QLinearConv": OpFacts(conv_flops(3, 8), labels=first_dimension(0)),
    "ConvInteger": OpFacts(conv_flops(1, 8), labels=first_dimension(0)),
}
