"""Texts of a model that are not UTF-8.

Protobuf does not mind, and hands those over as bytes where everything else expects a str; so this is asked
before any other question.  String attributes are values, not names: they are judged with their operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import onnx

from dask_ferro.graph.ir.order import bodies


def undecodable(proto: onnx.ModelProto) -> Iterator[bytes]:
    """The names, symbols and notes of `proto` that are no text, as the bytes that they are."""
    texts = chain(
        (proto.producer_name, proto.producer_version, proto.domain),
        _notes(proto),
        (entry.domain for entry in proto.opset_import),
        _of_configurations(proto.configuration),
        _of_graph(proto.graph),
        *map(_of_function, proto.functions),
    )
    return (text for text in texts if isinstance(text, bytes))


def _notes(
    message: onnx.ModelProto | onnx.GraphProto | onnx.NodeProto | onnx.FunctionProto,
) -> Iterator[object]:
    yield message.doc_string
    for entry in message.metadata_props:
        yield from (entry.key, entry.value)


def _of_configurations(configurations: Iterable[onnx.DeviceConfigurationProto]) -> Iterator[object]:
    for configuration in configurations:
        yield configuration.name
        yield from configuration.device


def _of_function(function: onnx.FunctionProto) -> Iterator[object]:
    yield from (function.name, function.domain, function.overload)
    yield from chain(function.input, function.output, function.attribute)
    yield from (entry.domain for entry in function.opset_import)
    yield from (attribute.name for attribute in function.attribute_proto)
    yield from _notes(function)
    yield from _of_nodes(function.node)
    for info in function.value_info:
        yield from _of_info(info)


def _of_graph(graph: onnx.GraphProto) -> Iterator[object]:
    yield graph.name
    yield from _notes(graph)
    for info in chain(graph.input, graph.output, graph.value_info):
        yield from _of_info(info)
    for tensor in graph.initializer:
        yield from _of_tensor(tensor)
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[object]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, node.overload)
        yield from node.input
        yield from node.output
        yield from _notes(node)
        yield from _of_devices(node)
        for attribute in node.attribute:
            yield from (attribute.name, attribute.ref_attr_name, attribute.doc_string)
            if attribute.HasField("t"):
                yield from _of_tensor(attribute.t)
        for body in bodies(node):
            yield from _of_graph(body)


def _of_devices(node: onnx.NodeProto) -> Iterator[object]:
    for told in node.device_configurations:
        yield told.configuration_id
        for spec in told.sharding_spec:
            yield spec.tensor_name
            for dim in spec.sharded_dim:
                yield from (each.dim_param for each in dim.simple_sharding)


def _of_tensor(tensor: onnx.TensorProto) -> Iterator[object]:
    yield from (tensor.name, tensor.doc_string)
    for entry in chain(tensor.external_data, tensor.metadata_props):
        yield from (entry.key, entry.value)


def _of_info(info: onnx.ValueInfoProto) -> Iterator[object]:
    yield from (info.name, info.doc_string)
    yield from _of_type(info.type)
    for entry in info.metadata_props:
        yield from (entry.key, entry.value)


def _of_type(type_: onnx.TypeProto) -> Iterator[object]:
    yield type_.denotation
    kind = type_.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        for dim in getattr(type_, kind).shape.dim:
            yield from (dim.dim_param, dim.denotation)
    elif kind == "map_type":
        yield from _of_type(type_.map_type.value_type)
    elif kind in ("sequence_type", "optional_type"):
        yield from _of_type(getattr(type_, kind).elem_type)
