"""Export tensors as an `onnx_ir.Model`.

    tensors -> the nodes they need, sorted -> equal ones merged -> values with names -> Model

Users' names are kept; all other names consist of region, op and a count, so the same calls give the same model. Equal
nodes of one region are merged (autodiff writes some terms twice); nodes of different regions are not, since they may
run on different workers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.ir import regions
from dask_ferro.graph.model.embedding import CHECKED_KEY, write
from dask_ferro.graph.tensor.tensor import OPSET, Node, Tensor, TensorSource, TensorType

Outputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


# Equal constants up to this size are merged; larger ones are not read.
_KEY_BYTES = 1024
_EARLIEST_IR = 10


class BuiltModel(NamedTuple):
    """A model with the data of its arguments, by name."""

    model: ir.Model
    bound: dict[str, Any]


def build(
    outputs: Outputs,
    inputs: Sequence[Tensor] = (),
    *,
    name: str = "tensors",
    names: Mapping[str, Tensor] | None = None,
) -> BuiltModel:
    """Return the model that computes `outputs`, with the data of its inputs.

    A mapping names the model's outputs; otherwise they are y, or y_0, y_1 and so on.  Arguments or constants of
    `inputs` become the first inputs of the model, in this order: a constant among them is an input bound to its value
    (a parameter in training); other constants are weights.  All other arguments that the outputs depend on follow.
    `names` are names of computed values that are not outputs; a tensor has its first name.
    """
    ends = _by_name(outputs)
    order = _origins(ends.values())
    arguments = _arguments(inputs, order)
    if both := sorted({source.name for source in arguments if source.name is not None} & ends.keys()):
        raise InputError(f"build: {both[0]!r} names an input and an output; rename the output")
    # The names that the caller relies on are reserved before all others.
    writer = _Writer(arguments, {**ends, **(names or {})})
    opsets = {"": OPSET}
    for origin in order:
        writer.write(origin)
        if isinstance(origin, Node):
            opsets[origin.domain] = max(origin.opset, opsets.get(origin.domain, 1))
    entries = [writer.values[source.number, 0] for source in arguments]
    results = [writer.end(label, tensor) for label, tensor in ends.items()]
    graph = ir.Graph(
        entries, results, nodes=writer.nodes, initializers=writer.weights, opset_imports=opsets, name=name
    )
    imports = [onnx.helper.make_opsetid("", opsets[""])]
    ir_version = max(_EARLIEST_IR, int(onnx.helper.find_min_ir_version_for(imports)))
    model = ir.Model(graph, ir_version=ir_version, producer_name="dask_ferro")
    model.meta[CHECKED_KEY] = True
    data = {
        str(value.name): source.data if source.tensor is None else source.tensor.numpy()
        for value, source in zip(entries, arguments, strict=True)
    }
    return BuiltModel(model, {label: values for label, values in data.items() if values is not None})


def to_model(outputs: Outputs, inputs: Sequence[Tensor] = (), *, name: str = "tensors") -> ir.Model:
    """Return the model that computes `outputs`.

    Parameters
    ----------
    outputs : Tensor, or sequence or mapping of Tensor
        A mapping names the model's outputs; otherwise they are y, or y_0, y_1 and so on.
    inputs : sequence of Tensor, optional
        Arguments or constants that become the first inputs of the model, in this order; all other arguments that the
        outputs depend on follow, and all other constants are weights.
    name : str, optional
        The name of the graph.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> x = ft.input("x", ("N", 4))
    >>> [node.op_type for node in ft.to_model({"y": ft.tanh(x * 2)}).graph]
    ['Mul', 'Tanh']
    """
    return build(outputs, inputs, name=name).model


def save_onnx(outputs: Any, path: str | os.PathLike[str], *, inputs: Sequence[Tensor] = ()) -> None:
    """Write a file that computes `outputs` in any ONNX engine.

    Weights of a gigabyte or more are written to a separate file, `path` + ".data". Weights of an imported model are
    written too: its own file is not needed any more, and may be overwritten.

    Parameters
    ----------
    outputs : Tensor, sequence or mapping of Tensor, or an object with a model
        Tensors as in `to_model`, with `inputs`.  A model is written unchanged, and a graph with its plan
        (`ff.apply_plan`) together with the plan, which `ff.apply_plan` reads.
    path : path
    inputs : sequence of Tensor, optional

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> x = ft.input("x", ("N", 4))
    >>> ft.save_onnx({"y": ft.tanh(x)}, "tanh.onnx")  # doctest: +SKIP
    """
    model = outputs if isinstance(outputs, ir.Model) else getattr(outputs, "model", None)
    if not isinstance(model, ir.Model):
        model = to_model(outputs, inputs)
    elif inputs:
        raise InputError("save_onnx: a model already has its inputs; pass `inputs` only with tensors")
    write(model, os.fspath(path), "save_onnx")


def _by_name(outputs: Outputs) -> dict[str, Tensor]:
    if isinstance(outputs, Tensor):
        tensors = {"y": outputs}
    elif isinstance(outputs, Mapping):
        tensors = dict(outputs)
    else:
        tensors = {f"y_{i}": tensor for i, tensor in enumerate(outputs)}
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise InputError(f"build: outputs are tensors, at least one, got {outputs!r}")
    return tensors


def reachable_nodes(tensors: Iterable[Tensor]) -> list[Node]:
    """Return the nodes that `tensors` depend on, in a topological order."""
    return [origin for origin in _origins(tensors) if isinstance(origin, Node)]


def _origins(tensors: Iterable[Tensor]) -> list[Node | TensorSource]:
    waiting = [tensor.origin for tensor in tensors]
    seen: dict[int, Node | TensorSource] = {}
    while waiting:
        origin = waiting.pop()
        if origin.number not in seen:
            seen[origin.number] = origin
            if isinstance(origin, Node):
                waiting.extend(x.origin for x in origin.inputs if x is not None)
    # Numbers grow with creation, so their order is topological and the same from run to run.
    return [seen[number] for number in sorted(seen)]


def _arguments(inputs: Sequence[Tensor], order: Iterable[Node | TensorSource]) -> list[TensorSource]:
    """Return the sources that are inputs of the model, `inputs` first."""
    sources: dict[int, TensorSource] = {}
    for tensor in inputs:
        if isinstance(tensor.origin, Node):
            raise InputError(
                f"build: {tensor!r} is computed and cannot be an input; give arguments or constants"
            )
        sources[tensor.origin.number] = tensor.origin
    for origin in order:
        if isinstance(origin, TensorSource) and origin.tensor is None:
            sources.setdefault(origin.number, origin)
    names = Counter(source.name for source in sources.values() if source.name is not None)
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise InputError(f"build: two arguments are named {', '.join(map(repr, twice))}; rename one")
    return list(sources.values())


class _Writer:
    """The values and nodes of one model that are written so far."""

    def __init__(self, arguments: Sequence[TensorSource], outputs: Mapping[str, Tensor]) -> None:
        self.values: dict[tuple[int, int], ir.Value] = {}
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        # Names of values are unique in ONNX; names of nodes are separate.
        self._value_names = set(outputs)
        self._node_names: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._labels = {tensor.key: label for label, tensor in reversed(list(outputs.items()))}
        # The key of a node or constant -> its values, so that equal ones are written once.
        self._written: dict[Any, list[ir.Value]] = {}
        for source in arguments:
            name = self._reserve(source.name, "input", self._value_names)
            self.values[source.number, 0] = _value(name, source.type)

    def write(self, origin: Node | TensorSource) -> None:
        """Write a constant, or a node whose inputs are written."""
        # Arguments were written first.
        if (origin.number, 0) in self.values:
            return
        if isinstance(origin, TensorSource):
            self.values[origin.number, 0] = self._constant(origin)
            return
        inputs = [None if x is None else self.values[x.key] for x in origin.inputs]
        key = _node_key(origin, inputs)
        if key is None or key not in self._written:
            self._written[key or origin.number] = self._node(origin, inputs)
        outputs = self._written[key or origin.number]
        self.values.update({(origin.number, i): value for i, value in enumerate(outputs)})

    def end(self, label: str, tensor: Tensor) -> ir.Value:
        """Return the value of a model's output, with the output's name."""
        value = self.values[tensor.key]
        if value.name == label:
            return value
        region = tensor.origin.region if isinstance(tensor.origin, Node) else regions.Region()
        end, name = _value(label, tensor.type), self._reserve(None, f"{label}:Identity", self._node_names)
        metadata = region.metadata()
        self.nodes.append(ir.Node("", "Identity", [value], outputs=[end], name=name, metadata_props=metadata))
        return end

    def _constant(self, source: TensorSource) -> ir.Value:
        tensor = source.tensor
        assert tensor is not None
        key = (source.type, tensor.tobytes()) if source.name is None and tensor.nbytes <= _KEY_BYTES else None
        if key in self._written:
            return self._written[key][0]
        value = _value(self._reserve(source.name, "constant", self._value_names), source.type)
        # The data are shared under the name in this model.
        is_named = tensor.name == value.name
        value.const_value = (
            tensor if is_named else ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=value.name)
        )
        self.weights.append(value)
        self._written[key or source.number] = [value]
        return value

    def _node(self, node: Node, inputs: Sequence[ir.Value | None]) -> list[ir.Value]:
        stem = "/".join(part for part in (node.region.phase, node.region.path, node.op_type) if part)
        name = self._reserve(node.name, stem, self._node_names)
        outputs = []
        for i, type_ in enumerate(node.types):
            own = name if len(node.types) == 1 else f"{name}:{i}"
            label = self._labels.get((node.number, i)) or self._reserve(own, own, self._value_names)
            outputs.append(ir.Value(name="") if type_ is None else _value(label, type_))
        attributes, metadata = ir.convenience.convert_attributes(node.attributes), node.region.metadata()
        self.nodes.append(
            ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, name=name, metadata_props=metadata)
        )  # fmt: skip
        return outputs

    def _reserve(self, name: str | None, stem: str, names: set[str]) -> str:
        # A free name: `name` itself, or the stem with a number.
        while not name or name in names:
            name = f"{stem}_{self._counts[stem]}"
            self._counts[stem] += 1
        names.add(name)
        return name


def _value(name: str, type_: TensorType) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(type_.dtype), shape=ir.Shape(type_.shape))


def _node_key(node: Node, inputs: Sequence[ir.Value | None]) -> Any:
    """Return a key that equal nodes share; None for a node that is never merged."""
    # Only nodes of imported models have names: they stay as they are, and may draw random numbers.
    if node.name is not None:
        return None
    attributes = tuple(sorted((name, str(value)) for name, value in node.attributes.items()))
    names = tuple(None if value is None else value.name for value in inputs)
    return node.op_type, node.domain, node.opset, node.region, attributes, names
