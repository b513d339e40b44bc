"""An ONNX file, bytes or `ModelProto` becomes a checked `onnx_ir.Model` in one form.

    bytes --wire--> skeleton --protobuf--> check, external --normal--> infer, bounds --onnx_ir--> Loaded

A file is mapped and its weights are never copied: large tensors of the result point into the file (or into
the external files that it names), so processes share their pages.  Every problem that one pass finds is
reported at once, and each pass runs only on what the one before let through, so ONNX's own libraries never
see a model that could make them read elsewhere, recurse, or allocate without bound.  The user's own path may
be a symbolic link or a hard link; what the file names may not.  Sizes and offsets are bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from dask_ferro.errors import ModelError
from dask_ferro.graph import bounds, digest, dtypes, external, growth, lean, places, shapes, wire
from dask_ferro.graph.check import check
from dask_ferro.graph.limits import Limits
from dask_ferro.graph.normal import normalize
from dask_ferro.graph.source import Opened, Source, opened, parse
from dask_ferro.graph.upgrade import is_old, upgrade

__all__ = ["Limits", "Loaded", "load"]


@dataclass(frozen=True)
class Loaded:
    """A checked model.

    Parameters
    ----------
    model : onnx_ir.Model
        Local functions written out; the main graph sorted, each name defined once, every node named and
        needed; constants are initializers, and those are no inputs; types and shapes set where inference
        tells them; bodies of control flow whole in their nodes.  Initializers of 4 KiB and more are
        `onnx_ir.ExternalTensor` if the model came from a file: read `path`, `offset` and `length`.
    digest : str
        40 hexadecimal digits, by the content of the file and of the external data in use.
    path : str or None
        The real, absolute path; None for a model from memory.
    weight_bytes : int
        Bytes of all initializers of the main graph.
    opset : int
        Version of ONNX's own operators that the model imports.
    """

    model: ir.Model
    digest: str
    path: str | None
    weight_bytes: int
    opset: int


def load(source: Source, *, limits: Limits | None = None) -> Loaded:
    """The model in `source`, checked and in one form; the same source gives the same model in every process.

    Parameters
    ----------
    source : path, bytes or onnx.ModelProto
        A file is mapped, not read.  Bytes are viewed in place (keep them unchanged).  A `ModelProto` is
        serialized once, so it must be under 2 GiB.
    limits : Limits, optional
        Bounds on sizes.

    Raises
    ------
    ModelError
        The file is damaged, inconsistent, unsafe or too large; lists every problem.
    UnsupportedOp
        The only problem: operators that ONNX does not define.
    ConfigError
        There is no such file, it cannot be read, or `source` is something else.

    Examples
    --------
    >>> from onnx import parser
    >>> text = '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) {y = Relu(x)}'
    >>> loaded = load(parser.parse_model(text))
    >>> loaded.opset, [node.op_type for node in loaded.model.graph]
    (17, ['Relu'])
    """
    limits = limits or Limits()
    with opened(source) as file:
        headline = f"cannot load {file.name}"
        try:
            return _load(file, headline, limits)
        except external.Problem as problem:
            raise ModelError(headline, [str(problem)]) from problem


def _load(file: Opened, headline: str, limits: Limits) -> Loaded:
    proto = parse(file.view, headline, limits.structure_bytes)
    found = check(proto, limits)
    found_places, wrong = places.locate(proto, file.folder, len(file.view))
    found.wrong += wrong
    found.raise_any(headline)
    proto = _normalized(proto, headline)
    places.embed_attributes(proto, file.view)
    bare = lean.stripped(proto)
    if growth.growth(bare.graph).dims > growth.DIMS:
        found.wrong += growth.tall_values(bare)
        found.raise_any(headline)
    shapes.name_rows(bare.graph)
    inferred = shapes.infer_model(bare)
    found.wrong += bounds.problems(inferred, limits.value_bytes)
    found.wrong += dtypes.problems(proto, shapes.types_of(inferred.graph))
    found.raise_any(headline)
    try:
        model = _to_ir(proto, inferred, file)
    except ir.serde.SerdeError as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise ModelError(headline, [f"onnx_ir cannot hold it: {reason}"]) from error
    weights = (value.const_value for value in model.graph.initializers.values())
    return Loaded(
        model=model,
        digest=_digest(proto, file, found_places),
        path=file.path,
        weight_bytes=sum(tensor.nbytes for tensor in weights if tensor is not None),
        opset=model.opset_imports[""],
    )


def _normalized(proto: onnx.ModelProto, headline: str) -> onnx.ModelProto:
    try:
        proto = normalize(proto)
        return normalize(upgrade(proto)) if is_old(proto) else proto
    except Exception as error:
        if not proto.functions:
            raise
        raise ModelError(headline, [f"its local functions cannot be written out: {error}"]) from error


def _digest(proto: onnx.ModelProto, file: Opened, found: places.Places) -> str:
    if file.path is None or file.descriptor is None:
        return digest.of_bytes(file.view)
    spans = places.external_spans(proto, found)
    return digest.of_file(file.path, file.descriptor, os.path.dirname(file.path), spans)


# From messages to onnx_ir.


def _to_ir(proto: onnx.ModelProto, inferred: onnx.ModelProto, file: Opened) -> ir.Model:
    types = shapes.types_of(inferred.graph)
    for info in [*proto.graph.input, *proto.graph.output]:
        if info.name in types:
            info.type.CopyFrom(types[info.name])
    del proto.graph.value_info[:]
    computed = {name for node in proto.graph.node for name in node.output}.difference(
        info.name for info in proto.graph.output
    )
    for name in sorted(computed & types.keys()):
        proto.graph.value_info.add(name=name).type.CopyFrom(types[name])
    maps = lean.take_maps(proto.graph)
    model: ir.Model = ir.serde.deserialize_model(proto)
    for value in shapes.values(model.graph):
        if value.name in maps:
            value.meta[lean.TYPE_PROTO] = maps[value.name]
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _outside(value.const_value, file)
    return model


def _outside(tensor: ir.ExternalTensor, file: Opened) -> ir.TensorProtocol:
    """`tensor` with its place made real: a part of a file, or a view of the bytes at hand."""
    if file.path is None:
        return _viewed(tensor, file.view)
    folder, location = os.path.split(file.path)
    if tensor.location != wire.EMBEDDED:
        location = str(tensor.location)
    elif os.stat(file.path).st_nlink > 1:
        # The user chose this file; onnx_ir reads no hard link below a `base_dir`, but an absolute path.
        folder, location = "", file.path
    return ir.ExternalTensor(
        location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
        base_dir=folder,
    )


def _viewed(tensor: ir.ExternalTensor, view: memoryview) -> ir.TensorProtocol:
    offset, length = tensor.offset or 0, tensor.length or 0
    if tensor.dtype.bitwidth < 8:  # packed: numpy has no view of these
        raw = bytes(view[offset : offset + length])
        packed = TensorProto(
            name=tensor.name, data_type=tensor.dtype.value, dims=tensor.shape.numpy(), raw_data=raw
        )
        return ir.serde.deserialize_tensor(packed)
    dtype = np.dtype(tensor.dtype.numpy()).newbyteorder("<")
    array = np.frombuffer(view[offset : offset + length].toreadonly(), dtype).reshape(tensor.shape.numpy())
    return ir.Tensor(array, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)
