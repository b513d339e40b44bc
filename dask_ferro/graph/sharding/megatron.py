"""Weights to split by columns and by rows, in pairs that cost one all-reduce.

    x @ [columns] --elementwise, heads, attention--> @ [rows] --> all-reduce

A product whose left side comes from columns that are split takes rows, any other takes columns (Shoeybi and others,
arXiv:1909.08053).  Columns that no rows follow are left whole: their result would have to be gathered.  A vector
that is added to columns is split with them.  Only forward nodes are looked at; placements carry over to backward ones.
Whether ranks divide a dimension, and what a split costs, is not known here.
"""

from __future__ import annotations

import onnx_ir as ir

from dask_ferro.graph.ir.nodes import Types, type_of
from dask_ferro.graph.ir.regions import BACKWARD, region_of


def pairs_of(model: ir.Model, types: Types) -> dict[str, int]:
    """Return the dimension along which each weight of a column-row pair, and each vector with it, is split."""
    columns: dict[str, int] = {}
    split: dict[str, int] = {}
    biases: dict[str, frozenset[str]] = {}
    paired: set[str] = set()
    # For each value the weights whose columns its elements belong to.
    came: dict[ir.Value, frozenset[str]] = {}
    for node in model.graph:
        if region_of(node).phase == BACKWARD:
            continue
        origin = frozenset[str]().union(*(came.get(v, frozenset()) for v in node.inputs if v is not None))
        weight = _factor(node, types)
        if weight is None:
            biases.update(dict.fromkeys(_vectors(node, types) if origin else (), origin))
        elif origin:
            split[weight] = int(_is_turned(node))
            paired |= origin
            origin = frozenset()
        else:
            columns[weight] = int(not _is_turned(node))
            origin = frozenset({weight})
            biases.update(dict.fromkeys(_vectors(node, types), origin))
        came.update(dict.fromkeys(node.outputs, origin))
    split.update({name: dim for name, dim in columns.items() if name in paired})
    return split | {name: 0 for name, origin in biases.items() if origin <= paired}


def _factor(node: ir.Node, types: Types) -> str | None:
    """Return the name of the weight that is a matrix product's second factor."""
    if node.op_type not in ("MatMul", "Gemm") or len(node.inputs) < 2:
        return None
    value = node.inputs[1]
    is_source = value is not None and (value.is_initializer() or value.is_graph_input())
    rank = 0 if value is None else len(type_of(value, types).shape or ())
    return value.name if value is not None and is_source and rank == 2 else None


def _vectors(node: ir.Node, types: Types) -> list[str]:
    """Return the 1-D weights that an Add reads, or a Gemm as its third input."""
    read = node.inputs[2:3] if node.op_type == "Gemm" else node.inputs if node.op_type == "Add" else ()
    sources = [v for v in read if v is not None and (v.is_initializer() or v.is_graph_input())]
    return [v.name for v in sources if v.name and len(type_of(v, types).shape or ()) == 1]


def _is_turned(node: ir.Node) -> bool:
    found = node.attributes.get("transB")
    return found is not None and bool(found.value)
