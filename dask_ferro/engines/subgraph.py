"""Extract a run of nodes from a model, as a model of its own.

Weights in a file stay there: the extracted model refers to them as external data (folder, location, offset, length),
so splitting a 2 GB model moves no weight.  A name that the body of an If, Loop or Scan captures counts as read by the
node that owns the body.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from dask_ferro.graph.ir.dtypes import SESSION
from dask_ferro.graph.ir.nodes import uses

# The newest IR version that the tested ONNX Runtime reads; an older version of a model is kept.
_IR_VERSION = 13
# Smaller initializers are written inline, because a file reference would be as long as the data.
_INLINE_BYTES = 256
# Weights in memory of at least this size are shared with the session, not copied into the model's bytes; the loader
# leaves as large ones in the content of the file.
_SHARED_BYTES = 4096


class SubModel(NamedTuple):
    """A model extracted from another model.

    Attributes
    ----------
    proto : ModelProto
    folder : str or None
        The folder of its external data; None without external data.
    shared : mapping of str to ndarray
        Weights in memory that the proto refers to only by name; a session is passed these arrays and copies none.
    weights : mapping of str to tensor
        All weights that its nodes read.
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
    """Return the model of `nodes` between the values `inputs` and `outputs`.

    Parameters
    ----------
    model : onnx_ir.Model
        A loaded model: sorted, functions inlined, values typed.
    nodes : sequence of onnx_ir.Node
        Nodes of its main graph, in topological order.
    inputs, outputs : sequence of str
        Value names; every value that `nodes` read is an input, a weight, or a result of one of them.
    opset : int
        Version of the default domain that the extracted model imports.
    weights_as_inputs : bool
        Whether weights are listed after `inputs` and not stored, for an engine that is passed arrays.
    shares : bool
        Whether the caller passes large weights in memory to its session (`SubModel.shared`).
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
            # The session is passed the data of a shared weight under its name.
            _external(name, tensor, "in-memory", 0, tensor.nbytes)
            if name in shared
            else _tensor(name, tensor, folder)
            for name, tensor in weights.items()
        )
    proto = onnx.ModelProto(ir_version=min(model.ir_version, _IR_VERSION), graph=graph)
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=opset if domain == "" else version)
    return SubModel(proto, folder, shared, weights)


def _values(model: ir.Model) -> dict[str, ir.Value]:
    """Return the main graph's values by name, built once per model."""
    # Kept with the model: each of possibly thousands of bundles is extracted by name.
    known = model.meta.get("ferro.values")
    if known is None:
        known = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
        model.meta["ferro.values"] = known
    return known  # type: ignore[no-any-return]


def _common_folder(tensors: Iterable[ir.TensorProtocol]) -> str | None:
    folders = [os.path.dirname(t.path) for t in tensors if isinstance(t, ir.ExternalTensor)]
    return os.path.commonpath(folders) if folders else None


def _may_share(tensor: ir.TensorProtocol) -> bool:
    """Return whether a session may read a weight from memory in place."""
    if isinstance(tensor, (ir.ExternalTensor, ir.StringTensor)) or tensor.nbytes < _SHARED_BYTES:
        return False
    # ONNX Runtime reads the bytes in C order, in native byte order, with numpy's layout of an element.
    array = tensor.numpy()
    is_plain = tensor.dtype in SESSION and array.dtype.isnative and array.flags.c_contiguous
    return is_plain and ir.DataType.from_numpy(array.dtype) == tensor.dtype


def _external(
    name: str, tensor: ir.TensorProtocol, location: str, offset: int, length: int
) -> onnx.TensorProto:
    proto = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=_dims(tensor))
    proto.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        proto.external_data.add(key=key, value=str(value))
    return proto


def _tensor(name: str, tensor: ir.TensorProtocol, folder: str | None) -> onnx.TensorProto:
    if not isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < _INLINE_BYTES:
        proto = ir.serde.serialize_tensor(tensor)
        # A serialized external tensor would refer to its file again.
        if isinstance(tensor, ir.ExternalTensor):
            proto = onnx.TensorProto(
                data_type=int(tensor.dtype), dims=_dims(tensor), raw_data=tensor.tobytes()
            )
        proto.name = name
        return proto
    length = tensor.length if tensor.length is not None else tensor.nbytes
    return _external(name, tensor, os.path.relpath(tensor.path, folder), tensor.offset or 0, length)


def _dims(tensor: ir.TensorProtocol) -> list[int]:
    return list(tensor.shape.numpy())
