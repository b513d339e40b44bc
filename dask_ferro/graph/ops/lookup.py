"""The FLOPs and the labels of a node, by the facts of its operator or the standard's function body."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.facts import per_output
from dask_ferro.graph.ops.function_bodies import Body, body_of, joined_labels, total
from dask_ferro.graph.ops.labels import Rule, TypedNode
from dask_ferro.graph.ops.table import facts_of

# Of an operator that nothing is known of.
_PLAIN = per_output(1)


def flops(o: Operands) -> float:
    """Return the FLOPs of a node on its operands; bodies inside it count nothing here."""
    known = facts_of(o.node).flops
    if known is not None:
        return float(known(o))
    # A call by operands alone has no operator set: that of the node's graph decides which body it has.
    by_body = total(TypedNode(o.node, o.types, _opset(o.node)), flops)
    return float(_PLAIN(o)) if by_body is None else by_body


def rule(o: TypedNode) -> Rule | None:
    """Return the labels of a node that ranks may split; None if there are none, or a shape is not known."""
    # No collective carries texts.
    if not o.is_known() or o.has_texts():
        return None
    labels = facts_of(o.node).labels
    found = joined_labels(o, rule) if labels is None else labels(o)
    # An output without labels counts through all elements.
    return None if found is None or len(found.outputs) < len(o.node.outputs) else found


def row_rule(o: TypedNode) -> Rule | None:
    """Return the labels of a node along which the rows of a batch stay apart; None as for `rule`, and for a body."""
    facts = facts_of(o.node)
    labels = facts.row_labels or facts.labels
    return labels(o) if labels is not None and o.is_known() else None


def row_body(o: TypedNode) -> Body | None:
    """Return the body through which the rows of a batch are followed; None if facts of its own say where they go."""
    facts = facts_of(o.node)
    if facts.row_states or facts.row_labels or facts.labels or facts.unlabelled or not o.is_known():
        return None
    return body_of(o)


def _opset(node: ir.Node) -> int:
    """The operator set of a node's graph; the newest if it lies in none."""
    graph = node.graph
    imported = graph.opset_imports.get("") if isinstance(graph, ir.Graph) else None
    return imported or onnx.defs.onnx_opset_version()
