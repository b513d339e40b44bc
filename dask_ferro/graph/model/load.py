"""The loader: an ONNX file, bytes or a `ModelProto` becomes a checked `onnx_ir.Model` in one form.

    bytes --protobuf--> guards, external data --onnx_ir's passes--> onnx.checker --> inference, sizes --> Loaded

A model up to `Limits.mapped_above` is read into memory: what happens to its files afterwards changes nothing.  Of a
larger one, large weights are mapped: they point into the file (or into the external files that it names), so processes
share their pages, and `Loaded.files` tells when one changed.  The user's own path may be a symbolic or a hard link.
Sizes and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from dask_ferro.errors import ModelError
from dask_ferro.graph.ir import inference, inference_limits, ml_types, strip_weights
from dask_ferro.graph.ir.inference import TypedModel
from dask_ferro.graph.ir.strip_weights import TYPE_PROTO
from dask_ferro.graph.model import digest, external_data, guards, self_contained
from dask_ferro.graph.model.check import check, raise_any, type_problem
from dask_ferro.graph.model.external_data import FilePart, Original, reference
from dask_ferro.graph.model.guards import Limits
from dask_ferro.graph.model.normalize import in_form, maps_to_arrays, normalized
from dask_ferro.graph.model.outputs import select
from dask_ferro.graph.model.self_contained import CHECKED
from dask_ferro.graph.model.source import CHANGED, Source, SourceBytes, opened, parse
from dask_ferro.graph.model.source_files import CHECK, FileTensor, SourceFiles, seen

__all__ = ["Limits", "Loaded", "load", "load_own"]

# Below this, a mapped page costs more than the copy that it saves.
_PAGE = 4096


@dataclass(frozen=True)
class Loaded:
    """A checked model in one form.

    Parameters
    ----------
    model : onnx_ir.Model
        Local functions written out; the main graph sorted, each name defined once, every node named and
        needed; constants are initializers, and those are no inputs; types and shapes set where inference
        tells them; bodies of control flow whole in their nodes.  An output of a ZipMap is the array that it reads, with
        the labels in `meta[ml_types.CLASSES]`.  Initializers of 4 KiB and more are
        `onnx_ir.ExternalTensor` if the model is mapped: read `path`, `offset` and `length`.
    digest : str
        40 hexadecimal digits, by the content of the file and of the external data in use, and by `outputs`.
    path : str or None
        The real, absolute path; None for a model from memory.
    weight_bytes : int
        Bytes of all initializers of the main graph.
    opset : int
        Version of ONNX's own operators that the model imports.
    files : SourceFiles
        The files that weights are mapped from, none for a model in memory; calling it checks them.
    content : bytes or None
        The model file as it was read, where it is in memory and all of the model.
    is_inferred : bool
        Whether its types were inferred from those of its inputs alone, and all that the file declares is so.
    outputs : tuple of str
        The selected outputs in their order; (): all, as in the file.
    original : Original or None
        The file's own messages, where `load` was asked to keep them.
    """

    model: ir.Model
    digest: str
    path: str | None
    weight_bytes: int
    opset: int
    files: SourceFiles = field(default_factory=SourceFiles)
    content: bytes | None = None
    is_inferred: bool = False
    outputs: tuple[str, ...] = ()
    original: Original | None = None


def load(
    source: Source, *, limits: Limits | None = None, outputs: object = None, keeps_original: bool = False
) -> Loaded:
    """Return the checked model of `source`; the same source gives the same model in every process.

    Parameters
    ----------
    source : path, bytes or onnx.ModelProto
        A file is read; a large one is mapped.  A `ModelProto` is serialized once, so it must be under 2 GiB.
    limits : Limits, optional
        Bounds on sizes.
    outputs : str or collection of str, optional
        The outputs to keep, in this order; nodes, weights and inputs that only others need are not even checked.
    keeps_original : bool, optional
        Whether to keep the file's own messages too, so that it can be written again with other weights.

    Raises
    ------
    ModelError
        The file is damaged, inconsistent, unsafe or too large.
    UnsupportedOp
        An operator that ONNX does not define.
    ConfigError
        There is no such file, it cannot be read, or `source` is something else; `outputs` that the model lacks.

    Examples
    --------
    >>> from onnx import parser
    >>> text = '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) {y = Relu(x)}'
    >>> loaded = load(parser.parse_model(text))
    >>> loaded.opset, [node.op_type for node in loaded.model.graph]
    (17, ['Relu'])
    """
    limits = limits or Limits()
    with opened(source, limits.mapped_above) as file:
        headline = f"cannot load {file.name}"
        try:
            return _load(file, headline, limits, outputs, keeps_original)
        except external_data.Problem as problem:
            raise ModelError(headline, [str(problem)]) from problem


def load_own(model: ir.Model, limits: Limits | None = None) -> Loaded:
    """Return a model that this process made, as `load` returns its file; its types are inferred, nothing is checked.

    A model without the mark of those (`CHECKED`), or with weights in files, is loaded as its file would be.

    Parameters
    ----------
    model : onnx_ir.Model
        As `graph.tensor.emit.build` returns it. Not changed.
    limits : Limits, optional
        Bounds on sizes, where the model is loaded.

    Raises
    ------
    ConfigError
        The weights are more than a protobuf message holds.
    """
    content = self_contained.content(model)
    weights = [value.const_value for value in model.graph.initializers.values()]
    if CHECKED not in model.meta or any(isinstance(tensor, ir.ExternalTensor) for tensor in weights):
        return load(content, limits=limits)
    own = in_form(model.clone())
    lean = strip_weights.lean_model(own, keep_declared=True, keep_inner=True)
    inference.name_rows(lean.graph)
    typed = inference.typed(lean)
    _set_types(own, typed.types)
    own.meta[CHECKED] = True
    return Loaded(
        model=own,
        digest=digest.of_bytes(content),
        path=None,
        weight_bytes=self_contained.weight_bytes(own),
        opset=own.opset_imports[""],
        content=content,
        is_inferred=typed.is_inferred,
    )


def _load(file: SourceBytes, headline: str, limits: Limits, wanted: object, keeps_original: bool) -> Loaded:
    proto = parse(file.content, headline)
    outputs = select(proto, wanted, file.name)
    problems = list(guards.problems(proto, limits))
    parts = _located(proto, file, problems)
    raise_any(headline, problems)
    held = _held(file, parts.values(), limits.mapped_above)
    files = _files(file, [part for part in parts.values() if part not in held])
    weights = _weights(proto, file, parts, held, files)
    # Without the bytes of the large weights, which protobuf frees only with the whole message.
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    original = None
    if keeps_original:
        original = Original(proto, memoryview(file.content), parts, held, files)
    classes = maps_to_arrays(bare.graph)
    model = normalized(bare, weights, headline)
    lean = strip_weights.lean_model(model, keep_declared=True, keep_inner=True)
    check(model, lean, headline)
    typed = _typed(lean, limits, classes, headline)
    _set_types(model, typed.types)
    for value in model.graph.outputs:
        if labels := classes.get(value.name or ""):
            value.meta[ml_types.CLASSES] = labels
    if files:
        model.meta[CHECK] = files
        if not files.are_unchanged():
            raise ModelError(headline, [CHANGED])
    model.meta[CHECKED] = True
    return Loaded(
        model=model,
        digest=digest.of_outputs(digest.of_model(file.content, [*parts.values()], held), outputs),
        # Beside a link may lie the links to external data.
        path=file.named if parts else file.path,
        weight_bytes=self_contained.weight_bytes(model),
        opset=model.opset_imports[""],
        files=files,
        content=file.content if isinstance(file.content, bytes) and not parts else None,
        is_inferred=typed.is_inferred,
        outputs=outputs,
        original=original,
    )


# External data by the text of its reference, and what of it is in memory.
Parts = dict[str, FilePart]
Held = Mapping[FilePart, bytes]


def _located(proto: onnx.ModelProto, file: SourceBytes, problems: list[str]) -> Parts:
    parts: Parts = {}
    for tensor in external_data.external_tensors(proto) if not problems else ():
        try:
            parts[reference(tensor)] = external_data.locate(tensor, file.named)
        except external_data.Problem as problem:
            problems.append(f"initializer {tensor.name!r}: {problem}")
    return parts


def _held(file: SourceBytes, parts: Iterable[FilePart], mapped_above: int) -> Held:
    """Return the external data's content, read into memory if it and the model are small together."""
    ranges = set(parts)
    if file.mapped or len(file.content) + sum(part.length for part in ranges) > mapped_above:
        return {}
    return {part: external_data.content(part) for part in ranges}


def _files(file: SourceBytes, parts: Iterable[FilePart]) -> SourceFiles:
    """Return the files that weights are mapped from."""
    found = [file.mapped] if file.mapped else []
    for part in {part.location: part for part in parts}.values():
        with external_data.opened(part) as descriptor:
            found.append(seen(part.location, descriptor))
    return SourceFiles(found)


def _weights(
    proto: onnx.ModelProto, file: SourceBytes, parts: Parts, held: Held, files: SourceFiles
) -> dict[str, ir.TensorProtocol]:
    """Take the large and the external initializers of the graph out of the messages; return them by their names.

    Their bytes are found again where they stand in the file, so that no other copy of them remains.
    """
    taken: dict[str, ir.TensorProtocol] = {}
    at = 0
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            part = parts[reference(tensor)]
            where = FileTensor if part not in held else None
            taken[tensor.name] = (
                _mapped(tensor, part.location, part.offset, part.length, files)
                if where
                else _viewed(tensor, memoryview(held[part]))
            )
        elif len(raw := tensor.raw_data) >= _PAGE:
            start = file.content.find(raw[:64], at)
            view = memoryview(file.content)[start : start + len(raw)]
            if start >= 0 and view == raw:
                at = start + len(raw)
                taken[tensor.name] = (
                    _mapped(tensor, file.mapped.path, start, len(raw), files)
                    if file.mapped
                    else _viewed(tensor, view)
                )
            else:
                taken[tensor.name] = _viewed(tensor, memoryview(raw))
        else:
            continue
        tensor.ClearField("raw_data")
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    for tensor in external_data.external_tensors(proto):
        part = parts[reference(tensor)]
        tensor.raw_data = held[part] if part in held else external_data.content(part)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return taken


def _mapped(tensor: TensorProto, path: str, offset: int, length: int, files: SourceFiles) -> FileTensor:
    # The real path and no `base_dir`: onnx_ir refuses links below one, and these have been checked.
    dtype, shape = ir.DataType(tensor.data_type), ir.Shape(tensor.dims)
    mapped = FileTensor(path, offset, length, dtype, shape=shape, name=tensor.name)
    mapped.files = files
    return mapped


def _viewed(tensor: TensorProto, view: memoryview) -> ir.TensorProtocol:
    dtype = ir.DataType(tensor.data_type)
    # numpy has no view of packed elements.
    if dtype.bitwidth < 8:
        packed = TensorProto(
            name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=bytes(view)
        )
        return ir.serde.deserialize_tensor(packed)
    array = np.frombuffer(view.toreadonly(), np.dtype(dtype.numpy()).newbyteorder("<")).reshape(tensor.dims)
    return ir.Tensor(array, dtype=dtype, shape=ir.Shape(tensor.dims), name=tensor.name)


# Types.


def _typed(
    lean: onnx.ModelProto, limits: Limits, classes: Mapping[str, Sequence[str | int]], headline: str
) -> TypedModel:
    """Return the types of a model in normal form; raise an error with all problems."""
    raise_any(headline, inference_limits.problems(inference_limits.growth(lean.graph)))
    inference.name_rows(lean.graph)
    typed = inference.typed(lean)
    problem = typed.error and type_problem(typed.error)
    problems = [problem] if problem else []
    problems += guards.size_problems(typed.proto.graph, limits.value_bytes)
    raise_any(headline, chain(problems, guards.class_problems(typed.types, classes)))
    return typed


def _set_types(model: ir.Model, types: Mapping[str, onnx.TypeProto]) -> None:
    for graph in model.graphs():
        for value in inference.values(graph):
            type_ = types.get(value.name or "")
            # In a body, what is declared stays.
            is_open = graph is model.graph or value.type is None
            if type_ is not None and is_open and value.const_value is None and TYPE_PROTO not in value.meta:
                _set_type(value, type_)


def _set_type(value: ir.Value, type_: onnx.TypeProto) -> None:
    if strip_weights.holds_map(type_):
        value.meta[TYPE_PROTO] = type_.SerializeToString()
        value.type = value.shape = None
    else:
        value.type = ir.serde.deserialize_type_proto_for_type(type_)
        value.shape = ir.serde.deserialize_type_proto_for_shape(type_)
