"""The facts of an operator by its name: one table, joined from the families, and look-ups for a node."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from dask_ferro.graph.ir.domain import OWN_DOMAIN, STANDARD_DOMAINS
from dask_ferro.graph.ir.ml_types import DOMAIN as ML_DOMAIN
from dask_ferro.graph.ops.facts import OpFacts
from dask_ferro.graph.ops.families import (
    attention,
    convolution,
    creation,
    elementwise,
    indexing,
    layout,
    linear,
    ml,
    normalization,
    quantization,
    reductions,
)
from dask_ferro.graph.ops.labels import Rule, TypedNode

_FAMILIES = (attention, convolution, creation, elementwise, indexing, layout, linear, ml, normalization, quantization,
             reductions)  # fmt: skip
TABLE: Mapping[str, OpFacts] = {name: facts for family in _FAMILIES for name, facts in family.TABLE.items()}
NOTHING_KNOWN = OpFacts()

_DOMAINS = STANDARD_DOMAINS | {ML_DOMAIN, OWN_DOMAIN}
# An operator of another domain with the name of a standard operator costs about as much; whether its operands mean
# the same is not known.
_PRICES = {name: OpFacts(facts.flops, facts.touches, draws=facts.draws) for name, facts in TABLE.items()}
_BY_RANGE = OpFacts(combines=quantization.RANGE_OF_ALL)
_OF_OTHERS = {
    ("com.microsoft", "DynamicQuantizeLSTM"): _BY_RANGE,
    ("com.microsoft", "DynamicQuantizeMatMul"): _BY_RANGE,
    ("com.microsoft", "Unique"): TABLE["Unique"],
}


def facts_of(node: ir.Node) -> OpFacts:
    """Return the facts of a node's operator."""
    if node.domain in _DOMAINS:
        return TABLE.get(node.op_type, NOTHING_KNOWN)
    known = _OF_OTHERS.get((node.domain, node.op_type))
    return known or _PRICES.get(node.op_type, NOTHING_KNOWN)


def rule(o: TypedNode) -> Rule | None:
    """Return the labels of a node that ranks may split; None if there are none, or a shape is not known."""
    labels = facts_of(o.node).labels
    # No collective carries texts.
    if labels is None or not o.is_known or o.has_texts():
        return None
    split = labels(o)
    # An output without labels counts through all elements.
    return None if split is None or len(split.outputs) < len(o.node.outputs) else split
