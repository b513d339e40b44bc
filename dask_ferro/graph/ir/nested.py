"""Types of the values inside bodies of control flow, at the sizes of one run.

`inference.infer` types the main graph; ONNX's inference drops the shapes that a Loop carries around, for they
may change from trip to trip.  A cost estimate needs the first trip: here a body is inferred by itself,
with the types of the values that enter it and that it captures, and so on for bodies in it.  It changes nothing and
reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import onnx
import onnx_ir as ir

from dask_ferro.graph.ir.inference import (
    UNKNOWN,
    ValueType,
    declared_type,
    infer_model,
    value_types,
    values,
)
from dask_ferro.graph.ir.nodes import Operands, Types, bodies, reads, type_of
from dask_ferro.graph.ir.strip_weights import lean_model


def with_bodies(model: ir.Model, types: Types) -> Types:
    """Return `types` with those of all values inside bodies added, by name."""
    if not any(map(bodies, model.graph)):
        return types
    known = dict(types)
    _enter(model.graph, model, known)
    return known


def _enter(graph: ir.Graph, model: ir.Model, known: dict[str, ValueType]) -> None:
    for node in graph:
        for body in bodies(node):
            known.update(_inside(node, body, model, known))
            _enter(body, model, known)


def _inside(
    node: ir.Node, body: ir.Graph, model: ir.Model, known: Mapping[str, ValueType]
) -> dict[str, ValueType]:
    proto = lean_model(ir.Model(body, ir_version=model.ir_version), keep_declared=True)
    del proto.opset_import[:]
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version or 1)
    entering = _entering(node, known)
    for info, type_ in zip(proto.graph.input, entering, strict=False):
        _declare(info, type_)
    own = {value.name for value in values(body)}
    read = chain(body.outputs, *map(reads, body))
    captured = {value.name for value in read}
    for name in sorted(name for name in captured - own if name and name in known):
        _declare(proto.graph.input.add(name=name), known[name])
    inferred = value_types(infer_model(proto).graph)
    # A declared type stays where inference finds no shape: it may be of a domain that inference does not know.
    found = {value.name: declared_type(value) for value in values(body) if value.name}
    return found | {name: inferred[name] for name in found if _tells(inferred.get(name))}


def _tells(type_: ValueType | None) -> bool:
    return type_ is not None and type_.shape is not None


def _entering(node: ir.Node, known: Types) -> list[ValueType]:
    """Return the types of a body's inputs, as far as its node determines them."""
    o = Operands(node, known)
    given = [type_of(v, known) if v is not None else UNKNOWN for v in node.inputs]
    if node.op_type == "Loop":
        return [
            ValueType("tensor", ir.DataType.INT64, ()),
            ValueType("tensor", ir.DataType.BOOL, ()),
            *given[2:],
        ]
    # Scan of opset 8 has a batch axis and, often left out, a first operand of sequence lengths.
    if node.op_type == "Scan" and None not in node.inputs:
        count = o.attribute("num_scan_inputs", 0)
        axes = o.attribute("scan_input_axes", ()) or (0,) * count
        states = len(given) - count
        return given[:states] + [_slice(t, axis) for t, axis in zip(given[states:], axes, strict=False)]
    if node.op_type == "FlexAttention" and given:
        # Its body gets the scores of one call: query by key, before the softmax.
        return [given[0]._replace(shape=(*o.shape(0)[:3], *o.shape(1)[2:3]))]
    return []


def _slice(value: ValueType, axis: int) -> ValueType:
    """Return the type of one step of a scanned value."""
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return UNKNOWN
    shape = list(value.shape)
    del shape[axis]
    return value._replace(shape=tuple(shape))


def _declare(info: onnx.ValueInfoProto, type_: ValueType) -> None:
    if type_.kind == "tensor" and type_.dtype is not None:
        info.type.CopyFrom(onnx.helper.make_tensor_type_proto(type_.dtype.value, type_.shape))
