"""Names of a model's weights as the network has them, where PyTorch's exporters wrote others.

Both exporters transpose the weight of a linear layer, or merge a convolution with its BatchNormalization, before they
write it, and name the result by a count: `onnx::MatMul_123`, `val_94`.  The graph tells where it belongs:

    fc1.bias is added to the product   -> fc1.weight, and self_attn.in_proj_weight beside self_attn.in_proj_bias
    node /layer1/layer1.0/Conv         -> layer1.0.weight, layer1.0.bias       (TorchScript: scopes in node names)
    metadata pkg.torch.onnx.name_scopes -> the same                            (dynamo)
    conv.weight_bias beside conv.weight -> conv.bias                           (dynamo: a bias that it made)

No two weights get one name, and a name that the file has keeps its meaning.  Only names change: the values keep the
layout of the file, so the weight of a MatMul has the shape (in, out), where PyTorch's has (out, in).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx
import onnx_ir as ir

# What the exporters write for values that they made themselves.
_COUNTED = re.compile(r"(onnx::\w+?_\d+|val_\d+|.*_output_\d+|\d+)")
_QUOTED = re.compile(r"'([^']*)'")
_SCOPES = "pkg.torch.onnx.name_scopes"
# Inputs by position that are a layer's weight and bias.  Exporters change no weight of a normalization; those that
# have a count are ones and zeros, where a GroupNorm is written as an InstanceNormalization.
_ROLES = {
    "MatMul": {0: "weight", 1: "weight"},
    "PRelu": {1: "weight"},
    "Gemm": {0: "weight", 1: "weight", 2: "bias"},
    "Conv": {1: "weight", 2: "bias"},
    "ConvTranspose": {1: "weight", 2: "bias"},
}
_RECURRENT = ("LSTM", "GRU", "RNN")


def is_counted(name: str) -> bool:
    """Return whether an exporter made this name of a count, so that it tells nothing about the network."""
    return _COUNTED.fullmatch(name) is not None


def known_names(graph: ir.Graph, stored: Iterable[str]) -> dict[str, str]:
    """Return the network's name of each of the initializers `stored`; its own where the graph tells none."""
    found = {name: name for name in stored}
    # All names of the file stay taken, so that none gets another meaning.
    taken = set(found)
    for name in found:
        # In the order of the file, so that the first of two candidates for one name gets it in every process.
        candidate = _told(graph.initializers[name])
        if candidate is not None and candidate not in taken:
            taken.add(candidate)
            found[name] = candidate
    return found


def is_weight(value: ir.Value) -> bool:
    """Return whether a value is read as the weight or bias of a linear, convolutional or recurrent layer."""
    return any(_role(node, index) is not None for node, index in value.uses())


def _told(value: ir.Value) -> str | None:
    """Return the name that the graph tells for a weight; None where it tells nothing, or the file's name will do."""
    name = str(value.name)
    for node, index in value.uses():
        role = _role(node, index)
        if role is None:
            continue
        weight = node.inputs[1] if index == 2 else None
        if weight is not None and name == f"{weight.name}_bias" and str(weight.name).endswith(".weight"):
            return f"{str(weight.name).removesuffix('weight')}bias"
        if is_counted(name):
            beside = _bias_beside(node) if role == "weight" else None
            module = _module(node)
            return beside or (f"{module}.{role}" if module else None)
    return None


def _role(node: ir.Node, index: int) -> str | None:
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in _RECURRENT:
        # ONNX stacks gates in another order than PyTorch: its own name says so, and the node's tells layers apart.
        formal = onnx.defs.get_schema(node.op_type).inputs
        leaf = str(node.name).rpartition("/")[2]
        return f"{leaf}.{formal[index].name}" if 1 <= index <= 3 else None
    if node.op_type in ("Mul", "Add"):
        return _affine_role(node, index)
    return _ROLES.get(node.op_type, {}).get(index)


def _affine_role(node: ir.Node, index: int) -> str | None:
    """Return the role in x * weight + bias, a normalization's last step where the operator has no weight itself."""
    if node.op_type == "Mul":
        after = [use.node for use in node.outputs[0].uses() if use.node.op_type == "Add"]
        return "weight" if any(_is_affine(node, after_node) for after_node in after) else None
    before = node.inputs[1 - index]
    product = None if before is None else before.producer()
    return "bias" if product is not None and product.op_type == "Mul" and _is_affine(product, node) else None


def _is_affine(product: ir.Node, addition: ir.Node) -> bool:
    """Return whether both nodes have a vector that the exporter made, of one shape and of more than one number."""
    shapes = []
    for node in (product, addition):
        shapes += [
            v.shape for v in node.inputs if v is not None and v.is_initializer() and is_counted(str(v.name))
        ]
    return (
        len(shapes) == 2
        and shapes[0] is not None
        and shapes[0] == shapes[1]
        and max(shapes[0].numpy(), default=1) > 1
    )


def _bias_beside(node: ir.Node) -> str | None:
    """Return the weight's name by that of the bias, which the node or the next one adds to the product."""
    added = list(node.inputs[2:3])
    # Of several additions (a residual, too) the first to an initializer is that of the bias.
    for after, index in node.outputs[0].uses() if node.op_type == "MatMul" else ():
        added += [after.inputs[1 - index]] if after.op_type == "Add" else []
    for value in added:
        name = str(value.name) if value is not None and value.is_initializer() else ""
        if name.endswith("bias") and not is_counted(name):
            return f"{name.removesuffix('bias')}weight"
    return None


def _module(node: ir.Node) -> str | None:
    """Return the module that a node was exported from, by its scopes; None where it has none."""
    scopes = _QUOTED.findall(node.metadata_props.get(_SCOPES, ""))
    if len(scopes) > 1:
        # From the network, named "", to the operator.
        return scopes[-2] or None
    path, last = "", ""
    for scope in str(node.name).split("/")[1:-1] if str(node.name).startswith("/") else ():
        # A scope has a child's name from its last word on: the first of the Sequential `layer1` is `layer1.0`.
        inside = last and scope.startswith(f"{last}.")
        path = path.removesuffix(last) + scope if inside else f"{path}.{scope}".lstrip(".")
        last = scope
    return path or None
