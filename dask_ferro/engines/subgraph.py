"""A run of nodes cut out of a model as a model of its own.

Weights that lie in a file stay there: the cut-out model refers to them as external data (folder, location,
offset, length), so cutting a 2 GB model into pieces moves no weight.  A name that an If, Loop or Scan body
captures counts as a use by the node that owns the body.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from dask_ferro.graph.ir.nodes import uses

# The newest IR version that the tested ONNX Runtime reads; a model's own, when older, is kept.
_IR_VERSION = 13
# Below this an initializer is written inline: a file reference would be as long as the data.
_INLINE_BYTES = 256
# Weights in memory from here on are shared with the session instead of copied into the model's bytes.
_SHARED_BYTES = 64 * 2**10
# Kinds of dtypes that ONNX Runtime takes from numpy as they are: bfloat16 and friends are of kind "V".
_SHARED_KINDS = "biuf"


class SubModel(NamedTuple):
    """A cut-out model.

    Attributes
    ----------
    proto : ModelProto
    folder : str or None
        The folder that its external data is relative to; None: it has none.
    shared : mapping of str to ndarray
        Weights in memory that the proto refers to by name alone: a session is handed them, and copies none.
    weights : mapping of str to tensor
        All that its nodes read.
    """

    proto: onnx.ModelProto
    folder: str | None
    shared: Mapping[str, np.ndarray]
    weights: Mapping[str, ir.TensorProtocol]


def weights_of(model: ir.Model, nodes: Sequence[ir.Node]) -> dict[str, ir.TensorProtocol]:
    """Return the initializers that `nodes` read, by name, in order of first use."""
    initializers = model.graph.initializers
    found: dict[str, ir.TensorProtocol] = {}
    for node in nodes:
        for name in uses(node):
            if name in initializers and name not in found:
                tensor = initializers[name].const_value
                assert tensor is not None, f"initializer {name!r} has no data"
                found[name] = tensor
    return found


def extract(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    opset: int,
    weights_as_inputs: bool = False,
    shares: bool = False,
) -> SubModel:
    """Return the sub-model of `nodes` between the values `inputs` and `outputs`.

    Parameters
    ----------
    model : onnx_ir.Model
        A loaded model: sorted, functions inlined, values typed.
    nodes : sequence of onnx_ir.Node
        Nodes of its main graph, in topological order.
    inputs, outputs : sequence of str
        Value names; every value that `nodes` read is an input, a weight, or made by one of them.
    opset : int
        Version of the default domain to stamp the piece with.
    weights_as_inputs : bool
        Leave the weights out and list them after `inputs`, for an engine that is handed arrays.
    shares : bool
        Whether the caller hands large weights in memory to its session (`SubModel.shared`).
    """
    values = _values(model)
    graph = onnx.GraphProto(name="bundle")
    graph.node.extend(ir.serde.serialize_node(node) for node in nodes)
    graph.input.extend(ir.serde.serialize_value(values[name]) for name in inputs)
    graph.output.extend(ir.serde.serialize_value(values[name]) for name in outputs)
    weights = weights_of(model, nodes)
    folder, shared = None, {}
    if weights_as_inputs:
        graph.input.extend(ir.serde.serialize_value(values[name]) for name in weights)
    else:
        folder = _common_folder(weights.values())
        shared = {name: tensor.numpy() for name, tensor in weights.items() if shares and _may_share(tensor)}
        graph.initializer.extend(
            _tensor(name, tensor, folder) if name not in shared else _named(name, tensor)
            for name, tensor in weights.items()
        )
    proto = onnx.ModelProto(ir_version=min(model.ir_version, _IR_VERSION), graph=graph)
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=opset if domain == "" else version)
    return SubModel(proto, folder, shared, weights)


def _values(model: ir.Model) -> dict[str, ir.Value]:
    """Return the main graph's values by name, made once per model."""
    # Kept with the model: each bundle of it is cut out by names, and a model may have thousands of bundles.
    known = model.meta.get("ferro.values")
    if known is None:
        graph = model.graph
        results = chain.from_iterable(node.outputs for node in graph)
        known = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
        known.update((v.name, v) for v in results if v.name)
        model.meta["ferro.values"] = known
    return known  # type: ignore[no-any-return]


def _common_folder(tensors: Iterable[ir.TensorProtocol]) -> str | None:
    folders = [os.path.dirname(t.path) for t in tensors if isinstance(t, ir.ExternalTensor)]
    return os.path.commonpath(folders) if folders else None


def _may_share(tensor: ir.TensorProtocol) -> bool:
    """Return whether a session may be handed a weight in memory, which it does not write to."""
    if isinstance(tensor, (ir.ExternalTensor, ir.StringTensor)) or tensor.nbytes < _SHARED_BYTES:
        return False
    # ONNX Runtime reads the bytes as they lie: in C order, in native byte order, one element as numpy has it.
    array = tensor.numpy()
    is_plain = array.dtype.kind in _SHARED_KINDS and array.dtype.isnative
    return is_plain and array.flags.c_contiguous and ir.DataType.from_numpy(array.dtype) == tensor.dtype


def _named(name: str, tensor: ir.TensorProtocol) -> onnx.TensorProto:
    """Return a weight without its data, which the session is handed under its name."""
    proto = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=_dims(tensor))
    proto.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "in-memory", "offset": "0", "length": str(tensor.nbytes)}.items():
        proto.external_data.add(key=key, value=value)
    return proto


def _tensor(name: str, tensor: ir.TensorProtocol, folder: str | None) -> onnx.TensorProto:
    if not isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < _INLINE_BYTES:
        proto = ir.serde.serialize_tensor(tensor)
        # Inline, where a serialized external tensor would refer to its file again.
        if isinstance(tensor, ir.ExternalTensor):
            proto = onnx.TensorProto(
                data_type=int(tensor.dtype), dims=_dims(tensor), raw_data=tensor.tobytes()
            )
        proto.name = name
        return proto
    proto = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=_dims(tensor))
    proto.data_location = onnx.TensorProto.EXTERNAL
    place = {
        "location": os.path.relpath(tensor.path, folder),
        "offset": str(tensor.offset or 0),
        "length": str(tensor.length if tensor.length is not None else tensor.nbytes),
    }
    for key, value in place.items():
        proto.external_data.add(key=key, value=value)
    return proto


def _dims(tensor: ir.TensorProtocol) -> list[int]:
    return list(tensor.shape.numpy())
