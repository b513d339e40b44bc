"""Copies of a graph without weights, as ONNX's messages, for the checker, inference and the version converter.

Tensors over `KEPT_BYTES` become bare dtypes and dimensions; our own operators become Identity, whose types
they have.  Nothing here reads external data or changes what it is given.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir

from dask_ferro.graph.ir.domain import OWN_DOMAIN

# Inference reads values of tensors only where they are shapes, axes or sizes: 128 int64.
KEPT_BYTES = 1024

# `ir.Value.meta` key: the serialized TypeProto of a type that onnx_ir cannot hold (maps).
TYPE_PROTO = "dask_ferro.type"


def _bare(name: str, data_type: int, dims: Iterable[int]) -> onnx.TensorProto:
    """Return a tensor without data: marked external, it gives inference its type only."""
    return onnx.TensorProto(
        name=name, data_type=data_type, dims=list(dims), data_location=onnx.TensorProto.EXTERNAL
    )


def lean_model(model: ir.Model, *, keep_declared: bool, keep_inner: bool = False) -> onnx.ModelProto:
    """Return `model` as messages without weights.

    With `keep_declared`, the outputs keep their declared shapes, and so do those of operators that inference does not
    know; with `keep_inner`, the outputs of all nodes.
    """
    proto = onnx.ModelProto(ir_version=max(model.ir_version, 8))
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version or 1)
    _lean_graph(model.graph, proto.graph, keep_declared, keep_inner)
    return proto


def _lean_graph(graph: ir.Graph, proto: onnx.GraphProto, shaped: bool, inner: bool = False) -> None:
    proto.name = graph.name or "graph"
    for value in graph.inputs:
        proto.input.append(_lean_info(value, shaped=True))
    for name, value in graph.initializers.items():
        if value.const_value is not None:
            proto.initializer.append(_lean_tensor(value.const_value, name))
    for node in graph:
        _lean_node(node, proto.node.add(), shaped)
    # Inference does not know the operators of other domains.
    for node in graph:
        if inner or node.domain not in ("", OWN_DOMAIN):
            proto.value_info.extend(
                _lean_info(value, shaped)
                for value in node.outputs
                if value.name and value.type is not None and not value.is_graph_output()
            )
    proto.output.extend(_lean_info(value, shaped) for value in graph.outputs)


def holds_map(type_: onnx.TypeProto) -> bool:
    """Return whether a type is one of maps, which onnx_ir cannot hold."""
    while type_.WhichOneof("value") in ("sequence_type", "optional_type"):
        type_ = getattr(type_, type_.WhichOneof("value")).elem_type
    return bool(type_.HasField("map_type"))


def take_maps(graph: onnx.GraphProto) -> dict[str, bytes]:
    """Remove types with maps, which onnx_ir cannot hold, from `graph`; return them for `TYPE_PROTO`."""
    taken = {}
    for info in [*graph.input, *graph.value_info, *graph.output]:
        if holds_map(info.type):
            taken[info.name] = info.type.SerializeToString()
            info.ClearField("type")
    return taken


def _lean_info(value: ir.Value, shaped: bool) -> onnx.ValueInfoProto:
    proto: onnx.ValueInfoProto = ir.serde.serialize_value(value)
    stored = value.meta.get(TYPE_PROTO)
    if stored is not None:
        proto.type.ParseFromString(stored)
    if not shaped and proto.type.HasField("tensor_type"):
        proto.type.tensor_type.ClearField("shape")
    return proto


def _lean_tensor(tensor: ir.TensorProtocol, name: str) -> onnx.TensorProto:
    if isinstance(tensor, ir.ExternalTensor) or tensor.nbytes > KEPT_BYTES:
        return _bare(name, tensor.dtype.value, tensor.shape.numpy())
    proto: onnx.TensorProto = ir.serde.serialize_tensor(tensor)
    proto.name = name
    return proto


def _lean_node(node: ir.Node, proto: onnx.NodeProto, shaped: bool) -> None:
    own = node.domain == OWN_DOMAIN
    proto.op_type = "Identity" if own else node.op_type
    proto.domain = "" if own else node.domain
    proto.name = node.name or ""
    inputs = node.inputs[:1] if own else node.inputs
    proto.input.extend((value.name or "") if value is not None else "" for value in inputs)
    proto.output.extend(value.name or "" for value in node.outputs)
    if own:
        return
    for attribute in node.attributes.values():
        _lean_attribute(attribute, proto, shaped)


def _lean_attribute(attribute: ir.Attr, node: onnx.NodeProto, shaped: bool) -> None:
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        proto = node.attribute.add(name=attribute.name, type=attribute.type.value)
        if attribute.type == ir.AttributeType.GRAPH:
            _lean_graph(attribute.as_graph(), proto.g, shaped)
        else:
            for body in attribute.as_graphs():
                _lean_graph(body, proto.graphs.add(), shaped)
    elif attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
        proto = node.attribute.add(name=attribute.name, type=attribute.type.value)
        proto.t.CopyFrom(_lean_tensor(attribute.as_tensor(), attribute.as_tensor().name or ""))
    else:
        node.attribute.append(ir.serde.serialize_attribute(attribute))
