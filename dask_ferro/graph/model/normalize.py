"""One form for all models: the main graph as everything above wants it, on ONNX's own messages.

    functions written out; Constant nodes become initializers; initializers are no inputs; nodes sorted,
    named, needed

Works on a checked model (`model.checks.problems`) and changes it in place.  Bodies (If, Loop, Scan) stay whole in their
nodes; they are sorted, and a name that a body takes for itself though a graph around it has it is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.order import bodies, captured, order
from dask_ferro.graph.model.checks.problems import unused
from dask_ferro.graph.model.functions import all_nodes, domain_of, inlined

# For graphs that use none of ONNX's own operators.
_ANY_OPSET = 17


def normalize(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` in the one form; its own messages are reused."""
    proto = inlined(proto)
    for field in ("training_info", "functions"):
        proto.ClearField(field)
    proto.graph.ClearField("quantization_annotation")
    proto.ir_version = max(proto.ir_version, 4)  # before 4, initializers had to be inputs
    _one_name_per_domain(proto)
    graph = proto.graph
    _drop_initialized_inputs(graph)
    _plain_sparse(graph)
    _lift_constants(graph)
    _sort(graph)
    _drop_unused(graph)
    _name_nodes(graph)
    _rename_shadows(graph)
    return proto


def _one_name_per_domain(proto: onnx.ModelProto) -> None:
    for node in all_nodes(proto.graph.node):
        if node.domain == "ai.onnx":
            node.domain = ""
    versions = {domain_of(entry.domain): entry.version for entry in proto.opset_import}
    del proto.opset_import[:]
    versions.setdefault("", _ANY_OPSET)
    for domain, version in versions.items():
        proto.opset_import.add(domain=domain, version=version)


def _drop_initialized_inputs(graph: onnx.GraphProto) -> None:
    stored = {tensor.name for tensor in graph.initializer}
    stored.update(sparse.values.name for sparse in graph.sparse_initializer)
    kept = [info for info in graph.input if info.name not in stored]
    if len(kept) < len(graph.input):
        _replace(graph.input, kept)


def _plain_sparse(graph: onnx.GraphProto) -> None:
    """Sparse tensors, which onnx_ir does not hold, become a ScatterND into zeros, so nothing is dense yet."""
    sparse = {held.values.name: held for held in graph.sparse_initializer}
    kept = []
    for node in graph.node:
        held = next((a.sparse_tensor for a in node.attribute if a.HasField("sparse_tensor")), None)
        if held is not None and node.op_type == "Constant":
            sparse[node.output[0]] = held
        else:
            kept.append(node)
    if sparse:
        taken = {name for node in graph.node for name in node.output} | {t.name for t in graph.initializer}
        taken |= {info.name for info in graph.input} | sparse.keys()
        scattered = [node for name, held in sparse.items() for node in _scattered(name, held, graph, taken)]
        _replace(graph.node, [*scattered, *kept])
        graph.ClearField("sparse_initializer")
    for node in graph.node:
        for body in bodies(node):
            _plain_sparse(body)


def _scattered(
    name: str, sparse: onnx.SparseTensorProto, graph: onnx.GraphProto, taken: set[str]
) -> list[onnx.NodeProto]:
    """Nodes that compute `sparse` as `name`; its parts become initializers of `graph`."""
    parts = []
    for part in ("shape", "indices", "values", "zeros"):
        parts.append(_fresh(f"{name}:{part}", taken))
        taken.add(parts[-1])
    shape, indices, values, zeros = parts
    positions = onnx.numpy_helper.to_array(sparse.indices)
    if positions.ndim == 1:
        positions = np.stack(np.unravel_index(positions, list(sparse.dims)), axis=-1).astype(np.int64)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(sparse.dims, np.int64), shape))
    graph.initializer.append(onnx.numpy_helper.from_array(positions, indices))
    graph.initializer.add().CopyFrom(sparse.values)
    graph.initializer[-1].name = values
    zero = onnx.numpy_helper.to_array(sparse.values)[:1]
    zero = onnx.numpy_helper.from_array(np.zeros_like(zero) if len(zero) else np.zeros(1, zero.dtype))
    return [
        onnx.helper.make_node("ConstantOfShape", [shape], [zeros], name=zeros, value=zero),
        onnx.helper.make_node("ScatterND", [zeros, indices, values], [name], name=f"{name}:dense"),
    ]


def _lift_constants(graph: onnx.GraphProto) -> None:
    """Constant nodes of numbers become initializers, unless the graph gives them as outputs."""
    outputs = {info.name for info in graph.output}
    kept = []
    lifted = False
    for node in graph.node:
        tensor = constant(node)
        if tensor is None or node.output[0] in outputs:
            kept.append(node)
            continue
        lifted = True
        tensor.name = node.output[0]
        graph.initializer.append(tensor)
    if lifted:
        _replace(graph.node, kept)


def constant(node: onnx.NodeProto) -> TensorProto | None:
    """The tensor that a Constant node holds; None for other nodes and for strings and sparse tensors."""
    if node.op_type != "Constant" or node.domain not in STANDARD_DOMAINS or len(node.attribute) != 1:
        return None
    held = node.attribute[0]
    if held.name == "value" and held.type == AttributeProto.TENSOR:
        return held.t if held.t.data_type != TensorProto.STRING else None
    if held.name == "value_int":
        return TensorProto(data_type=TensorProto.INT64, int64_data=[held.i])
    if held.name == "value_ints":
        return TensorProto(data_type=TensorProto.INT64, dims=[len(held.ints)], int64_data=held.ints)
    if held.name == "value_float":
        return TensorProto(data_type=TensorProto.FLOAT, float_data=[held.f])
    if held.name == "value_floats":
        return TensorProto(data_type=TensorProto.FLOAT, dims=[len(held.floats)], float_data=held.floats)
    return None


def _sort(graph: onnx.GraphProto) -> None:
    sequence, _ = order(graph.node)
    if sequence != list(range(len(graph.node))):
        _replace(graph.node, [graph.node[i] for i in sequence])
    for node in graph.node:
        for body in bodies(node):
            _sort(body)


def _drop_unused(graph: onnx.GraphProto) -> None:
    dead = unused(graph)
    if dead:
        _replace(graph.node, [node for i, node in enumerate(graph.node) if i not in dead])
    used = {info.name for info in graph.output}
    for node in graph.node:
        used.update(node.input)
        used |= captured(node)
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    if len(kept) < len(graph.initializer):
        _replace(graph.initializer, kept)


def _replace(field: Any, kept: Sequence[Any]) -> None:
    """Put `kept`, messages of the repeated `field` itself, in its place."""
    copies = [type(message)() for message in kept]
    for copy, message in zip(copies, kept, strict=True):
        copy.CopyFrom(message)
    del field[:]
    field.extend(copies)


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Every node of the main graph gets a name of its own, from its operator and its first output."""
    taken = {node.name for node in graph.node}
    seen: set[str] = set()
    for node in graph.node:
        if not node.name or node.name in seen:
            output = next(filter(None, node.output))
            node.name = _fresh(node.name or f"{node.op_type}:{output}", taken)
            taken.add(node.name)
        seen.add(node.name)


def _fresh(name: str, taken: set[str]) -> str:
    candidate, i = name, 1
    while candidate in taken:
        i += 1
        candidate = f"{name}_{i}"
    return candidate


def _rename_shadows(graph: onnx.GraphProto) -> None:
    with_bodies = [node for node in graph.node if bodies(node)]
    if not with_bodies:
        return
    taken = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    taken.update(name for node in graph.node for name in node.output)
    for node in with_bodies:
        for body in bodies(node):
            _rename_body(body, taken, {})


def _rename_body(body: onnx.GraphProto, taken: set[str], outer: dict[str, str]) -> None:
    """Give new names to what `body` defines under a name in `taken`; `outer` maps names changed around it."""
    defined = [info.name for info in body.input] + [tensor.name for tensor in body.initializer]
    defined += [sparse.values.name for sparse in body.sparse_initializer]
    defined += [name for node in body.node for name in node.output if name]
    here = taken.union(defined)
    names = {name: new for name, new in outer.items() if name not in defined}
    for name in dict.fromkeys(defined):
        if name in taken:
            names[name] = _fresh(name, here)
            here.add(names[name])
    for message in [*body.input, *body.output, *body.value_info, *body.initializer]:
        message.name = names.get(message.name, message.name)
    for sparse in body.sparse_initializer:
        sparse.values.name = names.get(sparse.values.name, sparse.values.name)
    for node in body.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for inner in bodies(node):
            _rename_body(inner, here, names)
