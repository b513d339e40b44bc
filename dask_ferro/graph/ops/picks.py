"""Nodes that pick, or add, by index in a range of a dimension: a rank has the range, the indices count through all.

    index in the range    less the start of the range    what is picked, or added, there
    index elsewhere       0                              zeros in its place

So the sum over all ranges is the pick from the whole dimension, and each range of a scatter has its own updates
(Shoeybi and others 2019, arXiv:1909.08053, section 3).  Negative indices count from the end of the whole dimension.
The last range keeps indices that lie outside of the whole dimension, so that an engine refuses them as it does
without ranks.  `labels.Pick` has the dimension that a node picks along; ranges are decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.ops.labels import Pick

# Given a number or numbers as an array: a constant of the graph.
Constant = Callable[[np.ndarray], ir.Value]


class Range(NamedTuple):
    """A part of a dimension: from `start` up to `stop`, of `size` in all."""

    start: int
    stop: int
    size: int


class PickNodes(NamedTuple):
    """The operands and outputs of a node that picks in a range, and the nodes before and after it."""

    inputs: list[ir.Value | None]
    outputs: list[ir.Value]
    before: list[ir.Node]
    after: list[ir.Node]


def in_range(
    pick: Pick,
    own: Range,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value],
    constant: Constant,
) -> PickNodes:
    """Return what makes a node pick, or add, in a range of its dimension alone.

    Parameters
    ----------
    pick : Pick
    own : Range
        Not the whole dimension.
    inputs, outputs : sequence of onnx_ir.Value
        Those of the node, of known types; the first input has the range.
    constant : callable
        Returns a constant of the graph for an array.
    """
    data, indices = inputs[0], inputs[1]
    assert data is not None
    assert indices is not None
    writer = _PickWriter(outputs[0].name or "", constant)
    place, elsewhere = writer.place(indices, own)
    shape = indices.shape.numpy() if indices.shape is not None else ()
    # Indices are aligned with the front of what they pick, so ones behind them make them broadcast.
    seen = (*shape[: len(shape) - pick.in_tuples], *(1,) * pick.behind)
    if seen != tuple(shape):
        elsewhere = writer.emit(
            "Reshape", elsewhere, constant(np.array(seen, np.int64)), like=elsewhere, shape=seen
        )
    zero = constant(np.zeros((), _numpy(data)))
    read = [data, place, *inputs[2:]]
    if pick.updates is not None:
        updates = inputs[pick.updates]
        assert updates is not None
        read[pick.updates] = writer.emit("Where", elsewhere, zero, updates, like=updates)
        return PickNodes(read, list(outputs), writer.nodes, [])
    picked = ir.Value(name=f"{writer.stem}/picked", type=outputs[0].type, shape=outputs[0].shape)
    masked = ir.Node(
        "", "Where", [elsewhere, zero, picked], outputs=outputs[:1], name=f"{writer.stem}/masked"
    )
    return PickNodes(read, [picked, *outputs[1:]], writer.nodes, [masked])


class _PickWriter:
    """The nodes that are written so far; their values are named after `stem`."""

    def __init__(self, stem: str, constant: Constant) -> None:
        self.stem, self.constant = stem, constant
        self.nodes: list[ir.Node] = []

    def place(self, indices: ir.Value, own: Range) -> tuple[ir.Value, ir.Value]:
        """Return the indices in a range, and whether each lies elsewhere."""
        start, stop, size, zero = (
            self.constant(np.array(number, _numpy(indices))) for number in (own.start, own.stop, own.size, 0)
        )
        from_end = self.emit("Add", indices, size, like=indices)
        counted = self.emit("Where", self.less(indices, zero), from_end, indices, like=indices)
        before = self.less(counted, start)
        if own.stop == own.size:
            elsewhere = self.truth("And", before, self.truth("Not", self.less(counted, zero)))
        else:
            elsewhere = self.truth("Or", before, self.truth("Not", self.less(counted, stop)))
        inside = self.emit("Sub", counted, start, like=indices)
        return self.emit("Where", elsewhere, zero, inside, like=indices), elsewhere

    def less(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return whether each element of `a` is less than `b`."""
        return self.truth("Less", a, b)

    def truth(self, op: str, *inputs: ir.Value) -> ir.Value:
        """Return the result of a node that gives bools in the shape of its first input."""
        made = ir.Value(name=self._name(op), type=ir.TensorType(ir.DataType.BOOL), shape=inputs[0].shape)
        return self.node(op, inputs, made)

    def emit(
        self, op: str, *inputs: ir.Value, like: ir.Value, shape: Sequence[int] | None = None
    ) -> ir.Value:
        """Return the result of a node, in the dtype and, without `shape`, in the shape of a value."""
        held = like.shape if shape is None else ir.Shape(shape)
        return self.node(op, inputs, ir.Value(name=self._name(op), type=like.type, shape=held))

    def node(self, op: str, inputs: Sequence[ir.Value], made: ir.Value) -> ir.Value:
        """Write a node, and return its output."""
        self.nodes.append(ir.Node("", op, inputs, outputs=[made], name=made.name))
        return made

    def _name(self, op: str) -> str:
        return f"{self.stem}/{op}_{len(self.nodes)}"


def _numpy(value: ir.Value) -> np.dtype:
    assert value.dtype is not None
    return value.dtype.numpy()
