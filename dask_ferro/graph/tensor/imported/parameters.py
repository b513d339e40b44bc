"""The parameters of a model: what its weights are called, which of them may be trained, and which patterns choose.

A weight of floating point numbers is a parameter, unless `_fixed` has a reason against it.  The full name of a scalar
or of a folded constant trains it all the same; a pattern does not reach it.

Names are those of the network, where PyTorch's exporters wrote others.  Both transpose the weight of a linear layer, or
merge a convolution with its BatchNormalization, before they write it, and name the result by a count:
`onnx::MatMul_123`, `val_94`.  The graph tells where it belongs:

    fc1.bias is added to the product   -> fc1.weight, and self_attn.in_proj_weight beside self_attn.in_proj_bias
    node /layer1/layer1.0/Conv         -> layer1.0.weight, layer1.0.bias       (TorchScript: scopes in node names)
    metadata pkg.torch.onnx.name_scopes -> the same                            (dynamo)
    conv.weight_bias beside conv.weight -> conv.bias                           (dynamo: a bias that it made)

No two weights get one name, and a name that the file has keeps its meaning.  Only names change: the values keep the
layout of the file, so the weight of a MatMul has the shape (in, out), where PyTorch's has (out, in).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import onnx
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import ARITHMETIC_FLOATS
from dask_ferro.graph.tensor.tensor import TensorType
from dask_ferro.words import few

# Inputs by operator that are no parameters, by the reason why.
_CONSTANT_INPUTS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "a statistic of BatchNormalization, a constant of the exported model": {"BatchNormalization": (3, 4)},
    "a setting of an operator": {
        "DequantizeLinear": (1,), "QuantizeLinear": (1,), "QLinearConv": (1, 4, 6), "QLinearMatMul": (1, 4, 6),
        "Resize": (1, 2), "Upsample": (1,),
    },
}  # fmt: skip
# Names that a message lists: a network has hundreds.
_SHOWN = 3
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


class Stored(NamedTuple):
    """A weight of a model's file; `name` is its name in the network, `initializer` that in the file.

    `fixed` is the reason why it is no parameter ("": it is one), and `is_trainable` is whether its full name trains it.
    """

    name: str
    initializer: str
    type: TensorType
    fixed: str
    is_trainable: bool


def stored_weights(
    graph: ir.Graph, types: Mapping[str, TensorType], *, has_named_scalars: bool = False
) -> dict[str, Stored]:
    """Return the weights of a graph by their names in the network, in the order of the file, which has these `types`.

    With `has_named_scalars`, scalars with names are parameters: PyTorch's exporters count constants that they make.
    """
    found = {}
    for initializer, name in known_names(graph, types).items():
        type_ = types[initializer]
        fixed, is_trainable = _fixed(graph.initializers[initializer], name, type_)
        if not fixed and not type_.shape and not has_named_scalars:
            fixed = "a scalar"
        found[name] = Stored(name, initializer, type_, fixed, is_trainable)
    return found


def _fixed(value: ir.Value, name: str, type_: TensorType) -> tuple[str, bool]:
    """Return why a weight is no parameter ("": it is one), and whether its full name trains it."""
    if type_.dtype not in ARITHMETIC_FLOATS:
        return f"{type_.dtype.numpy().name} has no gradient; train a model before it is quantized", False
    uses = value.uses()
    for reason, places in _CONSTANT_INPUTS.items():
        if uses and all(index in places.get(node.op_type, ()) for node, index in uses):
            return reason, False
    if is_counted(name) and not is_weight(value):
        return "a constant that the exporter folded", True
    return "", True


def chosen(
    weights: Mapping[str, Stored],
    train: str | Sequence[str] | None,
    freeze: str | Sequence[str],
    model: str,
) -> list[Stored]:
    """Return the weights to train in the order of the file, by names or `fnmatch` patterns; None trains all parameters.

    Raises
    ------
    ConfigError
        A pattern without a match, a weight that has no gradient, or nothing to train.
    """
    # What a pattern may reach: `*` is no wish to train statistics.
    usual = [name for name, weight in weights.items() if not weight.fixed]
    problems: list[str] = []
    picked = set(usual) if train is None else set[str]()
    for pattern in _patterns(train):
        found = [pattern] if pattern in weights else matching(pattern, usual)
        problems += _problems("train", pattern, found, weights)
        picked.update(found)
    for pattern in _patterns(freeze):
        found = [pattern] if pattern in weights else matching(pattern, weights)
        problems += [] if found else _problems("freeze", pattern, found, weights)
        picked.difference_update(found)
    if not picked and not problems:
        problems = [
            f"nothing is left to train of {_listed(usual)}; freeze less"
            if usual
            else "its file has no weight to train (values of Constant nodes are constants)"
        ]
    if problems:
        raise ConfigError(f"parameters of model {model!r}: {'; '.join(problems)}")
    return [weight for name, weight in weights.items() if name in picked]


def _patterns(given: str | Sequence[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches."""
    return [name for name in names if fnmatchcase(name, pattern)]


def _problems(argument: str, pattern: str, found: list[str], weights: Mapping[str, Stored]) -> list[str]:
    where = f"{argument}={pattern!r}"
    if found:
        untrained = [weights[name] for name in found if not weights[name].is_trainable]
        return [f"{where}: {weight.fixed}" for weight in untrained]
    others = [weights[name] for name in matching(pattern, weights)]
    if others:
        return [f"{where} matches only {others[0].name!r} ({others[0].fixed})"]
    return [f"{where} matches none of its {len(weights)} weights; {nearest(pattern, weights)}"]


def nearest(wanted: str, names: Iterable[str]) -> str:
    """Return the names most like one that does not exist, as the end of a message."""
    known = list(names)
    close = difflib.get_close_matches(wanted, known, _SHOWN, cutoff=0.5)
    return f"nearest: {', '.join(map(repr, close))}" if close else f"there are {_listed(known)}"


def _listed(names: Sequence[str]) -> str:
    return few(map(repr, names), most=_SHOWN) or "none"


# ---- names ---------------------------------------------------------------------------------------------------


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
    values = [v for node in (product, addition) for v in node.inputs if v is not None and v.is_initializer()]
    shapes = [v.shape for v in values if v.shape is not None and is_counted(str(v.name))]
    return len(shapes) == 2 and shapes[0] == shapes[1] and max(shapes[0].numpy(), default=1) > 1


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
