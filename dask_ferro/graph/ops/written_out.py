"""Nodes of a model written out as the standard's function bodies of their operators.

    y = LogSoftmax(x)    ->    m = ReduceMax(x); d = Sub(x, m); ... y = Sub(d, Log(ReduceSum(Exp(d))))

Which nodes are written out is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from dask_ferro.graph.ir.inference import ValueType
from dask_ferro.graph.ir.nodes import Types
from dask_ferro.graph.ops.function_bodies import Body, body_of
from dask_ferro.graph.ops.labels import TypedNode


def has_body(o: TypedNode) -> bool:
    """Return whether a node can be written out: in its own operator set, and with all shapes known."""
    body = body_of(o)
    return body is not None and body.opset == o.opset


def written_out(model: ir.Model, types: Types, chosen: Collection[ir.Node]) -> tuple[ir.Model, Types]:
    """Return a copy of a model in which nodes are replaced by their bodies, with the types of its values.

    Parameters
    ----------
    model : onnx_ir.Model
        Not changed; the copy shares its weights.
    types : mapping of str to ValueType
        Of the model's values.
    chosen : collection of onnx_ir.Node
        Nodes of the model for which `has_body` holds.  Their results keep their names, and the nodes of a body have the
        metadata and the device configurations of the node.
    """
    places = [place for place, node in enumerate(model.graph) if node in chosen]
    copy, found = model.clone(), dict(types)
    nodes, opset = list(copy.graph), copy.opset_imports.get("", 0) or 0
    for place in places:
        body = body_of(TypedNode(nodes[place], types, opset))
        assert body is not None
        found |= _BodyWriter(copy.graph, nodes[place], body).written()
    return copy, found


class _BodyWriter:
    """A node's body in the graph of the node."""

    def __init__(self, graph: ir.Graph, node: ir.Node, body: Body) -> None:
        self.graph, self.node, self.body = graph, node, body
        self.stem = node.name or node.outputs[0].name or node.op_type
        self.values: dict[str, ir.Value] = {}
        self.types: dict[str, ValueType] = {}
        for position, value in enumerate(node.inputs):
            if value is not None:
                self.values[f"i{position}"] = value

    def written(self) -> dict[str, ValueType]:
        """Replace the node; return the types of the values that are new."""
        nodes = [made for inner in self.body.graph if (made := self._made(inner)) is not None]
        asked = [(k, value) for k, value in enumerate(self.node.outputs) if value.name]
        ir.convenience.replace_nodes_and_values(
            self.graph,
            self.node,
            [self.node],
            nodes,
            [value for _, value in asked],
            [self.values[f"o{k}"] for k, _ in asked],
        )
        return self.types

    def _made(self, inner: ir.Node) -> ir.Node | None:
        """Return a node of the body in the graph; None for a constant, which becomes an initializer."""
        outputs = [self._value(value) for value in inner.outputs]
        if inner.op_type == "Constant":
            outputs[0].const_value = ir.convenience.get_const_tensor(inner.outputs[0])
            self.graph.register_initializer(outputs[0])
            return None
        return ir.Node(
            inner.domain,
            inner.op_type,
            [None if value is None else self.values[value.name or ""] for value in inner.inputs],
            inner.attributes.values(),
            outputs=outputs,
            name=f"{self.stem}/{inner.outputs[0].name}",
            metadata_props=dict(self.node.metadata_props),
            device_configurations=self.node.device_configurations,
        )

    def _value(self, value: ir.Value) -> ir.Value:
        name = value.name or ""
        type_ = self.body.types[name]
        held = ir.TensorType(type_.dtype) if type_.dtype is not None else None
        made = ir.Value(name=f"{self.stem}/{name}", type=held, shape=ir.Shape(type_.shape or ()))
        self.values[name] = made
        self.types[made.name or ""] = type_
        return made
