"""Import an `onnx_ir.Model` as tensors, for fine-tuning, a loss, or a larger graph.

    model --read--> Readable: one form of each operator, types --record--> tensors, as often as requested

Nodes keep their names, attributes and regions, and weights are not copied.  ONNX's converter first raises a model older
than opset 18, so that all later passes see one form of each operator.  Only dimension names of the model's inputs are
kept; a name that inference made up becomes an unknown dimension.

Nodes and constants of a model are written for its own dtype.  If some tensors are half precision instead, matrix
products and convolutions, which engines add up in float32, are computed in it, and all other nodes in the model's
dtype: variances, masks of -3e38 and an epsilon of 1e-12 do not fit half precision.  Source: Micikevicius et al.,
"Mixed precision training" (2018), section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir
from onnx import version_converter

from dask_ferro.errors import InputError, UnsupportedOpError
from dask_ferro.graph.ir import inference, regions
from dask_ferro.graph.ir.dtypes import ARITHMETIC_FLOATS, HALVES, takes
from dask_ferro.graph.ir.inference import Dim, ValueType
from dask_ferro.graph.ir.messages import lean_model
from dask_ferro.graph.ir.nodes import bodies, uses
from dask_ferro.graph.tensor.dims import format_shape, same_shape
from dask_ferro.graph.tensor.tensor import (
    OPSET,
    Node,
    Tensor,
    TensorSource,
    TensorType,
    asarray,
    cast,
    input,
)  # fmt: skip

# Since opset 18 reductions take their axes as an input, the form that rules expect.
_OLDEST = 18
# The dtypes for which a model may be written that computes in half precision.
WIDE = ARITHMETIC_FLOATS - HALVES
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})


class ModelTensors(NamedTuple):
    """A model as tensors, by the names of its values."""

    inputs: dict[str, Tensor]
    weights: dict[str, Tensor]
    outputs: dict[str, Tensor]


class Readable(NamedTuple):
    """A model whose operators have the form of opset 18 or later, with the types of its values."""

    model: ir.Model
    types: Mapping[str, ValueType]

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs that have no default value."""
        graph = self.model.graph
        return [str(v.name) for v in graph.inputs if v.name not in graph.initializers]


def from_model(model: ir.Model, inputs: Mapping[str, Tensor] | None = None) -> ModelTensors:
    """Return a loaded model's inputs, weights and outputs as tensors; `inputs` are tensors instead of its own inputs.

    Raises `InputError` if the model does not have an input, or a tensor has another dtype or shape, and
    `UnsupportedOpError` if a value is not a tensor of known rank, there is control flow, or the opset cannot be
    raised.
    """
    return record(to_readable(model), inputs)


def to_readable(model: ir.Model) -> Readable:
    """Return a model in the form for `record`."""
    raised = _raise_opset(model)
    return Readable(raised, inference.infer(raised))


def constant(readable: Readable, name: str) -> Tensor:
    """Return an initializer as a constant, whose data are not copied."""
    type_ = _tensor_type(readable.types[name], {})
    if type_ is None:
        raise UnsupportedOpError("cannot read the model as tensors", [f"weight {name!r} is not a tensor"])
    return Tensor(TensorSource(type_, name, readable.model.graph.initializers[name].const_value), 0, type_)


def record(
    readable: Readable,
    inputs: Mapping[str, Tensor] | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    outputs: Sequence[str] | None = None,
) -> ModelTensors:
    """Return a model's inputs, weights and outputs as tensors.

    `inputs` and `weights` are tensors instead of the model's own; all others become arguments and constants.  The
    `outputs` are the values to compute; nodes that only other values need are left out.  Default: the model's
    outputs, with all of its inputs.
    """
    graph, replaced, own = readable.model.graph, inputs or {}, weights or {}
    ends = [str(v.name) for v in graph.outputs] if outputs is None else list(outputs)
    nodes, needed = find_needed(graph, ends)
    entries = [name for name in readable.inputs if outputs is None or name in needed]
    half = _half(readable.types, {**replaced, **own})
    names = _dimensions(entries, readable.types, replaced, half)
    typed = {
        name: _tensor_type(type_, names)
        for name, type_ in readable.types.items()
        if name in needed or name in entries
    }
    _refuse(nodes, entries, typed)
    types = {name: type_ for name, type_ in typed.items() if type_ is not None}
    arguments = {
        name: replaced[name] if name in replaced else input(name, types[name].shape, types[name].dtype)
        for name in entries
    }
    constants = {
        name: own[name] if name in own else constant(readable, name)
        for name in graph.initializers
        if name in needed
    }
    known = arguments | constants
    for node in nodes:
        # Constants that the converter adds become sources.
        if node.op_type == "Constant" and "value" in node.attributes:
            known[str(node.outputs[0].name)] = asarray(node.attributes["value"].as_tensor())
        else:
            known.update(_outputs(node, known, types, readable.model.opset_imports, half))
    return ModelTensors(arguments, constants, {name: known[name] for name in ends})


def find_needed(graph: ir.Graph, ends: Sequence[str]) -> tuple[list[ir.Node], set[str]]:
    """Return the nodes of a sorted graph that some values need, in order, and the names of all values around them."""
    nodes, needed = [], set(ends)
    for node in reversed(graph):
        if any(value.name in needed for value in node.outputs if value.name):
            nodes.append(node)
            needed.update(uses(node))
            needed.update(str(value.name) for value in node.outputs)
    return nodes[::-1], needed - {""}


def _raise_opset(model: ir.Model) -> ir.Model:
    version = model.opset_imports.get("", OPSET)
    if version >= _OLDEST:
        return model
    try:
        proto = version_converter.convert_version(lean_model(model, keep_declared=True), OPSET)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        problem = f"ONNX's converter cannot raise it from opset {version} to {OPSET}: {reason}"
        raise UnsupportedOpError("cannot read the model as tensors", [problem]) from error
    raised: ir.Model = ir.serde.deserialize_model(proto)
    # The converter got a model without weights: the real ones stay mapped and are never copied.
    for name, value in raised.graph.initializers.items():
        stored = model.graph.initializers.get(name)
        if stored is not None:
            value.const_value = stored.const_value
    # It drops regions too, and the names of nodes that it adapts: the values that they compute identify these.
    by_name = {node.name: node for node in model.graph}
    makers = {node.outputs[0].name: node for node in model.graph if node.outputs}
    for node in raised.graph:
        original = by_name.get(node.name) if node.name else makers.get(node.outputs[0].name)
        if original is not None:
            node.name = original.name
            node.metadata_props.update(original.metadata_props)
    return raised


def _dimensions(
    entries: list[str],
    types: Mapping[str, ValueType],
    tensors: Mapping[str, Tensor],
    half: ir.DataType | None,
) -> dict[str, Dim]:
    """Return the dimension for each dimension name of the model's inputs, which `tensors` replace."""
    unknown = sorted(set(tensors) - set(entries))
    if unknown:
        raise InputError(f"from_model: the model has no input {unknown[0]!r}; its inputs are {entries}")
    names: dict[str, Dim] = {}
    # Tensors from the caller take precedence in the meaning of a name.
    for name in sorted(entries, key=lambda name: name not in tensors):
        type_, tensor = types[name], tensors.get(name)
        declared = type_.shape or ()
        if tensor is not None:
            known = [dim if isinstance(dim, int) else None for dim in declared]
            fits = type_.shape is None or same_shape(known, tensor.shape)
            dtypes = {type_.dtype, half} if type_.dtype in WIDE else {type_.dtype}
            if tensor.type.dtype not in dtypes or not fits:
                dtype = type_.dtype.numpy().name if type_.dtype is not None else "unknown"
                shape = "(...)" if type_.shape is None else format_shape(declared)
                raise InputError(f"from_model: input {name!r} is {dtype}{shape}, got {tensor!r}")
        meant = tensor.shape if tensor is not None and type_.shape is not None else declared
        for dim, new in zip(declared, meant, strict=True):
            if isinstance(dim, str) and names.setdefault(dim, new) != new and name in tensors:
                raise InputError(
                    f"from_model: dimension {dim!r} is {names[dim]!r} and, by input {name!r}, {new!r}"
                )
    return names


def _tensor_type(type_: ValueType, names: Mapping[str, Dim]) -> TensorType | None:
    """Return the type of a tensor of known rank; None for any other value."""
    if type_.kind != "tensor" or type_.dtype is None or type_.shape is None:
        return None
    return TensorType(type_.dtype, tuple(names.get(d) if isinstance(d, str) else d for d in type_.shape))


def _refuse(nodes: Sequence[ir.Node], entries: Sequence[str], typed: Mapping[str, TensorType | None]) -> None:
    unknown = [name for name in entries if typed[name] is None]
    problems = [
        f"input {name!r} has no known dtype and rank; export the model with a shape for it, whose open axes"
        " have names"
        for name in unknown
    ]
    bodied = [node for node in nodes if bodies(node)]
    problems += [
        f"node {node.name!r} ({node.op_type}) has a body; cut the model before it" for node in bodied
    ]
    # A value that depends on an input of unknown shape is unknown too, and adds no information.
    problems += [
        f"{name!r} is not a tensor of known dtype and rank; declare it, or cut the model before it"
        for name, type_ in typed.items()
        if not unknown and type_ is None
    ]
    if problems:
        raise UnsupportedOpError("cannot read the model as tensors", problems)


def _outputs(
    node: ir.Node,
    known: Mapping[str, Tensor],
    types: Mapping[str, TensorType],
    opsets: Mapping[str, int],
    half: ir.DataType | None,
) -> dict[str, Tensor]:
    around, own = regions.current_region(), regions.region_of(node)
    path = "/".join(part for part in (around.path, own.path) if part)
    domain = "" if node.domain == "ai.onnx" else node.domain
    opset, region = opsets.get(domain, 1), regions.Region(path, own.phase or around.phase)
    inputs = tuple(None if v is None or not v.name else known[v.name] for v in node.inputs)
    results = tuple(types[v.name] if v.name else None for v in node.outputs)
    if half is not None:
        own_types = [None if v is None else types.get(str(v.name)) for v in node.inputs]
        dtypes = [t and t.dtype for t in own_types]
        narrow = [half if dtype in WIDE else dtype for dtype in dtypes]
        if node.op_type in _PRODUCTS and takes(domain, node.op_type, opset, narrow):
            dtypes = narrow
            results = tuple(t._replace(dtype=half) if t and t.dtype in WIDE else t for t in results)
        with regions.set_region(region):
            pairs = zip(inputs, dtypes, strict=True)
            inputs = tuple(cast(x, dtype) if x is not None and dtype is not None else x for x, dtype in pairs)
    attributes, name = dict(node.attributes), node.name or None
    recorded = Node(node.op_type, inputs, results, attributes, domain, opset, name, region)
    typed = zip(node.outputs, results, strict=True)
    return {str(v.name): Tensor(recorded, i, t) for i, (v, t) in enumerate(typed) if t is not None}


def _half(types: Mapping[str, ValueType], tensors: Mapping[str, Tensor]) -> ir.DataType | None:
    """Return the one half precision that tensors have instead of a wider dtype, if any."""
    pairs = [(x.type.dtype, types[name].dtype) for name, x in tensors.items() if name in types]
    halves = {dtype for dtype, own in pairs if dtype in HALVES and own in WIDE}
    if len(halves) > 1:
        names = " and ".join(sorted(dtype.numpy().name for dtype in halves))
        raise InputError(f"from_model: got {names}, wanted one of them; cast to one dtype")
    return halves.pop() if halves else None
