"""The unit of a program: a node, or several nodes that became one call.

`fuse` and `batch` turn lists of units into shorter ones that compute the same; `host_ops` marks those that are
bookkeeping about shapes, and better done on the host.
"""

from __future__ import annotations

from collections import defaultdict
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
        The node that an error names.
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
    units = []
    for node, row in zip(nodes, rows, strict=True):
        if row is not None:
            inputs = tuple(None if v is None or not v.name else v.name for v in node.inputs)
            units.append(Unit(node, row.build, inputs, tuple(v.name or "" for v in node.outputs)))
    return units


def makers_of(units: Sequence[Unit]) -> dict[str, int]:
    """Return the position of the unit that makes each value, by name."""
    found: dict[str, int] = {}
    for position, unit in enumerate(units):
        found.update(dict.fromkeys(filter(None, unit.outputs), position))
    return found


def readers_of(units: Sequence[Unit]) -> dict[str, list[int]]:
    """Return the positions of the units that read each value, by name, each unit once."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for position, unit in enumerate(units):
        for name in dict.fromkeys(unit.inputs):
            if name is not None:
                found[name].append(position)
    return dict(found)


def member_op(unit: Unit, opset: int, constants: Mapping[int, np.ndarray]) -> Op:
    """Return the view of a unit's node that its builder gets."""
    attributes = {name: attribute.value for name, attribute in unit.node.attributes.items()}
    given = tuple(name is not None for name in unit.inputs)
    return Op(unit.node.op_type, opset, attributes, given, len(unit.outputs), constants)
