"""What a program calls: a node, or several nodes that became one call.

`fuse` and `batch` turn lists of units into shorter ones that compute the same; `host_ops` says which of them are
bookkeeping about shapes, and better done on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro.engines.array.kernel import Build, Op
from dask_ferro.engines.array.table import find
from dask_ferro.errors import UnsupportedOp


class Unit(NamedTuple):
    """One call.

    Attributes
    ----------
    node : onnx_ir.Node
        Whom an error names.
    build : callable (xp, Op) -> function of the inputs
    inputs, outputs : tuple of str
        Value names; None and "" where one is left out.
    several : bool
        Whether it is more than the node.
    on_host : bool
        Whether numpy computes it beside the device.
    """

    node: ir.Node
    build: Build
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    several: bool = False
    on_host: bool = False


def units_of(nodes: Sequence[ir.Node], opset: int) -> list[Unit]:
    """Return a unit for each node.

    Raises
    ------
    UnsupportedOp
        A node's op, opset or attributes are outside the table.
    """
    rows = [find(node, opset) for node in nodes]
    lacking = [
        f"node {n.name!r}: no {n.op_type} of opset {opset} with these attributes and outputs"
        for n, row in zip(nodes, rows, strict=True)
        if row is None
    ]
    if lacking:
        raise UnsupportedOp("cannot compile the bundle for array kernels", lacking)
    return [
        Unit(
            node,
            row.build,
            tuple(None if v is None or not v.name else v.name for v in node.inputs),
            tuple(v.name or "" for v in node.outputs),
        )
        for node, row in zip(nodes, rows, strict=True)
        if row is not None
    ]


def member_op(unit: Unit, opset: int, constants: Mapping[int, np.ndarray]) -> Op:
    """Return what the builder of a unit's node gets to see."""
    attributes = {name: attribute.value for name, attribute in unit.node.attributes.items()}
    given = tuple(name is not None for name in unit.inputs)
    return Op(unit.node.op_type, opset, attributes, given, len(unit.outputs), constants)
