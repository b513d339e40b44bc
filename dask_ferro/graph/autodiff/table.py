"""The table of gradients: the rules of each op, one an input; the flat ops; the composite ops to expand.

An op is in one of three places:
- `RULES`: op -> rules, one an input, the last for all that follow; None where an input has no gradient (axes);
- `EXPANSIONS` (module `expansions`): op -> the same in simpler ops, which are differentiated;
- `FLAT`: ops whose gradient is 0 almost everywhere, or whose result is no floating point number: they stop it.
An op in none of them has no gradient here, and asking for one is an `UnsupportedOp` that names op and node.
"""

from __future__ import annotations

from collections.abc import Mapping

from dask_ferro.errors import UnsupportedOp
from dask_ferro.graph.autodiff.rule import GradientRequest, Row, Rule
from dask_ferro.graph.autodiff.rules import elementwise, indexing, layout, linear, reductions, resampling
from dask_ferro.graph.autodiff.rules.expansions import EXPANSIONS
from dask_ferro.graph.tensor.tensor import Node

RULES: Mapping[str, Row] = {
    **elementwise.TABLE,
    **reductions.TABLE,
    **layout.TABLE,
    **indexing.TABLE,
    **linear.TABLE,
    **resampling.TABLE,
}

FLAT = frozenset({"Ceil", "EyeLike", "Floor", "Hardmax", "Round", "Sign"})

__all__ = ["EXPANSIONS", "FLAT", "RULES", "GradientRequest", "is_flat", "rule_for"]


def is_flat(node: Node) -> bool:
    """Return whether a node has zero gradient everywhere."""
    return node.is_stop or (not node.domain and node.op_type in FLAT)


def rule_for(node: Node, index: int) -> Rule:
    """Return the rule for one input of a node.

    Raises
    ------
    UnsupportedOp
        The op has no gradient here, or not with respect to this input.
    """
    row = RULES.get(node.op_type) if not node.domain else None
    rule = row[min(index, len(row) - 1)] if row else None
    if rule is not None:
        return rule
    where = f"node {node.name!r} ({node.op_type})" if node.name else f"op {node.op_type}"
    domain = f"{node.domain}::" if node.domain else ""
    problem = f"{where}: {domain}{node.op_type} has none"
    if row:
        problem = f"{where}: it has none with respect to its input {index}"
    raise UnsupportedOp("no gradient", [f"{problem}; write it with other ops, or keep parameters out of it"])
