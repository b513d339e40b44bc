"""Write the plan of a sharding as one graph: each rank's nodes, and the collectives between them.

Each rank has a copy of every node of the plan, on that rank's parts; a redistribution is one collective node for each
group of ranks, or a Slice on each rank.  A value is named `name@layout@rank`, after the lowest rank that has the same
part, so weights and inputs that several ranks share exist once, unless each rank has a copy.  Attributes that count
parts of a split dimension (heads, groups) and constant shapes become the shapes of the shard.

The metadata of a node has its rank (`dask_ferro.rank`, of a collective `dask_ferro.ranks`) and the layout of its
output (`dask_ferro.placement`) in addition to its earlier entries; a redistribution has the region, and in a pipeline
the chunk, of the node that computed the value.  Nodes that no output needs are left out.  The workers of ranks are
decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from math import prod
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.ir.nodes import type_of
from dask_ferro.graph.ir.regions import region_of
from dask_ferro.graph.ops.labels import TypedNode
from dask_ferro.graph.ops.table import rule
from dask_ferro.graph.sharding.node_placement import CHUNK
from dask_ferro.graph.sharding.parts import Array, Port, Spmd, holders, local_shape, part
from dask_ferro.graph.sharding.placements import PLACEMENT, Shard
from dask_ferro.graph.sharding.plan import Compute, LayoutChange, Sharding, select_nodes
from dask_ferro.graph.sharding.redistribute import Layout, LayoutStep, collective, text

# The part of each rank, in order.
Pieces: TypeAlias = tuple[ir.Value, ...]

# Keys of a node's metadata.
RANK, RANKS = "dask_ferro.rank", "dask_ferro.ranks"


def lower(plan: Sharding, copied: Collection[str] = ()) -> Spmd:
    """Return the graph in which each rank computes its shards.

    Each rank has its own copy of the inputs and outputs in `copied` if ranks have the same part: parameters that all
    ranks update are then not sent from the first rank to the others.  The model passes `onnx.checker`, imports
    dask_ferro's domain for the collectives, declares the type of every value, and reads weights only when it is saved
    or run.
    """
    writer = _RankGraphWriter(plan, frozenset(copied))
    for entry in plan.entries:
        if isinstance(entry, Compute):
            writer.compute(entry)
        else:
            writer.redistribute(entry)
    return writer.finish()


class _RankGraphWriter:
    def __init__(self, plan: Sharding, copied: frozenset[str]) -> None:
        self.plan, self.mesh, self.copied = plan, plan.mesh, copied
        self.opset = plan.model.opset_imports.get("", 0) or 0
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.constants: dict[str, ir.Value] = {}
        self.pieces: dict[tuple[ir.Value, Layout], Pieces] = {}
        graph = plan.model.graph
        self.inputs = [(value, plan.inputs[value.name or ""]) for value in graph.inputs]
        for value in dict.fromkeys((*graph.inputs, *graph.initializers.values())):
            self._source(value, plan.inputs[value.name or ""])
        for value, array in plan.known.items():
            piece = self._constant(_name(value, self.mesh.whole, 0), array)
            self.pieces[value, self.mesh.whole] = (piece,) * self.mesh.ranks

    def finish(self) -> Spmd:
        graph = self.plan.model.graph
        ends = list(zip(graph.outputs, self.plan.outputs, strict=True))
        # Ranks with the same part of an output share one value, which is computed and stored once.
        pieces = [tuple(self.pieces[end][rank] for rank in self._holders(*end)) for end in ends]
        outputs = list(dict.fromkeys(chain.from_iterable(pieces)))
        inputs = list(dict.fromkeys(chain.from_iterable(map(self.pieces.__getitem__, self.inputs))))
        nodes = select_nodes({node: node.inputs for node in self.nodes}, outputs)
        for node in set(self.nodes).difference(nodes):
            # It would count as a reader.
            for i in range(len(node.inputs)):
                node.replace_input_with(i, None)
        read = set(outputs).union(*(node.inputs for node in nodes))
        model = ir.Model(
            ir.Graph(
                inputs,
                outputs,
                nodes=nodes,
                initializers=[v for v in self.weights if v in read],
                opset_imports={**graph.opset_imports, OWN_DOMAIN: 1},
                name=graph.name,
            ),
            ir_version=self.plan.model.ir_version,
            producer_name="dask_ferro",
        )
        return Spmd(
            model,
            self.mesh,
            tuple(self._port(*start, self.pieces[start]) for start in self.inputs),
            tuple(self._port(*end, own) for end, own in zip(ends, pieces, strict=True)),
        )

    # Values.

    def _shape(self, value: ir.Value) -> tuple[Dim, ...]:
        return type_of(value, self.plan.types).shape or ()

    def _port(self, value: ir.Value, layout: Layout, pieces: Pieces) -> Port:
        shape = type_of(value, self.plan.types).shape
        return Port(value.name or "", layout, shape, tuple(p.name or "" for p in pieces))

    def _value(self, value: ir.Value, layout: Layout, rank: int) -> ir.Value:
        if not value.name:
            return ir.Value(name="")
        type_ = type_of(value, self.plan.types)
        shape = None if type_.shape is None else ir.Shape(local_shape(type_.shape, layout, self.mesh))
        own = ir.TensorType(type_.dtype) if type_.kind == "tensor" and type_.dtype else value.type
        return ir.Value(name=_name(value, layout, rank), type=own, shape=shape)

    def _values(self, value: ir.Value, layout: Layout) -> Pieces:
        return tuple(self._value(value, layout, rank) for rank in range(self.mesh.ranks))

    def _holders(self, value: ir.Value, layout: Layout) -> tuple[int, ...]:
        """Return for each rank the rank whose part of an input or output it shares."""
        return tuple(range(self.mesh.ranks)) if value.name in self.copied else holders(layout, self.mesh)

    def _constant(self, name: str, array: Array) -> ir.Value:
        tensor = ir.Tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        self.weights.append(value)
        return value

    def _source(self, value: ir.Value, layout: Layout) -> None:
        """Add the parts of a graph input or a weight; ranks with the same part share one value."""
        owners = self._holders(value, layout)
        pieces = {rank: self._value(value, layout, rank) for rank in dict.fromkeys(owners)}
        self.pieces[value, layout] = tuple(pieces[rank] for rank in owners)
        if (tensor := _weight(value)) is not None:
            for rank, piece in pieces.items():
                index = part(self._shape(value), layout, self.mesh, rank)
                piece.const_value = _slice_weight(tensor, piece, index)
                self.weights.append(piece)

    # Nodes.

    def compute(self, entry: Compute) -> None:
        node = entry.node
        outputs = [self._values(v, layout) for v, layout in zip(node.outputs, entry.outputs, strict=True)]
        attributes = self._attributes(entry)
        props = {**node.metadata_props, PLACEMENT: text(entry.outputs[0]) if entry.outputs else ""}
        for rank in range(self.mesh.ranks):
            inputs = [self._input(entry, i, rank) for i in range(len(node.inputs))]
            self.nodes.append(
                ir.Node(
                    node.domain,
                    node.op_type,
                    inputs,
                    attributes,
                    outputs=[pieces[rank] for pieces in outputs],
                    name=f"{node.name or node.op_type}@{rank}",
                    metadata_props={**props, RANK: str(rank)},
                )
            )
        for value, layout, pieces in zip(node.outputs, entry.outputs, outputs, strict=True):
            self.pieces[value, layout] = pieces

    def _input(self, entry: Compute, position: int, rank: int) -> ir.Value | None:
        """Return a rank's operand at a position: its part, the shape of its part, or None."""
        value, layout = entry.node.inputs[position], entry.inputs[position]
        if value is None or not value.name:
            return None
        if layout is None:
            result, laid_out = entry.node.outputs[0], entry.outputs[0]
            shape = local_shape(self._shape(result), laid_out, self.mesh)
            return self._shared_constant(f"{_name(result, laid_out, 0)}:shape{list(shape)}", shape)
        at = self.mesh.coordinates(rank)
        # Only the first rank adds a bias to a Partial sum, or it would count once per rank.
        if any(at[axis] for axis, i in entry.once if i == position):
            return None
        return self.pieces[value, layout][rank]

    def _shared_constant(self, name: str, numbers: Sequence[Dim]) -> ir.Value:
        """Return a constant of integers, which all ranks share."""
        if name not in self.constants:
            self.constants[name] = self._constant(name, np.array(numbers, np.int64))
        return self.constants[name]

    def _attributes(self, entry: Compute) -> list[ir.Attr]:
        """Return the node's attributes, with counts of a split dimension divided among ranks."""
        labels = rule(TypedNode(entry.node, self.plan.types, self.opset))
        counts = {} if labels is None else labels.counts
        attributes = dict(entry.node.attributes)
        for name, (position, dim) in counts.items():
            layout = entry.inputs[position]
            if name in attributes and layout is not None:
                at = zip(layout, self.mesh.sizes, strict=True)
                share = prod(size for placement, size in at if placement == Shard(dim))
                # Attributes such as num_heads count parts of a dimension, and each rank has its share of them.
                attributes[name] = ir.AttrInt64(name, int(attributes[name].value) // share)
        return list(attributes.values())

    def redistribute(self, entry: LayoutChange) -> None:
        value, now = entry.value, entry.source
        # A weight needs no Slice at run time: its parts become initializers.
        is_cut = _weight(value) is not None and all(step.kind == "Slice" for step in entry.steps)
        maker = value.producer()
        props = {} if maker is None else region_of(maker).metadata()
        if maker is not None and CHUNK in maker.metadata_props:
            props[CHUNK] = maker.metadata_props[CHUNK]
        for step in entry.steps:
            then = step.after(now)
            if (value, then) not in self.pieces and is_cut:
                # The weight is split once, now, and not at each run.
                self._source(value, then)
            elif (value, then) not in self.pieces:
                pieces = self._values(value, then)
                self._step(step, self.pieces[value, now], pieces, {**props, PLACEMENT: text(then)})
                self.pieces[value, then] = pieces
            now = then

    def _step(self, step: LayoutStep, sources: Pieces, results: Pieces, props: Mapping[str, str]) -> None:
        for group in self.mesh.groups(*step.axes):
            operands, outputs = ([pieces[rank] for rank in group] for pieces in (sources, results))
            if isinstance(step.target, Shard) and step.kind == "Slice":
                for index, rank in enumerate(group):
                    node = self._slice(step.target.dim, index, len(group), operands[index], outputs[index])
                    node.metadata_props.update({RANK: str(rank), **props})
                    self.nodes.append(node)
            else:
                node = collective(step, operands, outputs, f"{outputs[0].name}/{step.kind}")
                node.metadata_props.update({**props, RANKS: ",".join(map(str, group))})
                self.nodes.append(node)

    def _slice(self, dim: int, index: int, count: int, whole: ir.Value, piece: ir.Value) -> ir.Node:
        """Return the Slice of one of `count` parts, in the form of the model's opset."""
        length = _size(whole, dim) // count
        bounds = {"starts": (index * length,), "ends": ((index + 1) * length,), "axes": (dim,)}
        # The bounds of a Slice are attributes up to opset 9, and inputs since 10.
        read = (
            [self._shared_constant(f"slice:{n[0]}", n) for n in bounds.values()] if self.opset >= 10 else []
        )
        return ir.Node(
            "",
            "Slice",
            [whole, *read],
            [] if read else [ir.AttrInt64s(name, numbers) for name, numbers in bounds.items()],
            outputs=[piece],
            name=f"{piece.name}/Slice",
        )


def _name(value: ir.Value, layout: Layout, rank: int) -> str:
    return f"{value.name}@{text(layout)}@{rank}"


def _size(value: ir.Value, dim: int) -> int:
    size = 0 if value.shape is None else value.shape[dim]
    return size if isinstance(size, int) else 0


def _weight(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer that is not an input; None for any other value."""
    return None if value.is_graph_input() else value.const_value


def _slice_weight(tensor: ir.TensorProtocol, piece: ir.Value, index: tuple[slice, ...]) -> ir.TensorProtocol:
    """Return a part of a weight, which is sliced when it is read."""
    if piece.shape is None or piece.shape == tensor.shape:
        return tensor
    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy()[index], dtype=tensor.dtype, name=piece.name),
        tensor.dtype,
        piece.shape,
        name=piece.name,
    )
