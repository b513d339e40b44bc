"""Reductions, sums along an axis, sorting, and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.facts import EXP, SOFTMAX, OpFacts, per_input, rows_of
from dask_ferro.graph.ops.labels import Labels, Rule, TypedNode, all_but, drop_axes, mask_dims, names
from dask_ferro.graph.ops.states import Counts, Depends, Finding, State

# FLOPs.


def sort_flops(o: Operands) -> float:
    """Return the comparisons of a sort along the axis (of all elements without one)."""
    shape = o.shape(0)
    axis = o.attribute("axis", None if o.node.op_type == "Unique" else -1)
    length = o.size(0) if axis is None or not -len(shape) <= axis < len(shape) else shape[axis]
    return o.size(0) * log2(max(2, length))


# Labels.


def _reduction(reduction: str | None = None, *linear: tuple[int, ...], commutes: str = "sum mean") -> Labels:
    """All dimensions; a reduced one is split if the results of its parts can be reduced again."""

    def labels(o: TypedNode) -> Rule | None:
        listed = o.constant(1) if o.has(1) else tuple(o.attribute("axes", ()))
        if listed is None or (not listed and o.attribute("noop_with_empty_axes", 0)):
            return None
        dims = names(o.rank())
        axes = [axis % o.rank() for axis in listed] or range(o.rank())
        result = mask_dims(dims, axes) if o.attribute("keepdims", 1) else drop_axes(dims, axes)
        if reduction == "mean" and not o.is_float():
            return Rule((dims,), (result,))
        return Rule((dims,), (result,), reduction, linear, tuple(commutes.split()))

    return labels


def _arg(o: TypedNode) -> Rule:
    dims, axes = names(o.rank()), (o.axis(0),)
    result = mask_dims(dims, axes) if o.attribute("keepdims", 1) else drop_axes(dims, axes)
    return Rule((mask_dims(dims, axes),), (result,))


# Rows of a batch.


def _runtime_axis(o: TypedNode, states: Sequence[State], rows: int) -> Finding | None:
    return None if o.constant(1) else Finding(True, "runs along an axis that is only known when it runs")


def _reduce_sizes(o: TypedNode, elements: Sequence[Depends], rows: int) -> State:
    first = elements[0]
    return Counts(None if first is None else (any(first),))


def _reduce(price: float, labels: Labels) -> OpFacts:
    return OpFacts(per_input(price), labels=labels, sizes=_reduce_sizes)


TABLE: Mapping[str, OpFacts] = {
    "ReduceSum": _reduce(1, _reduction("sum", (0,))),
    "ReduceMean": _reduce(1, _reduction("mean", (0,))),
    "ReduceMax": _reduce(1, _reduction("max", (0,), commutes="max")),
    "ReduceMin": _reduce(1, _reduction("min", (0,), commutes="min")),
    **rows_of("ReduceProd ReduceLogSum", _reduce(1, _reduction())),
    **rows_of("ReduceL1 ReduceSumSquare", _reduce(2, _reduction("sum"))),
    "ReduceL2": _reduce(2, _reduction()),
    "ReduceLogSumExp": _reduce(EXP + 3, _reduction()),
    **rows_of("ArgMax ArgMin", OpFacts(per_input(1), labels=_arg)),
    "CumSum": OpFacts(per_input(1), labels=all_but(lambda o: o.constant(1), (0,)), row_states=_runtime_axis),
    "CumProd": OpFacts(per_input(1), labels=all_but(lambda o: o.constant(1)), row_states=_runtime_axis),
    "TopK": OpFacts(sort_flops, labels=all_but(lambda o: (o.axis(-1),))),
    "SoftmaxCrossEntropyLoss": OpFacts(per_input(SOFTMAX + EXP)),
    "NegativeLogLikelihoodLoss": OpFacts(per_input(2)),
    "TfIdfVectorizer": OpFacts(per_input(1)),
}
