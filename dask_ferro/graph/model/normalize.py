"""Normal form of a model, made on ONNX's own messages.

    functions written out; Constant nodes become initializers; initializers are no inputs; nodes sorted,
    named, and dead ones gone

Works on a checked model (`model.checks.problems`) and changes it in place.  Bodies (If, Loop, Scan) stay whole in their
nodes; they are sorted, and a name that a body takes for itself though a graph around it has it is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableSequence
from itertools import chain
from typing import TypeVar

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from dask_ferro.graph.ir import ml_types
from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.order import all_nodes, bodies, captured, order, uses
from dask_ferro.graph.model.functions import domain_of, inlined

_Message = TypeVar("_Message", bound=onnx.NodeProto | TensorProto | onnx.ValueInfoProto)

# The opset of graphs that use none of ONNX's own operators.
_ANY_OPSET = 17


def normalize(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` in normal form; its own messages are reused."""
    # First of all: functions hold constants, dead nodes and shadows as graphs do.
    if proto.functions:
        proto = inlined(proto)
    for field in ("training_info", "functions"):
        proto.ClearField(field)
    proto.graph.ClearField("quantization_annotation")
    # Before 4, initializers had to be inputs.
    proto.ir_version = max(proto.ir_version, 4)
    _one_name_per_domain(proto)
    graph = proto.graph
    _drop_initialized_inputs(graph)
    _open_sizes([graph, *chain.from_iterable(map(bodies, all_nodes(graph.node)))])
    _plain_sparse(graph)
    _lift_constants(graph)
    _sort(graph)
    _drop_unused(graph)
    _name_nodes(graph)
    _rename_shadows(graph)
    return proto


def maps_to_arrays(graph: onnx.GraphProto) -> dict[str, tuple[str, ...] | tuple[int, ...]]:
    """Replace each ZipMap that computes an output, one dict a row, by its array; return the columns' classes.

    A sequence of dicts is no array: it cannot be cut, sent or stored as one.  The dict of a row is
    ``dict(zip(classes, row))``.  A ZipMap whose value another node reads stays.
    """
    zips = {n.output[0]: n for n in graph.node if (n.domain, n.op_type) == (ml_types.DOMAIN, "ZipMap")}
    if not zips:
        return {}
    read = set(chain.from_iterable(map(uses, graph.node)))
    found = {}
    for info in graph.output:
        node = zips.get(info.name)
        if node is None or info.name in read:
            continue
        held = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        strings = tuple(label.decode() for label in held.get("classlabels_strings", ()))
        found[info.name] = strings or tuple(held.get("classlabels_int64s", ()))
        node.domain, node.op_type = "", "Identity"
        node.ClearField("attribute")
        # The rest of its type is what inference finds.
        info.type.Clear()
        info.type.tensor_type.elem_type = TensorProto.FLOAT
    return found


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


def _open_sizes(graphs: Iterable[onnx.GraphProto]) -> None:
    """Leave out sizes of -1, which stand for open ones."""
    for graph in graphs:
        for info in [*graph.input, *graph.output, *graph.value_info]:
            for dim in info.type.tensor_type.shape.dim:
                if dim.dim_value == -1:
                    dim.Clear()


def _plain_sparse(graph: onnx.GraphProto) -> None:
    """Replace sparse tensors, which onnx_ir does not hold, by a ScatterND into zeros: dense only when it runs."""
    sparse = {held.values.name: held for held in graph.sparse_initializer}
    kept = []
    for node in graph.node:
        held = next((a.sparse_tensor for a in node.attribute if a.HasField("sparse_tensor")), None)
        if held is not None and node.op_type == "Constant":
            sparse[node.output[0]] = held
        else:
            kept.append(node)
    if sparse:
        names = UsedNames([*_defined(graph), *sparse])
        scattered = chain.from_iterable(_scattered(name, held, graph, names) for name, held in sparse.items())
        _replace(graph.node, [*scattered, *kept])
        graph.ClearField("sparse_initializer")
    for node in graph.node:
        for body in bodies(node):
            _plain_sparse(body)


def _scattered(
    name: str, sparse: onnx.SparseTensorProto, graph: onnx.GraphProto, names: UsedNames
) -> list[onnx.NodeProto]:
    """Return nodes that compute `sparse` as `name`; its parts become initializers of `graph`."""
    parts = ("shape", "indices", "values", "zeros")
    shape, indices, values, zeros = [names.fresh(f"{name}:{part}") for part in parts]
    # Indices may be linear, one number an element; ScatterND wants one for each axis.
    positions = onnx.numpy_helper.to_array(sparse.indices)
    if positions.ndim == 1:
        positions = np.stack(np.unravel_index(positions, list(sparse.dims)), axis=-1).astype(np.int64)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(sparse.dims, np.int64), shape))
    graph.initializer.append(onnx.numpy_helper.from_array(positions, indices))
    graph.initializer.add().CopyFrom(sparse.values)
    graph.initializer[-1].name = values
    # A sparse tensor may hold no value at all, and still has a dtype.
    zero = onnx.numpy_helper.to_array(sparse.values)[:1]
    zero = onnx.numpy_helper.from_array(np.zeros_like(zero) if len(zero) else np.zeros(1, zero.dtype))
    return [
        onnx.helper.make_node("ConstantOfShape", [shape], [zeros], name=zeros, value=zero),
        onnx.helper.make_node("ScatterND", [zeros, indices, values], [name], name=f"{name}:dense"),
    ]


def _lift_constants(graph: onnx.GraphProto) -> None:
    """Replace Constant nodes of numbers by initializers, unless they compute an output of the graph."""
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
    """Return the tensor of a Constant node; None for other nodes, for strings and for sparse tensors."""
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
    dead = _unused(graph)
    if dead:
        _replace(graph.node, [node for i, node in enumerate(graph.node) if i not in dead])
    used = {info.name for info in graph.output}
    for node in graph.node:
        used.update(node.input)
        used |= captured(node)
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    if len(kept) < len(graph.initializer):
        _replace(graph.initializer, kept)


def _unused(graph: onnx.GraphProto) -> set[int]:
    """Return the indices of dead nodes of a sorted graph: no output depends on them."""
    needed = {info.name for info in graph.output}
    dead: set[int] = set()
    for i in range(len(graph.node) - 1, -1, -1):
        node = graph.node[i]
        if needed.isdisjoint(node.output):
            dead.add(i)
        else:
            needed.update(uses(node))
    return dead


def _replace(field: MutableSequence[_Message], kept: Iterable[_Message]) -> None:
    """Replace the messages of a repeated field by `kept`, some of its own."""
    # Messages of a repeated field are gone when they are taken out of it, so what stays is copied first.
    copies = []
    for message in kept:
        copies.append(type(message)())
        copies[-1].CopyFrom(message)
    del field[:]
    field.extend(copies)


def _name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node of the main graph a name of its own, made of its operator and its first output."""
    names = UsedNames(node.name for node in graph.node)
    seen: set[str] = set()
    for node in graph.node:
        if not node.name or node.name in seen:
            output = next(filter(None, node.output))
            node.name = names.fresh(node.name or f"{node.op_type}:{output}")
        seen.add(node.name)


class UsedNames:
    """The names in use, with the number of each name's next variant.

    Parameters
    ----------
    names : iterable of str
        The names in use at the start.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.used = set(names)
        # The next number to try of each name: without it, n nodes of one name take n * n steps (4,000 took 1.5 s).
        self._numbers: Counter[str] = Counter()

    def fresh(self, name: str) -> str:
        """Return `name`, or its first variant that is not in use, and mark it as used."""
        candidate, number = name, self._numbers[name] or 1
        while candidate in self.used:
            number += 1
            candidate = f"{name}_{number}"
        self._numbers[name] = number
        self.used.add(candidate)
        return candidate


def _rename_shadows(graph: onnx.GraphProto) -> None:
    with_bodies = [node for node in graph.node if bodies(node)]
    if not with_bodies:
        return
    scope = _Scope(_defined(graph))
    for node in with_bodies:
        for body in bodies(node):
            scope.rename(body)


def _defined(graph: onnx.GraphProto) -> dict[str, None]:
    """Return the names that `graph` defines, in their order."""
    names = [info.name for info in graph.input] + [tensor.name for tensor in graph.initializer]
    names += [sparse.values.name for sparse in graph.sparse_initializer]
    names += filter(None, chain.from_iterable(node.output for node in graph.node))
    return dict.fromkeys(names)


class _Scope:
    """The names visible in a body, with the new names of renamed ones."""

    # One scope serves all bodies: each adds its names and takes them out at its end.  A copy for each body would take
    # the number of bodies times that of values: 4,000 Ifs took 0.5 s.
    def __init__(self, names: Iterable[str]) -> None:
        self._visible = UsedNames(names)
        self._renamed: dict[str, str] = {}

    def rename(self, body: onnx.GraphProto) -> None:
        """Give new names to what `body` defines under a name of a graph around it."""
        used, renamed = self._visible.used, self._renamed
        defined = _defined(body)
        hidden = {name: renamed.pop(name) for name in defined if name in renamed}
        shadows = [name for name in defined if name in used]
        own = defined.keys() - used
        used |= own
        renamed.update((name, self._visible.fresh(name)) for name in shadows)
        self._rewrite(body)
        used -= own
        used.difference_update(renamed.pop(name) for name in shadows)
        renamed |= hidden

    def _rewrite(self, body: onnx.GraphProto) -> None:
        renamed = self._renamed
        for message in [*body.input, *body.output, *body.value_info, *body.initializer]:
            message.name = renamed.get(message.name, message.name)
        for sparse in body.sparse_initializer:
            sparse.values.name = renamed.get(sparse.values.name, sparse.values.name)
        for node in body.node:
            node.input[:] = [renamed.get(name, name) for name in node.input]
            node.output[:] = [renamed.get(name, name) for name in node.output]
            for inner in bodies(node):
                self.rename(inner)
