"""Access to a node of `onnx_ir`: the values it reads and writes, shapes, bytes, attributes, bodies.

Types come from `inference.infer`, by name; a value that it does not know (inside the body of an If, Loop or
Scan) has the type that it declares.  A dimension of unknown size counts as 1.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, TypeAlias, TypeVar

import onnx_ir as ir

from dask_ferro.graph.ir.inference import UNKNOWN, ValueType, declared_type

T = TypeVar("T")
Types: TypeAlias = Mapping[str, ValueType]

# A string is a pointer and a length at least; its characters are not known ahead.
STRING_BYTES = 16
_GRAPH = ir.AttributeType.GRAPH
_GRAPHS = (_GRAPH, ir.AttributeType.GRAPHS)
_ACTIVATIONS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
_SEQUENCE_LENS = 4


def value_bytes(value: ValueType) -> int:
    """Return the bytes of a tensor, sub-byte elements packed; 0 for an unknown rank, and for no tensor."""
    if value.kind not in ("tensor", "optional") or value.shape is None:
        return 0
    if value.dtype is None or value.dtype == ir.DataType.UNDEFINED:
        return 0
    elements = prod(sizes(value))
    if value.dtype == ir.DataType.STRING:
        return elements * STRING_BYTES
    return ceil(elements * value.dtype.bitwidth / 8)


def sizes(value: ValueType) -> tuple[int, ...]:
    """Return the shape, 1 for each unknown size, () for an unknown rank."""
    return tuple([d if isinstance(d, int) else 1 for d in value.shape or ()])


def extent(size: int, index: int, count: int) -> tuple[int, int]:
    """Return start and stop of part `index` of `count` along a dimension; the first parts may be longer by one.

    Examples
    --------
    >>> [extent(7, i, 3) for i in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    least, longer = divmod(size, count)
    start = index * least + min(index, longer)
    return start, start + least + (index < longer)


def type_of(value: ir.Value, types: Types) -> ValueType:
    """Return the inferred type of a value, or else the declared one."""
    found = types.get(value.name or "", UNKNOWN)
    return declared_type(value) if found.kind == "unknown" else found


def attribute_of(node: ir.Node, name: str, default: T) -> T:
    """Return the value of an attribute; `default` if it is omitted, or a reference to a function's attribute."""
    entry = node.attributes.get(name)
    value: T = default if entry is None or entry.is_ref() or entry.value is None else entry.value
    return value


def input_of(node: ir.Node, position: int) -> ir.Value | None:
    return node.inputs[position] if position < len(node.inputs) else None


def has_default_cell(node: ir.Node) -> bool:
    """Return whether an RNN, GRU or LSTM has the default activations, no clipping and no lengths of its samples."""
    if any(name in node.attributes for name in ("activation_alpha", "activation_beta", "clip")):
        return False
    directions = 2 if attribute_of(node, "direction", "forward") == "bidirectional" else 1
    default = _ACTIVATIONS[node.op_type] * directions
    if list(attribute_of(node, "activations", default)) != default or attribute_of(node, "input_forget", 0):
        return False
    lengths = input_of(node, _SEQUENCE_LENS)
    return lengths is None or not lengths.name


def bodies(node: ir.Node) -> Sequence[ir.Graph]:
    """Return the graphs that a node owns: branches of an If, bodies of Loop and Scan."""
    found: list[ir.Graph] = []
    # Not `attributes.values()`, which loops in Python: this runs for each node at each walk.
    for attribute in node.attributes.data.values():
        if attribute.type in _GRAPHS and not attribute.is_ref():
            found += [attribute.as_graph()] if attribute.type == _GRAPH else attribute.as_graphs()
    return found


def nodes_and_bodies(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the node and every node of its bodies, at any depth."""
    yield node
    for body in bodies(node):
        for inner in body:
            yield from nodes_and_bodies(inner)


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values that a node reads, with all values that its bodies read or return (their own too)."""
    yield from (value for value in node.inputs if value is not None)
    for body in bodies(node):
        for inner in body:
            yield from reads(inner)
        yield from body.outputs


def uses(node: ir.Node) -> Iterator[str]:
    """Yield the names of the values that a node reads (`reads`)."""
    yield from (value.name for value in reads(node) if value.name)


@dataclass(frozen=True)
class Operands:
    """A node with the types of its values; positions beyond the last operand are absent operands."""

    node: ir.Node
    types: Types

    def shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of an input; () if it is absent or of unknown rank."""
        value = self._input(position)
        return () if value is None else sizes(type_of(value, self.types))

    def size(self, position: int) -> int:
        """Return the elements of an input, 0 if it is absent."""
        value = self._input(position)
        return 0 if value is None else prod(sizes(type_of(value, self.types)))

    def has(self, position: int) -> bool:
        return self._input(position) is not None

    def out_shape(self, position: int = 0) -> tuple[int, ...]:
        outputs = self.node.outputs
        return sizes(type_of(outputs[position], self.types)) if position < len(outputs) else ()

    def out(self, position: int = 0) -> int:
        return prod(self.out_shape(position)) if position < len(self.node.outputs) else 0

    def out_total(self) -> int:
        return sum(self.out(i) for i in range(len(self.node.outputs)))

    def attribute(self, name: str, default: Any) -> Any:
        return attribute_of(self.node, name, default)

    def length(self, name: str) -> int:
        """Return how many elements a list or tensor attribute holds."""
        value = self.attribute(name, ())
        return int(value.size) if hasattr(value, "size") else len(value)

    def _input(self, position: int) -> ir.Value | None:
        return input_of(self.node, position)
