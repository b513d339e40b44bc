"""Load an ONNX file, bytes or a `ModelProto` as a checked `onnx_ir.Model` in one form.

    bytes --protobuf--> guards, external data --onnx_ir's passes--> onnx.checker --> inference, sizes --> LoadedModel

A model up to `Limits.mapped_above` is read into memory: later changes of its files have no effect.  The large weights
of a larger model are mapped: they point into the file (or into the external files that it names), so processes share
their pages, and `LoadedModel.files` reports when one changed.  The user's own path may be a symbolic or a hard link.
Sizes and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from dask_ferro import portable
from dask_ferro.errors import ModelError
from dask_ferro.graph.ir.inference import set_types
from dask_ferro.graph.ir.messages import external_tensors, lean_model
from dask_ferro.graph.ir.onnx_inference import infer_types
from dask_ferro.graph.ir.regions import region_of
from dask_ferro.graph.model import embedding, external_data, guards
from dask_ferro.graph.model.digest import digest_of
from dask_ferro.graph.model.embedding import CHECKED_KEY
from dask_ferro.graph.model.external_data import FilePart, reference
from dask_ferro.graph.model.guards import Limits
from dask_ferro.graph.model.normalize import in_form, normalize
from dask_ferro.graph.model.original import Original
from dask_ferro.graph.model.outputs import select
from dask_ferro.graph.model.source import (
    CHANGED_TEXT,
    CHECK,
    FileTensor,
    Source,
    SourceBytes,
    SourceFiles,
    identify_file,
    open_source,
    parse,
)

__all__ = ["Limits", "LoadedModel", "load", "load_built", "load_opened"]

# Below this, a mapped page costs more than the copy that it saves.
_PAGE = 4096
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class LoadedModel:
    """A checked model in one form.

    Parameters
    ----------
    model : onnx_ir.Model
        Local functions are written out, the main graph is sorted, each name is defined once, and every node is named
        and needed.  Constants are initializers, and those are not inputs.  Types and shapes are set if inference
        finds them. Bodies of control flow stay whole in their nodes.  An output of a ZipMap is the array that it
        reads, with the labels in `meta[ml_types.CLASSES]`.  Initializers of 4 KiB and more are
        `onnx_ir.ExternalTensor` if the model is mapped: read `path`, `offset` and `length`.
    digest : str
        40 hexadecimal digits, computed from the content of the file and of the external data in use, and from
        `outputs`.
    path : str or None
        The real, absolute path; None for a model from memory.
    opset : int
        Version of ONNX's own operators that the model imports.
    files : SourceFiles
        The files that weights are mapped from, none for a model in memory; calling it checks them.
    content : bytes or None
        The model file as it was read, if it is in memory and contains all of the model.
    is_inferred : bool
        Whether its types were inferred only from the types of its inputs, and equal all declared types.
    has_regions : bool
        Whether a node of the main graph has a region or a phase.
    outputs : tuple of str
        The selected outputs in their order; (): all, as in the file.
    original : Original or None
        The file's own messages, if `load` was called with `keeps_original`.
    """

    model: ir.Model
    digest: str
    path: str | None
    opset: int
    files: SourceFiles = field(default_factory=SourceFiles)
    content: bytes | None = None
    is_inferred: bool = False
    has_regions: bool = False
    outputs: tuple[str, ...] = ()
    original: Original | None = None

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all initializers of the main graph."""
        return embedding.weight_bytes(self.model)


def load(
    source: Source, *, limits: Limits | None = None, outputs: object = None, keeps_original: bool = False
) -> LoadedModel:
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
        If the file is damaged, inconsistent, unsafe or too large.
    UnsupportedOpError
        If ONNX does not define an operator.
    InputError
        If there is no such file, it cannot be read, `source` is something else, or the model lacks some `outputs`.

    Examples
    --------
    >>> from onnx import parser
    >>> text = '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) {y = Relu(x)}'
    >>> loaded = load(parser.parse_model(text))
    >>> loaded.opset, [node.op_type for node in loaded.model.graph]
    (17, ['Relu'])
    """
    limits = limits or Limits()
    with open_source(source, limits.mapped_above) as file:
        return load_opened(file, limits, outputs, keeps_original=keeps_original)


def load_opened(
    file: SourceBytes, limits: Limits, outputs: object = None, *, keeps_original: bool = False
) -> LoadedModel:
    """Return the checked model of an open source, as `load` does."""
    headline = f"cannot load {file.name}"
    try:
        return _load(file, headline, limits, outputs, keeps_original)
    except external_data.Problem as problem:
        raise ModelError(headline, [str(problem)]) from problem


def load_built(model: ir.Model, limits: Limits | None = None) -> LoadedModel:
    """Return a model of this process in the form in which `load` returns its file; types are inferred, nothing is
    checked.

    A model without the mark of such models (`CHECKED`), or with weights in files, is loaded like its file.

    Parameters
    ----------
    model : onnx_ir.Model
        A model from `graph.tensor.emit.build`. Not changed.
    limits : Limits, optional
        Bounds on sizes, if the model is loaded.

    Raises
    ------
    InputError
        If the weights are larger than a protobuf message.
    """
    content = embedding.content(model)
    weights = [value.const_value for value in model.graph.initializers.values()]
    if CHECKED_KEY not in model.meta or any(isinstance(tensor, ir.ExternalTensor) for tensor in weights):
        return load(content, limits=limits)
    own = in_form(model.clone())
    types = infer_types(lean_model(own, keep_declared=True, keep_inner=True))
    set_types(own, types.types)
    own.meta[CHECKED_KEY] = True
    return LoadedModel(
        model=own,
        digest=digest_of(content),
        path=None,
        opset=own.opset_imports[""],
        content=content,
        is_inferred=types.is_inferred,
        has_regions=any(any(region_of(node)) for node in own.graph),
    )


def _load(
    file: SourceBytes, headline: str, limits: Limits, wanted: object, keeps_original: bool
) -> LoadedModel:
    proto = parse(file.content, headline)
    outputs = () if wanted is None else select(proto, wanted, file.name)
    guards.check_message(proto, limits, headline)
    parts = _locate_parts(proto, file, headline)
    held = _read_small_parts(file, parts.values(), limits.mapped_above)
    files = _files(file, [part for part in parts.values() if part not in held])
    weights = _weights(proto, file, parts, held, files)
    # Without the bytes of the large weights, which protobuf frees only with the whole message.
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    original = None
    if keeps_original:
        original = Original(proto, memoryview(file.content), parts, held, files)
    model = normalize(bare, weights, headline)
    lean = lean_model(model, keep_declared=True, keep_inner=True)
    guards.check_operators(model, lean, headline)
    types = infer_types(lean)
    guards.check_types(model, types, limits, headline)
    set_types(model, types.types)
    if files.files:
        model.meta[CHECK] = files
        if not files.are_unchanged():
            raise ModelError(headline, [CHANGED_TEXT])
    model.meta[CHECKED_KEY] = True
    return LoadedModel(
        model=model,
        digest=digest_of(file.content, outputs, _content_of_parts(parts.values(), held) if parts else ()),
        # The folder of a link may contain the links to external data.
        path=file.named if parts else file.path,
        opset=model.opset_imports[""],
        files=files,
        content=file.content if isinstance(file.content, bytes) and not parts else None,
        is_inferred=types.is_inferred,
        has_regions=any(any(region_of(node)) for node in model.graph),
        outputs=outputs,
        original=original,
    )


# External data by the text of its reference, and its parts in memory.
Parts = dict[str, FilePart]
DataInMemory = Mapping[FilePart, bytes]


def _locate_parts(proto: onnx.ModelProto, file: SourceBytes, headline: str) -> Parts:
    parts: Parts = {}
    problems = []
    for tensor in external_tensors(proto.graph):
        try:
            parts[reference(tensor)] = external_data.locate(tensor, file.named)
        except external_data.Problem as problem:
            problems.append(f"initializer {tensor.name!r}: {problem}")
    if problems:
        raise ModelError(headline, guards.list_problems(problems))
    return parts


def _read_small_parts(file: SourceBytes, parts: Iterable[FilePart], mapped_above: int) -> DataInMemory:
    """Return the external data's content, read into memory if it and the model are small together."""
    ranges = set(parts)
    if file.mapped or len(file.content) + sum(part.length for part in ranges) > mapped_above:
        return {}
    return {part: external_data.content(part) for part in ranges}


def _files(file: SourceBytes, parts: Iterable[FilePart]) -> SourceFiles:
    """Return the files that weights are mapped from."""
    found = [file.mapped] if file.mapped else []
    for part in {part.location: part for part in parts}.values():
        with external_data.open_checked(part) as descriptor:
            found.append(identify_file(part.location, descriptor))
    return SourceFiles(tuple(found))


def _weights(
    proto: onnx.ModelProto, file: SourceBytes, parts: Parts, held: DataInMemory, files: SourceFiles
) -> dict[str, ir.TensorProtocol]:
    """Take the large and the external initializers of the graph out of the messages; return them by their names.

    Their bytes are located in the file, so that no other copy of them remains.
    """
    taken: dict[str, ir.TensorProtocol] = {}
    at = 0
    for tensor in proto.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            part = parts[reference(tensor)]
            taken[tensor.name] = (
                _view_tensor(tensor, memoryview(held[part]))
                if part in held
                else _map_tensor(tensor, part.location, part.offset, part.length, files)
            )
        elif len(raw := tensor.raw_data) >= _PAGE:
            start = file.content.find(raw[:64], at)
            view = memoryview(file.content)[start : start + len(raw)]
            if start >= 0 and view == raw:
                at = start + len(raw)
                taken[tensor.name] = (
                    _map_tensor(tensor, file.mapped.path, start, len(raw), files)
                    if file.mapped
                    else _view_tensor(tensor, view)
                )
            else:
                taken[tensor.name] = _view_tensor(tensor, memoryview(raw))
        else:
            continue
        tensor.ClearField("raw_data")
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    for tensor in external_tensors(proto.graph) if parts else ():
        part = parts[reference(tensor)]
        tensor.raw_data = held[part] if part in held else external_data.content(part)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return taken


def _map_tensor(tensor: TensorProto, path: str, offset: int, length: int, files: SourceFiles) -> FileTensor:
    # The real path and no `base_dir`: onnx_ir refuses links below one, and these have been checked.
    dtype, shape = ir.DataType(tensor.data_type), ir.Shape(tensor.dims)
    mapped = FileTensor(path, offset, length, dtype, shape=shape, name=tensor.name)
    mapped.files = files
    return mapped


def _view_tensor(tensor: TensorProto, view: memoryview) -> ir.TensorProtocol:
    dtype = ir.DataType(tensor.data_type)
    # numpy has no view of packed elements.
    if dtype.bitwidth < 8:
        packed = TensorProto(
            name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=bytes(view)
        )
        return ir.serde.deserialize_tensor(packed)
    array = np.frombuffer(view.toreadonly(), np.dtype(dtype.numpy()).newbyteorder("<")).reshape(tensor.dims)
    return ir.Tensor(array, dtype=dtype, shape=ir.Shape(tensor.dims), name=tensor.name)


def _content_of_parts(parts: Collection[FilePart], held: DataInMemory) -> Iterator[bytes]:
    """Yield the bytes of external data, which may be partly in memory; raise `Problem` if a file changed."""
    for part in sorted(set(parts)):
        # Without lengths, two lists of parts with the same bytes in all would have one digest.
        yield f"\n{part.length}\n".encode()
        if part in held:
            yield held[part]
            continue
        with external_data.open_checked(part) as descriptor:
            # In blocks, which do not count as resident memory, unlike mapped pages.
            at, end = part.offset, part.offset + part.length
            while at < end:
                block = portable.read_at(descriptor, min(_BLOCK_BYTES, end - at), at)
                if not block:
                    raise external_data.Problem(
                        f"{part.location} became shorter while it was read; load the model again"
                    )
                yield block
                at += len(block)
