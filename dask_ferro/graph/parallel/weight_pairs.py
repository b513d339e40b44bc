"""Find column-row pairs of weights: the split of tensor parallelism that costs one all-reduce.

    x @ [columns] --elementwise, heads, attention--> @ [rows] --> all-reduce

The weight of a product is split into rows if its left operand depends on split columns, and otherwise into columns
(Shoeybi and others, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from dask_ferro.graph.ir.nodes import Types, type_of
from dask_ferro.graph.ir.regions import BACKWARD, region_of


def weight_pairs(model: ir.Model, types: Types) -> dict[str, int]:
    """Return the dimension along which each weight of a column-row pair, and each vector with it, is split.

    Only forward nodes are considered; backward nodes follow by propagation.
    """
    columns: dict[str, int] = {}
    split: dict[str, int] = {}
    biases: dict[str, frozenset[str]] = {}
    paired: set[str] = set()
    # For each value the column-parallel weights that it depends on.
    origins: dict[ir.Value, frozenset[str]] = {}
    for node in model.graph:
        if region_of(node).phase == BACKWARD:
            continue
        origin = frozenset[str]().union(*(origins.get(v, frozenset()) for v in node.inputs if v is not None))
        # A matrix product's weight is its second factor.
        weight, is_turned = _weight(node, types) if node.op_type in ("MatMul", "Gemm") else (None, False)
        if weight is None:
            biases.update(dict.fromkeys(_vectors(node, types) if origin else (), origin))
        elif origin:
            split[weight] = int(is_turned)
            paired |= origin
            origin = frozenset()
        else:
            columns[weight] = int(not is_turned)
            origin = frozenset({weight})
            biases.update(dict.fromkeys(_vectors(node, types), origin))
        origins.update(dict.fromkeys(node.outputs, origin))
    split.update({name: dim for name, dim in columns.items() if name in paired})
    return split | {name: 0 for name, origin in biases.items() if origin <= paired}


def _weight(node: ir.Node, types: Types) -> tuple[str | None, bool]:
    """Return the weight of a product, and whether its rows are the columns of the product."""
    factor, flag = node.inputs[1], node.attributes.get("transB")
    is_turned = flag is not None and bool(flag.value)
    maker = None if factor is None else factor.producer()
    if maker is not None and maker.op_type == "Transpose":
        factor, is_turned = maker.inputs[0], not is_turned
    return next(iter(_sources([factor], types, rank=2)), None), is_turned


def _vectors(node: ir.Node, types: Types) -> list[str]:
    """Return the 1-D weights that an Add reads, or a Gemm as its third input."""
    read = node.inputs[2:3] if node.op_type == "Gemm" else node.inputs if node.op_type == "Add" else ()
    return _sources(read, types, rank=1)


def _sources(values: Iterable[ir.Value | None], types: Types, rank: int) -> list[str]:
    """Return the names of the weights and graph inputs of a rank among values."""
    sources = [v for v in values if v is not None and (v.is_initializer() or v.is_graph_input())]
    return [v.name for v in sources if v.name and len(type_of(v, types).shape or ()) == rank]
