"""The unit of a program: a node with its kernel's builder; `host_ops` marks the units that the host computes better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro.engines.array.kernel import Build, Op
from dask_ferro.engines.array.table import find
from dask_ferro.errors import UnsupportedOp


class Unit(NamedTuple):
    """One call of a program.

    Attributes
    ----------
    node : onnx_ir.Node
        The node to name in errors.
    build : callable (xp, Op) -> function of the inputs
    inputs, outputs : tuple of str
        Value names; None and "" for an omitted input and output.
    reads : tuple of int
        Positions of inputs whose values the kernel reads on the host.
    on_host : bool
        Whether numpy computes it beside the device.
    """

    node: ir.Node
    build: Build
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    reads: tuple[int, ...] = ()
    on_host: bool = False


def units_of(nodes: Sequence[ir.Node], opset: int) -> list[Unit]:
    """Return a unit for each node.

    Raises
    ------
    UnsupportedOp
        A node's op, opset or attributes are outside the table.
    """
    units, problems = [], []
    for node in nodes:
        row = find(node, opset)
        if row is None:
            problems.append(
                f"node {node.name!r}: no {node.op_type} of opset {opset} with these attributes and outputs"
            )
            continue
        inputs = tuple(None if v is None or not v.name else v.name for v in node.inputs)
        outputs = tuple(v.name or "" for v in node.outputs)
        units.append(Unit(node, row.build, inputs, outputs, row.reads))
    if problems:
        raise UnsupportedOp("cannot compile the bundle for array kernels", problems)
    return units


def member_op(unit: Unit, opset: int, constants: Mapping[int, np.ndarray]) -> Op:
    """Return the view of a unit's node for its builder."""
    attributes = {name: attribute.value for name, attribute in unit.node.attributes.items()}
    given = tuple(name is not None for name in unit.inputs)
    return Op(unit.node.op_type, opset, attributes, given, len(unit.outputs), constants)
