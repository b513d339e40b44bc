"""Import of an `onnx_ir.Model` as tensors, for fine-tuning, a loss, or a larger graph.

    model --read--> Readable: one form of each operator, types --recorded--> tensors, as often as they are wanted

Nodes keep their names, attributes and regions, and weights are not copied.  ONNX's converter first raises a model older
than opset 18, so that all later passes see one form of each operator.  Only dimension names of the model's inputs are
kept; a name that inference made up becomes an unknown dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir
from onnx import version_converter

from dask_ferro.errors import ConfigError, UnsupportedOp
from dask_ferro.graph.ir import inference, regions, strip_weights
from dask_ferro.graph.ir.inference import Dim, ValueType
from dask_ferro.graph.ir.nodes import bodies, uses
from dask_ferro.graph.tensor.dims import written
from dask_ferro.graph.tensor.imported.mixed_precision import WIDE, narrowed
from dask_ferro.graph.tensor.tensor import OPSET, Node, Tensor, TensorSource, TensorType, argument, asarray

# Since opset 18 reductions take their axes as an input, the form that rules expect.
_OLDEST = 18

Types = Mapping[str, TensorType]


class Imported(NamedTuple):
    """A model as tensors, by the names of its values."""

    inputs: dict[str, Tensor]
    weights: dict[str, Tensor]
    outputs: dict[str, Tensor]


class Readable(NamedTuple):
    """A model whose operators have the form of opset 18 or later, with the types of its values.

    Attributes
    ----------
    given : onnx_ir.Model
        The model before ONNX's converter, which drops regions.
    model : onnx_ir.Model
    types : mapping of str to ValueType
    """

    given: ir.Model
    model: ir.Model
    types: Mapping[str, ValueType]

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs that have no default value."""
        graph = self.model.graph
        return [str(v.name) for v in graph.inputs if v.name not in graph.initializers]


def from_model(model: ir.Model, inputs: Mapping[str, Tensor] | None = None) -> Imported:
    """Return the model's inputs, weights and outputs as tensors.

    Parameters
    ----------
    model : onnx_ir.Model
        As returned by `graph.model.load`: sorted, every node named. Not changed.
    inputs : mapping of str to Tensor, optional
        Tensors in place of the model's inputs, by name; all other inputs become arguments.

    Raises
    ------
    ConfigError
        An input that the model does not have, or a tensor of another dtype or shape.
    UnsupportedOp
        A value that is not a tensor of known rank, control flow, or an opset that ONNX's converter cannot raise.
    """
    return recorded(read(model), inputs)


def read(model: ir.Model) -> Readable:
    """Return a model in the form that `recorded` takes; parameters and errors are those of `from_model`."""
    raised = _raised(model)
    return Readable(model, raised, inference.infer(raised))


def weight(readable: Readable, name: str) -> Tensor:
    """Return an initializer as a constant, whose data are not copied."""
    found = _type(readable.types[name], {})
    if found is None:
        raise UnsupportedOp("cannot read the model as tensors", [f"weight {name!r} is no tensor"])
    return Tensor(TensorSource(found, name, readable.model.graph.initializers[name].const_value), 0, found)


def recorded(
    readable: Readable,
    inputs: Mapping[str, Tensor] | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    outputs: Sequence[str] | None = None,
    half: ir.DataType | None = None,
) -> Imported:
    """Return a model's inputs, weights and outputs as tensors.

    Parameters
    ----------
    inputs : mapping of str to Tensor, optional
        Tensors in place of the model's inputs, by name; all other inputs become arguments.
    weights : mapping of str to Tensor, optional
        Tensors of the same types in place of the model's initializers, by name; all others become constants.
    outputs : sequence of str, optional
        The values to compute; nodes, inputs and weights that only others need are left out. By default the model's
        outputs, with all of its inputs.
    half : onnx_ir.DataType, optional
        The half precision that some tensors have in place of a wider dtype; the nodes then compute in mixed precision.

    Raises
    ------
    ConfigError, UnsupportedOp
        As `from_model`.
    """
    graph, given = readable.model.graph, dict(inputs or {})
    ends = [str(v.name) for v in graph.outputs] if outputs is None else list(outputs)
    nodes, needed = needed_by(graph, ends)
    entries = [name for name in readable.inputs if outputs is None or name in needed]
    names = _names(entries, readable.types, given, half)
    reached = {*needed, *entries}
    typed = {name: _type(type_, names) for name, type_ in readable.types.items() if name in reached}
    types = {name: type_ for name, type_ in typed.items() if type_ is not None}
    _refuse(nodes, entries, [name for name in readable.types if name in reached], types)
    arguments = {
        name: given[name] if name in given else argument(name, types[name].shape, types[name].dtype)
        for name in entries
    }
    known_weights = weights or {}
    constants = {
        name: known_weights[name] if name in known_weights else weight(readable, name)
        for name in graph.initializers
        if name in needed
    }
    known = arguments | constants
    # The converter drops regions, so they are taken from the model as given.
    # It drops names of nodes too, where it adapts them: those are known by what they compute.
    stored = {node.name: node for node in readable.given.graph}
    makers = {node.outputs[0].name: node for node in readable.given.graph if node.outputs}
    for node in nodes:
        # Constants that the converter adds become sources.
        if node.op_type == "Constant" and "value" in node.attributes:
            known[str(node.outputs[0].name)] = asarray(node.attributes["value"].as_tensor())
            continue
        own = stored.get(node.name) if node.name else makers.get(node.outputs[0].name)
        known.update(_outputs(node, own, known, types, readable.model.opset_imports, half))
    return Imported(arguments, constants, {name: known[name] for name in ends})


def needed_by(graph: ir.Graph, ends: Sequence[str]) -> tuple[list[ir.Node], set[str]]:
    """Return the nodes of a sorted graph that some values need, in order, and the names of all values around them."""
    kept, needed = [], set(ends)
    for node in reversed(graph):
        if any(value.name in needed for value in node.outputs if value.name):
            kept.append(node)
            needed.update(uses(node))
            needed.update(str(value.name) for value in node.outputs)
    return kept[::-1], needed - {""}


def _raised(model: ir.Model) -> ir.Model:
    """Return the model at opset 18 or later."""
    version = model.opset_imports.get("", OPSET)
    if version >= _OLDEST:
        return model
    try:
        proto = version_converter.convert_version(strip_weights.lean_model(model, keep_declared=True), OPSET)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        problem = f"ONNX's converter cannot raise it from opset {version} to {OPSET}: {reason}"
        raise UnsupportedOp("cannot read the model as tensors", [problem]) from error
    raised: ir.Model = ir.serde.deserialize_model(proto)
    # The converter got a model without weights: the real ones stay mapped and are never copied.
    for name, value in raised.graph.initializers.items():
        stored = model.graph.initializers.get(name)
        if stored is not None:
            value.const_value = stored.const_value
    return raised


# Names of dimensions


def _names(
    entries: list[str],
    types: Mapping[str, ValueType],
    given: Mapping[str, Tensor],
    half: ir.DataType | None,
) -> dict[str, Dim]:
    """Return the dimension for each dimension name of the model's inputs."""
    unknown = sorted(set(given) - set(entries))
    if unknown:
        raise ConfigError(f"from_model: the model has no input {unknown[0]!r}; its inputs are {entries}")
    names: dict[str, Dim] = {}
    # Tensors given by the caller take precedence in the meaning of a name.
    for name in sorted(entries, key=lambda name: name not in given):
        declared = types[name].shape or ()
        if name in given:
            _check_given(name, types[name], given[name], half)
        meant = given[name].shape if name in given and types[name].shape is not None else declared
        for dim, new in zip(declared, meant, strict=True):
            if isinstance(dim, str) and names.setdefault(dim, new) != new and name in given:
                raise ConfigError(
                    f"from_model: dimension {dim!r} is {names[dim]!r} and, by input {name!r}, {new!r}"
                )
    return names


def _check_given(name: str, type_: ValueType, tensor: Tensor, half: ir.DataType | None) -> None:
    declared = type_.shape
    fits = declared is None or (
        len(declared) == tensor.ndim
        and all(not isinstance(d, int) or t in (d, None) for d, t in zip(declared, tensor.shape, strict=True))
    )
    dtypes = {type_.dtype, half} if type_.dtype in WIDE else {type_.dtype}
    if tensor.type.dtype not in dtypes or not fits:
        dtype = type_.dtype.numpy().name if type_.dtype is not None else "unknown"
        shape = "(...)" if declared is None else written(declared)
        raise ConfigError(f"from_model: input {name!r} is {dtype}{shape}, got {tensor!r}")


def _type(type_: ValueType, names: Mapping[str, Dim]) -> TensorType | None:
    """Return the type of a tensor of known rank; None for any other value."""
    if type_.kind != "tensor" or type_.dtype is None or type_.shape is None:
        return None
    return TensorType(type_.dtype, tuple(names.get(d) if isinstance(d, str) else d for d in type_.shape))


def _refuse(nodes: Sequence[ir.Node], entries: Sequence[str], names: Sequence[str], types: Types) -> None:
    """Raise `UnsupportedOp` for values that tensors cannot hold, with every node and value."""
    unknown = [name for name in entries if name not in types]
    problems = [
        f"input {name!r} has no known dtype and rank; export the model with a shape for it, whose open axes have names"
        for name in unknown
    ]
    problems += [
        f"node {node.name!r} ({node.op_type}) has a body; cut the model before it"
        for node in nodes
        if bodies(node)
    ]
    # What depends on an input of unknown shape is unknown too, and says nothing more.
    problems += [
        f"{name!r} is not a tensor of known dtype and rank; declare it, or cut the model before it"
        for name in names
        if not unknown and name not in types
    ]
    if problems:
        raise UnsupportedOp("cannot read the model as tensors", problems)


# Tensors


def _outputs(
    node: ir.Node,
    stored: ir.Node | None,
    known: Mapping[str, Tensor],
    types: Types,
    opsets: Mapping[str, int],
    half: ir.DataType | None,
) -> dict[str, Tensor]:
    """Return the tensors of a node, by name; `stored` is the node as it was before the conversion."""
    around, own = regions.current(), regions.Region() if stored is None else regions.region_of(stored)
    path = "/".join(part for part in (around.path, own.path) if part)
    domain = "" if node.domain == "ai.onnx" else node.domain
    opset, region = opsets.get(domain, 1), regions.Region(path, own.phase or around.phase)
    inputs = tuple(None if v is None or not v.name else known[v.name] for v in node.inputs)
    results = tuple(types[v.name] if v.name else None for v in node.outputs)
    if half is not None:
        wanted = [None if v is None else types.get(str(v.name)) for v in node.inputs]
        with regions.written_in(region):
            inputs, results = narrowed((domain, node.op_type, opset), inputs, wanted, results, half)
    made = Node(
        node.op_type,
        inputs,
        results,
        dict(node.attributes),
        domain=domain,
        opset=opset,
        name=node.name or (None if stored is None else stored.name),
        region=region,
    )
    typed = zip(node.outputs, made.types, strict=True)
    return {str(v.name): Tensor(made, i, t) for i, (v, t) in enumerate(typed) if t is not None}
