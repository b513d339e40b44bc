"""Bring a model into normal form: ONNX's messages become an `onnx_ir.Model`, and onnx_ir's passes do the rest.

    functions are written out, Constant nodes become initializers, initializers are not inputs, nodes are sorted and
    named, dead nodes are removed, and no name means two values

Works on a guarded model (`model.guards`) and changes it in place.  Bodies (If, Loop, Scan) stay whole in their nodes.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto
from onnx_ir.passes import common

from dask_ferro.errors import ModelError
from dask_ferro.graph.ir import ml_types
from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.inference import values
from dask_ferro.graph.ir.messages import TYPE_PROTO, all_graphs, all_nodes, domain_of, take_maps, uses
from dask_ferro.graph.ir.nodes import bodies, reads
from dask_ferro.graph.model.functions import inline_functions
from dask_ferro.graph.model.upgrade import MODERN_OPSET, upgrade

# The opset of graphs that use none of ONNX's own operators.
_ANY_OPSET = 17


def normalize(proto: onnx.ModelProto, weights: Mapping[str, ir.TensorProtocol], headline: str) -> ir.Model:
    """Return `proto` in normal form, with `weights` instead of the initializers of their names.

    An output of a ZipMap is the array that it reads, with the classes of the columns in `meta[ml_types.CLASSES]`.

    Raises
    ------
    ModelError
        If nodes form a circle, two nodes compute one value, or onnx_ir cannot hold the model.
    """
    try:
        classes = _maps_to_arrays(proto.graph)
        model = in_form(_to_ir(inline_functions(proto) if proto.functions else proto, weights))
    # SerdeError and onnx's own are RuntimeErrors.
    except (RuntimeError, ValueError, NotImplementedError, ir.passes.PassError) as error:
        # onnx_ir's reason comes after all of its arguments.
        cause = error.__cause__ if isinstance(error, ir.serde.SerdeError) else None
        reason = str(cause or error).partition("\n")[0]
        raise ModelError(headline, [f"{reason[:300]}; export it again"]) from error
    for value in model.graph.outputs:
        if value.name in classes:
            value.meta[ml_types.CLASSES] = classes[value.name]
    return model


def in_form(model: ir.Model) -> ir.Model:
    """Return a model without functions in normal form; it is changed."""
    # Before 4, initializers had to be inputs.
    model.ir_version = max(model.ir_version, 4)
    common.RemoveInitializersFromInputsPass()(model)
    _lift_constants(model.graph)
    _sort(model.graph)
    _drop_unused(model.graph)
    if 1 <= model.opset_imports.get("", MODERN_OPSET) < MODERN_OPSET:
        upgrade(model)
    _name(model)
    return model


def _to_ir(proto: onnx.ModelProto, weights: Mapping[str, ir.TensorProtocol]) -> ir.Model:
    proto.ClearField("training_info")
    # Plans of other tools: dask_ferro's plans are text in the metadata.
    proto.ClearField("configuration")
    proto.graph.ClearField("quantization_annotation")
    versions = {domain_of(entry.domain): entry.version for entry in proto.opset_import}
    del proto.opset_import[:]
    for domain, version in {"": _ANY_OPSET, **versions}.items():
        proto.opset_import.add(domain=domain, version=version)
    for graph in all_graphs(proto.graph):
        _open_sizes(graph)
        _plain_sparse(graph)
    for node in all_nodes(proto.graph.node):
        node.ClearField("device_configurations")
    maps = take_maps(proto.graph)
    model: ir.Model = ir.serde.deserialize_model(proto)
    for value in chain(model.graph.inputs, model.graph.outputs, *(node.outputs for node in model.graph)):
        if value.name in maps:
            value.meta[TYPE_PROTO] = maps[value.name]
    for name, tensor in weights.items():
        model.graph.initializers[name].const_value = tensor
    return model


def _maps_to_arrays(graph: onnx.GraphProto) -> dict[str, tuple[str, ...] | tuple[int, ...]]:
    """Replace each ZipMap that computes an output, one dict a row, by its array; return the columns' classes.

    A sequence of dicts is not an array: it cannot be cut, sent or stored as one.  The dict of a row is
    ``dict(zip(classes, row))``.  A ZipMap whose value another node reads stays.
    """
    zips = {
        n.output[0]: n
        for n in graph.node
        if (n.domain, n.op_type) == (ml_types.DOMAIN, "ZipMap") and n.output
    }
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
        # Inference finds the rest of its type.
        info.type.Clear()
        info.type.tensor_type.elem_type = TensorProto.FLOAT
    return found


def _open_sizes(graph: onnx.GraphProto) -> None:
    """Remove sizes of -1, which mean open sizes."""
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
        scattered = chain.from_iterable(_write_sparse(name, held, graph) for name, held in sparse.items())
        # Messages of a repeated field are invalid after they are removed from it, so they are copied first.
        copies = onnx.GraphProto(node=[*scattered, *kept])
        del graph.node[:]
        graph.node.extend(copies.node)
        graph.ClearField("sparse_initializer")


def _write_sparse(name: str, sparse: onnx.SparseTensorProto, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return nodes that compute `sparse` as `name`; its parts become initializers of `graph`."""
    shape, indices, values, zeros = (f"{name}:{part}" for part in ("shape", "indices", "values", "zeros"))
    # Indices may be linear, one number an element; ScatterND requires one for each axis.
    positions = onnx.numpy_helper.to_array(sparse.indices)
    if positions.ndim == 1:
        positions = np.stack(np.unravel_index(positions, list(sparse.dims)), axis=-1).astype(np.int64)
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(sparse.dims, np.int64), shape))
    graph.initializer.append(onnx.numpy_helper.from_array(positions, indices))
    graph.initializer.add().CopyFrom(sparse.values)
    graph.initializer[-1].name = values
    # A sparse tensor may hold no value at all, and still has a dtype.
    zero = onnx.numpy_helper.from_array(np.zeros(1, onnx.numpy_helper.to_array(sparse.values).dtype))
    return [
        onnx.helper.make_node("ConstantOfShape", [shape], [zeros], name=zeros, value=zero),
        onnx.helper.make_node("ScatterND", [zeros, indices, values], [name], name=f"{name}:dense"),
    ]


def _lift_constants(graph: ir.Graph) -> None:
    """Replace the graph's Constant nodes of numbers by initializers, unless they compute an output of it."""
    # onnx_ir's pass also lifts strings and constants of bodies, which engines read in their nodes.
    for node in graph:
        if node.op_type != "Constant" or node.domain not in STANDARD_DOMAINS or len(node.attributes) != 1:
            continue
        (attribute,) = node.attributes.values()
        (output,) = node.outputs
        tensor = _constant(attribute)
        if tensor is None or output.is_graph_output():
            continue
        tensor.name = output.name
        shape = ir.Shape(tensor.shape.numpy())
        stored = ir.Value(name=output.name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
        graph.register_initializer(stored)
        output.replace_all_uses_with(stored)
        graph.remove(node, safe=True)


_NUMBERS = {
    "value_int": ir.DataType.INT64,
    "value_ints": ir.DataType.INT64,
    "value_float": ir.DataType.FLOAT,
    "value_floats": ir.DataType.FLOAT,
}


def _constant(attribute: ir.Attr) -> ir.TensorProtocol | None:
    """Return the tensor of a Constant node's attribute; None for strings."""
    if attribute.type == ir.AttributeType.TENSOR:
        tensor: ir.TensorProtocol = attribute.as_tensor()
        return tensor if tensor.dtype != ir.DataType.STRING else None
    dtype = _NUMBERS.get(attribute.name)
    return None if dtype is None else ir.tensor(attribute.value, dtype=dtype)


def _sort(graph: ir.Graph) -> None:
    # A sort that fails removes nodes from the graph.
    nodes = list(graph)
    try:
        graph.sort()
    except ValueError as error:
        needs = {node: {v.producer() for v in reads(node)} & {*nodes} for node in nodes}
        try:
            graphlib.TopologicalSorter(needs).prepare()
        except graphlib.CycleError as circle:
            names = [f"{node.name!r} ({node.op_type})" for node in circle.args[1][:6]]
            raise ValueError(f"nodes wait for each other in a circle: {' -> '.join(names)}") from error
        raise


def _drop_unused(graph: ir.Graph) -> None:
    # onnx_ir's pass also removes the names of optional outputs, which may be requested.
    needed = set(graph.outputs)
    for node in reversed(list(graph)):
        if not needed.isdisjoint(node.outputs):
            needed.update(reads(node))
            continue
        # Values of this graph do not count what its bodies read.
        for inner in chain.from_iterable(map(ir.traversal.RecursiveGraphIterator, bodies(node))):
            inner.resize_inputs(0)
        graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if value not in needed:
            del graph.initializers[name]


def _name(model: ir.Model) -> None:
    """Give every node of the main graph a name of its own, and every value of a body, at any depth."""
    # onnx_ir's pass lets a body keep a name that the graph around it gives later.
    nodes = _Names(node.name or "" for node in model.graph)
    seen: set[str] = set()
    for node in model.graph:
        if not node.name or node.name in seen:
            node.name = nodes.fresh(
                node.name or f"{node.op_type}:{next(v.name for v in node.outputs if v.name)}"
            )
        seen.add(node.name)
    inner = [graph for graph in model.graphs() if graph is not model.graph]
    names = _Names(value.name or "" for value in values(model.graph)) if inner else None
    for value in chain.from_iterable(map(list, map(values, inner))):
        if names and value.name:
            value.name = names.fresh(value.name)


class _Names:
    """The names in use, with the number of each name's next variant."""

    def __init__(self, names: Iterable[str]) -> None:
        self._used = set(names)
        # The next number to try of each name: without it, n nodes of one name take n * n steps (4,000 took 1.5 s).
        self._numbers: Counter[str] = Counter()

    def fresh(self, name: str) -> str:
        """Return `name`, or its first variant that is not in use, and mark it as used."""
        candidate, number = name, self._numbers[name] or 1
        while candidate in self._used:
            number += 1
            candidate = f"{name}_{number}"
        self._numbers[name] = number
        self._used.add(candidate)
        return candidate
