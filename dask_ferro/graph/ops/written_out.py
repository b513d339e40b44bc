"""Nodes of a model written out as the standard's function bodies of their operators.

    y = LogSoftmax(x)    ->    m = ReduceMax(x); d = Sub(x, m); ... y = Sub(d, Log(ReduceSum(Exp(d))))

Which nodes are written out is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import onnx
import onnx_ir as ir
from onnx import inliner
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.inference import ValueType, typed, value_types
from dask_ferro.graph.ir.nodes import Types, type_of
from dask_ferro.graph.ops.labels import TypedNode

# Bodies are kept for as many nodes that differ in types or attributes: a network has a few shapes.
_KEPT = 256


class Body(NamedTuple):
    """The nodes of a body, and the types of their values; its inputs are i0, i1 and so on, its outputs o0, o1."""

    graph: ir.Graph
    types: Mapping[str, ValueType]


def has_body(o: TypedNode) -> bool:
    """Return whether a node can be written out: in its own operator set, and with all shapes known."""
    return _body_of(o) is not None


def _body_of(o: TypedNode) -> Body | None:
    node = o.node
    if node.domain not in STANDARD_DOMAINS or not o.is_known():
        return None
    inputs = ["" if v is None or not v.name else f"i{k}" for k, v in enumerate(node.inputs)]
    outputs = [f"o{k}" if v.name else "" for k, v in enumerate(node.outputs)]
    proto = onnx.NodeProto(op_type=node.op_type, input=inputs, output=outputs)
    proto.attribute.extend(map(ir.to_proto, node.attributes.values()))
    types = tuple(type_of(v, o.types) for v in node.inputs if v is not None and v.name)
    return _body(proto.SerializeToString(), types, o.opset)


@lru_cache(_KEPT)
def _body(serialized: bytes, types: tuple[ValueType, ...], opset: int) -> Body | None:
    """Return the body of a node; None if the standard has none of this operator set, or it has control flow in it."""
    node = onnx.NodeProto.FromString(serialized)
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    versions = (*schema.function_opset_versions, *schema.context_dependent_function_opset_versions)  # type: ignore[attr-defined]
    if not versions or min(versions) > opset:
        return None
    # ONNX's inliner forgets the defaults of a function's attributes.
    given = {attribute.name for attribute in node.attribute}
    defaults = [a.default_value for name, a in schema.attributes.items() if name not in given]
    node.attribute.extend(default for default in defaults if default.type)
    graph = onnx.GraphProto(name="body", node=[node])
    graph.input.extend(_declared(*pair) for pair in zip(filter(None, node.input), types, strict=True))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
    model = inliner.inline_selected_functions(model, [("", node.op_type)], inline_schema_functions=True)
    inner = model.graph.node
    if any(n.op_type == node.op_type or any(a.HasField("g") for a in n.attribute) for n in inner):
        return None
    inferred = typed(model).proto
    known = value_types(inferred.graph)
    made = chain.from_iterable(n.output for n in inner)
    if not all(name in known and _is_sized(known[name]) for name in made if name):
        return None
    held = ir.from_proto(inferred)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(held)
    return Body(held.graph, known)


def _declared(name: str, type_: ValueType) -> onnx.ValueInfoProto:
    assert type_.dtype is not None
    return onnx.helper.make_tensor_value_info(name, type_.dtype.value, type_.shape)


def _is_sized(type_: ValueType) -> bool:
    return type_.shape is not None and all(isinstance(size, int) for size in type_.shape)


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
        body = _body_of(TypedNode(nodes[place], types, opset))
        assert body is not None
        found |= _write(copy.graph, nodes[place], body)
    return copy, found


def _write(graph: ir.Graph, node: ir.Node, body: Body) -> dict[str, ValueType]:
    """Replace a node of a graph by its body; return the types of the values that are new."""
    stem, inner = node.name or node.outputs[0].name or node.op_type, body.graph.clone()
    nodes, ends, constants = list(inner), list(inner.outputs), list(inner.initializers.values())
    for entry, value in zip(inner.inputs, [v for v in node.inputs if v is not None and v.name], strict=True):
        entry.replace_all_uses_with(value)
    inner.outputs.clear()
    inner.initializers.clear()
    inner.remove(nodes)
    types = {}
    for value in chain(constants, *(made.outputs for made in nodes)):
        type_ = body.types[value.name or ""]
        value.name = f"{stem}/{value.name}"
        types[value.name] = type_
    for made in nodes:
        made.name = made.outputs[0].name
        made.metadata_props.update(node.metadata_props)
        made.device_configurations = node.device_configurations
    for value in constants:
        graph.register_initializer(value)
    asked = [value for value in node.outputs if value.name]
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, asked, ends)
    return types
