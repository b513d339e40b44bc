"""ONNX's messages: their nodes, bodies, names, tensors and types, and the messages of a model without its weights.

Messages without weights are for the checker, inference and the version converter: tensors over `KEPT_BYTES` become
bare dtypes and dimensions, and dask_ferro's own operators become Identity, whose types they have.  Nothing here reads
external data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import onnx
import onnx_ir as ir

from dask_ferro.graph.ir.domain import OWN_DOMAIN, STANDARD_DOMAINS

# Inference reads values of tensors only if they are shapes, axes or sizes: 128 int64.
KEPT_BYTES = 1024

# `ir.Value.meta` key: the serialized TypeProto of a type that onnx_ir cannot hold (maps).
TYPE_PROTO = "dask_ferro.type"

_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def domain_of(domain: str) -> str:
    """Return a domain by the name used here: ONNX's own has two, "" and "ai.onnx"."""
    return "" if domain in STANDARD_DOMAINS else domain


def bodies(node: onnx.NodeProto) -> Sequence[onnx.GraphProto]:
    """Return the graphs in the attributes of `node`."""
    attributes = node.attribute
    # Most nodes have none; every step of loading calls this for every node.
    if not attributes:
        return ()
    found: list[onnx.GraphProto] = []
    for attribute in attributes:
        if attribute.HasField("g"):
            found.append(attribute.g)
        found += attribute.graphs
    return found


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes and the nodes of their bodies, at any depth."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from all_nodes(body.node)


def all_graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """Return the graph and the bodies of its nodes, at any depth."""
    return [graph, *chain.from_iterable(map(bodies, all_nodes(graph.node)))]


def external_tensors(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """Return the initializers of the graph and of its bodies whose data is in other files."""
    tensors = chain.from_iterable(each.initializer for each in all_graphs(graph))
    return [tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL]


def capture_names(node: onnx.NodeProto) -> set[str]:
    names: set[str] = set()
    for body in bodies(node):
        names |= free_names(body)
    return names


def free_names(graph: onnx.GraphProto) -> set[str]:
    """Return the free names of `graph`, a body: those it uses and does not define."""
    defined = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    defined.update(sparse.values.name for sparse in graph.sparse_initializer)
    used = {info.name for info in graph.output}
    for node in graph.node:
        defined.update(node.output)
        used.update(uses(node))
    return used - defined - {""}


def uses(node: onnx.NodeProto) -> Sequence[str] | set[str]:
    """Return the names that `node` reads, those captured by its bodies included."""
    # Few nodes have bodies; for the others no set is built.
    inner = capture_names(node) if any(a.type in _GRAPHS for a in node.attribute) else None
    return inner.union(node.input) if inner else node.input


# Types.


def types_of(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    types = {info.name: info.type for info in [*graph.input, *graph.value_info, *graph.output]}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return types


def all_types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    return dict(chain.from_iterable(types_of(each).items() for each in all_graphs(graph)))


def holds_map(type_: onnx.TypeProto) -> bool:
    """Return whether a type is one of maps, which onnx_ir cannot hold."""
    while type_.WhichOneof("value") in ("sequence_type", "optional_type"):
        type_ = getattr(type_, type_.WhichOneof("value")).elem_type
    return bool(type_.HasField("map_type"))


def take_maps(graph: onnx.GraphProto) -> dict[str, bytes]:
    """Remove types with maps, which onnx_ir cannot hold, from `graph`; return them for `TYPE_PROTO`."""
    maps = {}
    for info in [*graph.input, *graph.value_info, *graph.output]:
        if holds_map(info.type):
            maps[info.name] = info.type.SerializeToString()
            info.ClearField("type")
    return maps


# Messages without weights.


def lean_model(model: ir.Model, *, keep_declared: bool, keep_inner: bool = False) -> onnx.ModelProto:
    """Return `model` as messages without weights.

    `keep_declared` keeps the declared shapes of the outputs and of the results of operators that inference does not
    know; `keep_inner` keeps the declared shapes of all nodes' outputs.
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
        # Marked external, it has a type and no data.
        return onnx.TensorProto(
            name=name,
            data_type=tensor.dtype.value,
            dims=list(tensor.shape.numpy()),
            data_location=onnx.TensorProto.EXTERNAL,
        )
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
