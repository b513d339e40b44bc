"""Upgrade models of opset 1 to 6, whose operators do not broadcast like numpy, to opset 7.

ONNX Runtime has kernels since opset 7.  Up to 5, ONNX's version converter brings the graph to 6; from 6 to 7 the
changes are few and made here, since the converter writes wrong tensors if a broadcast has an `axis`, and has no rule
for comparisons.  A graph that cannot be upgraded, because of its bodies or a broadcast of unknown rank, is unchanged:
reference kernels compute old forms.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx import version_converter

from dask_ferro.graph.ir.messages import lean_model
from dask_ferro.graph.ir.nodes import attribute_of, bodies
from dask_ferro.graph.ir.onnx_inference import infer_types

_OLD_OPSET, MODERN_OPSET = 6, 7
_BROADCASTING = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less"})
# Attributes that opset 7 no longer has: it does the same without them, or `_spread` has written it out.
_DROPPED_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_BROADCASTING, ("broadcast", "axis")),
    "BatchNormalization": ("is_test",),
    "Dropout": ("is_test",),
    "Gemm": ("broadcast",),
    "GRU": ("output_sequence",),
    "LSTM": ("output_sequence",),
    "RNN": ("output_sequence",),
}


def upgrade(model: ir.Model) -> None:
    """Bring a sorted model of an opset below `MODERN_OPSET` to that if it can be upgraded."""
    if any(map(bodies, model.graph)):
        return
    graph = model.graph if model.opset_imports[""] == _OLD_OPSET else _convert(model)
    ranks = None if graph is None else _ranks(ir.Model(graph, ir_version=model.ir_version))
    if graph is None or ranks is None:
        return
    for node in list(graph):
        _modernize(node, ranks)
    model.graph = graph
    graph.opset_imports[""] = MODERN_OPSET


def _convert(model: ir.Model) -> ir.Graph | None:
    """Return the graph at opset 6, converted by ONNX without its weights; None if that fails."""
    try:
        proto = version_converter.convert_version(lean_model(model, keep_declared=True), _OLD_OPSET)
        graph: ir.Graph = ir.serde.deserialize_model(proto).graph
    except Exception:  # noqa: BLE001 - its C++ raises several kinds; then the model is unchanged
        return None
    kept = [value for value in graph.inputs if value.name not in model.graph.initializers]
    # The caller's inputs may not change; a result of which they did is not used.
    if [value.name for value in kept] != [value.name for value in model.graph.inputs]:
        return None
    graph.inputs[:] = kept
    for name, value in graph.initializers.items():
        if name in model.graph.initializers:
            value.const_value = model.graph.initializers[name].const_value
    return graph


def _ranks(model: ir.Model) -> dict[str, int] | None:
    """Return the ranks that inference finds; None if a broadcast along an axis needs one that it does not find."""
    # Inference does not know operators that broadcast the old way; their result has the shape of their first input,
    # so they are Identity here.
    bare = lean_model(model, keep_declared=True)
    for node in bare.graph.node:
        if node.op_type in _BROADCASTING and node.domain == "":
            node.op_type = "Identity"
            del node.input[1:]
            node.ClearField("attribute")
    tensors = ((name, type_.tensor_type) for name, type_ in infer_types(bare).types.items())
    ranks = {name: len(tensor.shape.dim) for name, tensor in tensors if tensor.HasField("shape")}
    needed = [value.name for node in model.graph if _aligns(node) for value in node.inputs[:2] if value]
    return ranks if all(name in ranks for name in needed) else None


def _aligns(node: ir.Node) -> bool:
    """Return whether `node` aligns its second input by other dimensions than the last ones."""
    is_old = node.op_type in _BROADCASTING and "axis" in node.attributes
    return not node.domain and (node.op_type == "PRelu" or is_old)


def _modernize(node: ir.Node, ranks: Mapping[str, int]) -> None:
    if node.domain:
        return
    if _aligns(node):
        _spread(node, ranks)
    for name in _DROPPED_ATTRIBUTES.get(node.op_type, ()):
        node.attributes.pop(name, None)
    scales = [node.attributes.pop(name, None) for name in ("height_scale", "width_scale")]
    if node.op_type == "Upsample" and "scales" not in node.attributes and None not in scales:
        node.attributes["scales"] = ir.AttrFloat32s(
            "scales", [1.0, 1.0, *(s.as_float() for s in scales if s)]
        )


def _spread(node: ir.Node, ranks: Mapping[str, int]) -> None:
    """Add trailing dimensions of 1 to the second input of `node`, as numpy's rules need."""
    left, right = node.inputs[:2]
    assert left is not None
    assert right is not None
    first, second = ranks[left.name or ""], ranks[right.name or ""]
    axis = attribute_of(node, "axis", first - second)
    # PRelu's slope of one dimension belongs to the channels, axis 1, before opset 7.
    if node.op_type == "PRelu":
        axis = 1 if first > 1 and second == 1 else first - second
    axis += first if axis < 0 else 0
    missing = first - axis - second
    if missing > 0:
        axes = list(range(second, second + missing))
        added = ir.node("Unsqueeze", [right], {"axes": axes}, name=f"{node.outputs[0].name}:{right.name}")
        added.outputs[0].name = added.name
        assert node.graph is not None
        node.graph.insert_before(node, added)
        node.replace_input_with(1, added.outputs[0])
