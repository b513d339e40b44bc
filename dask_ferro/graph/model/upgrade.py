"""Upgrade of models of opset 1 to 6, whose operators do not broadcast as numpy does, to opset 7.

ONNX Runtime has kernels from opset 7 on.  Up to 5, ONNX's version converter brings the graph to 6; from 6 to
7 the changes are few and done here, since the converter writes wrong tensors where a broadcast says `axis`.
A graph that cannot be upgraded, for its bodies or a broadcast of unknown rank, stays as it is: reference
kernels know old forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import onnx
from onnx import version_converter

from dask_ferro.graph.ir import inference, strip_weights
from dask_ferro.graph.ir.order import bodies

_MODERN = 7
_OLD = 6

_BROADCASTING = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"})
# Attributes that opset 7 no longer has: it does what they asked for, or `_spread` has written it out.
_DROPPED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_BROADCASTING, ("broadcast", "axis")),
    "BatchNormalization": ("is_test",),
    "Dropout": ("is_test",),
    "Gemm": ("broadcast",),
    "GRU": ("output_sequence",),
    "LSTM": ("output_sequence",),
    "RNN": ("output_sequence",),
}


def is_old(proto: onnx.ModelProto) -> bool:
    """Return whether `proto` is older than `upgrade` leaves it."""
    return bool(_opset(proto).version < _MODERN)


def upgrade(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto`, an old and normalized model, at opset 7 if it can be upgraded, otherwise as it is."""
    if any(map(bodies, proto.graph.node)):
        return proto
    old = proto if _opset(proto).version == _OLD else _converted(proto)
    ranks = None if old is None else _ranks(old)
    if old is None or ranks is None:
        return proto
    nodes = list(chain.from_iterable(_modern(node, ranks) for node in old.graph.node))
    del old.graph.node[:]
    old.graph.node.extend(nodes)
    _opset(old).version = _MODERN
    return old


def _opset(proto: onnx.ModelProto) -> onnx.OperatorSetIdProto:
    found: onnx.OperatorSetIdProto = next(entry for entry in proto.opset_import if entry.domain == "")
    return found


def _converted(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return `proto` at opset 6, converted by ONNX without its weights; None if that fails."""
    try:
        converted = version_converter.convert_version(strip_weights.stripped(proto), _OLD)
    except Exception:  # noqa: BLE001 - its C++ raises whatever comes; then the model stays as it is
        return None
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    kept = [stored.get(tensor.name, tensor) for tensor in converted.graph.initializer]
    # The caller's inputs may not change; a result of which they did is not used.
    names = {info.name for info in converted.graph.input} - stored.keys()
    if names != {info.name for info in proto.graph.input}:
        return None
    result = onnx.ModelProto()
    result.CopyFrom(converted)
    del result.graph.initializer[:]
    result.graph.initializer.extend(kept)
    del result.graph.input[:]
    result.graph.input.extend(proto.graph.input)
    return result


def _ranks(proto: onnx.ModelProto) -> dict[str, int] | None:
    """Return the ranks that inference finds; None if a broadcast along an axis needs one that it does not find."""
    # Inference does not know operators that broadcast the old way; their result has the shape of their first input,
    # so they are Identity here.
    bare = strip_weights.stripped(proto)
    for node in bare.graph.node:
        if node.op_type in _BROADCASTING and node.domain == "":
            node.op_type = "Identity"
            del node.input[1:]
            node.ClearField("attribute")
    types = inference.types_of(inference.infer_model(bare).graph)
    found = {name: inference.from_type(type_).shape for name, type_ in types.items()}
    ranks = {name: len(shape) for name, shape in found.items() if shape is not None}
    needed = chain.from_iterable(node.input[:2] for node in filter(_aligns, proto.graph.node))
    return ranks if all(name in ranks for name in needed) else None


def _aligns(node: onnx.NodeProto) -> bool:
    """Return whether `node` aligns its second input by other dimensions than the last ones."""
    if node.domain:
        return False
    named = {attribute.name for attribute in node.attribute}
    return node.op_type == "PRelu" or (node.op_type in _BROADCASTING and "axis" in named)


def _modern(node: onnx.NodeProto, ranks: Mapping[str, int]) -> list[onnx.NodeProto]:
    before = _spread(node, ranks) if _aligns(node) else []
    dropped = _DROPPED.get(node.op_type, ()) if node.domain == "" else ()
    kept = [attribute for attribute in node.attribute if attribute.name not in dropped]
    if node.op_type == "Upsample" and node.domain == "":
        kept = [*_scales(kept)]
    modern = onnx.NodeProto()
    modern.CopyFrom(node)
    del modern.attribute[:]
    modern.attribute.extend(kept)
    if before:
        modern.input[1] = before[-1].output[0]
    return [*before, modern]


def _spread(node: onnx.NodeProto, ranks: Mapping[str, int]) -> list[onnx.NodeProto]:
    """Return nodes that add trailing dimensions of 1 to the second input of `node`, as numpy's rules need."""
    first, second = ranks[node.input[0]], ranks[node.input[1]]
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), first - second)
    # PRelu's slope of one dimension belongs to the channels, axis 1, before opset 7.
    if node.op_type == "PRelu":
        axis = 1 if first > 1 and second == 1 else first - second
    axis += first if axis < 0 else 0
    missing = first - axis - second
    if missing <= 0:
        return []
    name = f"{node.output[0]}:{node.input[1]}"
    axes = list(range(second, second + missing))
    return [onnx.helper.make_node("Unsqueeze", [node.input[1]], [name], name=name, axes=axes)]


def _scales(attributes: list[onnx.AttributeProto]) -> list[onnx.AttributeProto]:
    """Return the attributes with Upsample's `height_scale` and `width_scale` as the `scales` of opset 7."""
    by_name = {attribute.name: attribute for attribute in attributes}
    if "scales" in by_name or not {"height_scale", "width_scale"} <= by_name.keys():
        return attributes
    scales = [1.0, 1.0, by_name.pop("height_scale").f, by_name.pop("width_scale").f]
    return [*by_name.values(), onnx.helper.make_attribute("scales", scales)]
