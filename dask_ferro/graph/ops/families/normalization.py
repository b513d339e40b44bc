"""Normalization with statistics of layers, batches and channels, and softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.facts import EXP, SOFTMAX, OpFacts
from dask_ferro.graph.ops.labels import Dims, Rule, TypedNode, all_but, mask_dims, names


def _lrn(o: Operands) -> float:
    return float(o.out() * (2.0 * o.attribute("size", 1) + EXP + 3))


# Labels.


def _softmax(o: TypedNode) -> Sequence[int]:
    """`axis`; up to opset 12 it and all behind it are one."""
    return (o.axis(-1),) if o.opset >= 13 else range(o.axis(1), o.rank())


def _layer(o: TypedNode) -> Sequence[int]:
    """LayerNormalization and RMSNormalization: the dimensions from `axis` on, in the statistics too."""
    return range(o.axis(-1), o.rank())


def _batch_norm(o: TypedNode) -> Rule:
    """All dimensions if the statistics are inputs, channels if they are the batch's statistics."""
    dims, channel = names(o.rank()), ("1",)
    if _trains(o):
        dims = mask_dims(dims, [i for i in range(o.rank()) if i != 1])
    return Rule((dims, *(channel,) * 4), (dims, *(channel,) * (len(o.node.outputs) - 1)))


def _trains(o: TypedNode) -> bool:
    """Whether a BatchNormalization uses the statistics of the batch: up to opset 13, if it returns them."""
    if o.opset >= 14:
        return bool(o.attribute("training_mode", 0))
    return sum(bool(v.name) for v in o.node.outputs) > 1


def _instance_norm(o: TypedNode) -> Rule:
    dims: Dims = mask_dims(names(o.rank()), range(2, o.rank()))
    return Rule((dims, ("1",), ("1",)), (dims,))


# LayerNormalization's body flattens, so of several dimensions before the axis it would let one be split at most.
TABLE: Mapping[str, OpFacts] = {
    "Softmax": OpFacts(SOFTMAX, labels=all_but(_softmax)),
    "LogSoftmax": OpFacts(SOFTMAX + 1, labels=all_but(_softmax)),
    "Hardmax": OpFacts(2, labels=all_but(_softmax)),
    "LpNormalization": OpFacts(3, labels=all_but(lambda o: (o.axis(-1),))),
    "LayerNormalization": OpFacts(8, labels=all_but(_layer)),
    "RMSNormalization": OpFacts(5, labels=all_but(_layer)),
    "BatchNormalization": OpFacts(2, labels=_batch_norm),
    "InstanceNormalization": OpFacts(8, labels=_instance_norm),
    # Scale and bias belong to channels since opset 21, and to groups before: only the batch is split alike in both.
    "GroupNormalization": OpFacts(8, labels=all_but(lambda o: range(1, o.rank()))),
    "MeanVarianceNormalization": OpFacts(7, labels=all_but(lambda o: o.attribute("axes", (0, 2, 3)))),
    "LRN": OpFacts(_lrn, labels=all_but(lambda o: (1,))),
}
