"""The FLOPs and the labels of a node, by the facts of its operator."""

from __future__ import annotations

from dask_ferro.graph.ir.nodes import Operands
from dask_ferro.graph.ops.facts import per_output
from dask_ferro.graph.ops.labels import Rule, TypedNode
from dask_ferro.graph.ops.table import facts_of

# Of an operator that nothing is known of.
_PLAIN = per_output(1)


def flops(o: Operands) -> float:
    """Return the FLOPs of a node on its operands; bodies inside it count nothing here."""
    return float((facts_of(o.node).flops or _PLAIN)(o))


def rule(o: TypedNode) -> Rule | None:
    """Return the labels of a node that ranks may split; None if there are none, or a shape is not known."""
    labels = facts_of(o.node).labels
    # No collective carries texts.
    if labels is None or not o.is_known() or o.has_texts():
        return None
    found = labels(o)
    # An output without labels counts through all elements.
    return None if found is None or len(found.outputs) < len(o.node.outputs) else found
