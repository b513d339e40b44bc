"""What a node costs in FLOPs, and its labels, by the facts of its operator."""

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
    return labels(o) if labels is not None and o.is_known() else None


def row_rule(o: TypedNode) -> Rule | None:
    """Return the labels of a node along which the rows of a batch stay apart; None as for `rule`."""
    labels = facts_of(o.node).row_labels
    if labels is None:
        return rule(o)
    return labels(o) if o.is_known() else None
