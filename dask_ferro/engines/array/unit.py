"""The units of a program: nodes with their kernels' builders, and which of them the host computes beside a device.

Exported models compute shapes with tensors: Shape, Gather, Concat, Reshape.  On a device each of these operators would
be a kernel of one element, and a Reshape that reads the result would wait for all queued work.  Values that depend
only on shapes and small weights are therefore computed by numpy on the host, and passed as numpy arrays to kernels that
read integers on the host anyway (`Kernel.reads`).  The device computes everything else.
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
from dask_ferro.graph.ir.domain import STANDARD_DOMAINS

_ABOUT_SHAPES = frozenset({"Shape", "Size"})
# Operators with which exported models compute shapes.
_BOOKKEEPING = frozenset(
    {"Gather", "Concat", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity", "Range"}
    | {"ReduceProd", "Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Min", "Max", "Floor", "Ceil", "Sqrt"}
    | {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "Where"}
)
# A weight up to this size may be read on the host as well as on the device.
SMALL_BYTES = 64 * 1024


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

    def op(self, opset: int, constants: Mapping[int, np.ndarray]) -> Op:
        """Return the view of the node for its builder."""
        attributes = {name: attribute.value for name, attribute in self.node.attributes.items()}
        given = tuple(name is not None for name in self.inputs)
        return Op(self.node.op_type, opset, attributes, given, len(self.outputs), constants)


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


def mark(units: Sequence[Unit], weights: Mapping[str, ir.TensorProtocol]) -> list[Unit]:
    """Return the units, with `on_host` set where the host computes them."""
    small = {name for name, tensor in weights.items() if tensor.nbytes <= SMALL_BYTES}
    values: set[str] = set()  # names of values on the host
    marked = []
    for unit in units:
        on_host = _is_hosts(unit, values, small)
        if on_host:
            values.update(unit.outputs)
        marked.append(unit._replace(on_host=on_host))
    return marked


def _is_hosts(unit: Unit, values: set[str], small: set[str]) -> bool:
    op, given = unit.node.op_type, [name for name in unit.inputs if name is not None]
    if unit.node.domain not in STANDARD_DOMAINS:
        return False
    # The host knows every shape, also of an array on the device.
    if op in _ABOUT_SHAPES:
        return True
    follows = any(name in values for name in given) and all(name in values or name in small for name in given)
    # A mask is computed from positions too, but it is a matrix, so the device computes it.
    flat = all(v.shape is None or len(v.shape) <= 1 for v in unit.node.outputs)
    return op in _BOOKKEEPING and follows and flat


def read_on_host(units: Sequence[Unit], inputs: Sequence[str], outputs: Sequence[str]) -> frozenset[str]:
    """Return the inputs that only the host reads, and that therefore stay there."""
    reads: defaultdict[str, set[bool]] = defaultdict(set)
    for unit in units:
        if unit.node.op_type in _ABOUT_SHAPES and unit.on_host:
            # It reads the shape alone.
            continue
        for position, name in enumerate(unit.inputs):
            reads[name or ""].add(unit.on_host or position in unit.reads)
    return frozenset(name for name in inputs if reads[name] == {True} and name not in outputs)
