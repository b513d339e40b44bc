"""The loader: an ONNX file, bytes or `ModelProto` becomes a checked `onnx_ir.Model` in one form.

    bytes --wire--> skeleton --protobuf--> check, external --normal--> infer, bounds --onnx_ir--> Loaded

A model up to `Limits.mapped_above` is read into memory: what happens to its files afterwards changes nothing.  A
larger one is mapped and its weights are never copied: large tensors of the result point into the file (or into the
external files that it names), so processes share their pages, and `Loaded.files` tells when one changed.  Every
problem that one pass finds is reported at once, and each pass runs only on what the one before let through, so ONNX's
own libraries never see a model that could make them read elsewhere, recurse, or allocate without bound.  The user's
own path may be a symbolic link or a hard link.  Sizes and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto

from dask_ferro.errors import ModelError
from dask_ferro.graph.ir import inference, inference_limits, ml_types, strip_weights
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.inference import TypedModel
from dask_ferro.graph.ir.nodes import bodies as bodies_of
from dask_ferro.graph.ir.order import all_nodes, bodies
from dask_ferro.graph.model import data_places, digest, external_data, wire
from dask_ferro.graph.model.checks import dtypes, value_sizes
from dask_ferro.graph.model.checks.limits import Limits
from dask_ferro.graph.model.checks.outputs import class_problems, select
from dask_ferro.graph.model.checks.problems import Findings, check
from dask_ferro.graph.model.normalize import maps_to_arrays, normalize
from dask_ferro.graph.model.own_models import accepted, is_ours
from dask_ferro.graph.model.source import Source, SourceBytes, opened, parse
from dask_ferro.graph.model.source_files import CHECK, FileTensor, SourceFiles, seen
from dask_ferro.graph.model.upgrade import is_old, upgrade

__all__ = ["Limits", "Loaded", "load"]

# An output's labels of its columns.
Classes = Mapping[str, Sequence[str | int]]


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
    content : memoryview or None
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
    content: memoryview | None = None
    is_inferred: bool = False
    outputs: tuple[str, ...] = ()
    original: data_places.Original | None = None


def load(
    source: Source, *, limits: Limits | None = None, outputs: object = None, keeps_original: bool = False
) -> Loaded:
    """Return the checked model of `source`; the same source gives the same model in every process.

    Parameters
    ----------
    source : path, bytes or onnx.ModelProto
        A file is read; a large one is mapped.  Bytes are viewed in place (keep them unchanged).  A `ModelProto` is
        serialized once, so it must be under 2 GiB.
    limits : Limits, optional
        Bounds on sizes.
    outputs : str or collection of str, optional
        The outputs to keep, in this order; nodes, weights and inputs that only others need are not even checked.
    keeps_original : bool, optional
        Whether to keep the file's own messages too, so that it can be written again with other weights.

    Raises
    ------
    ModelError
        The file is damaged, inconsistent, unsafe or too large; lists every problem.
    UnsupportedOp
        The only problem: operators that ONNX does not define.
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


def _load(file: SourceBytes, headline: str, limits: Limits, wanted: object, keeps_original: bool) -> Loaded:
    proto = parse(file.view, headline, limits.structure_bytes)
    outputs = select(proto, wanted, file.name)
    found = check(proto, _limits(proto, file, limits))
    found_places, wrong = data_places.locate(proto, file.named, len(file.view))
    found.wrong += wrong
    found.raise_any(headline)
    # Before its normal form, which reuses these messages.
    kept = _copied(proto) if keeps_original else None
    classes = maps_to_arrays(proto.graph)
    proto = _normalized(proto, headline)
    # Once for all steps that look at each node: none of them adds or removes one.
    nodes = list(all_nodes(proto.graph.node))
    _keep_known_devices(proto, nodes)
    data_places.embed_attributes(nodes, file.view)
    typed = _typed(proto, found, limits, classes, headline)
    spans = data_places.external_spans(proto.graph, nodes, found_places)
    held = _held(file, spans, limits.mapped_above)
    files = _files(file, spans, held)
    model = _to_ir(proto, typed, file, held, files, headline)
    return Loaded(
        model=accepted(_with_classes(model, classes)),
        digest=digest.of_outputs(_digest(file, spans, held), outputs),
        # Beside a link may lie the links to external data.
        path=file.named if spans else file.path,
        weight_bytes=_weight_bytes(model),
        opset=model.opset_imports[""],
        files=files,
        content=None if file.mapped or spans else file.view,
        is_inferred=typed.is_inferred,
        outputs=outputs,
        original=None
        if kept is None
        else data_places.Original(kept, file.view, found_places, held or {}, files),
    )


def _typed(
    proto: onnx.ModelProto, found: Findings, limits: Limits, classes: Classes, headline: str
) -> TypedModel:
    """Return the types of a model in normal form; raise an error with all problems."""
    bare = strip_weights.stripped(proto)
    bounds = inference_limits.growth(bare.graph)
    found.wrong += inference_limits.problems(bare, bounds)
    found.raise_any(headline)
    inference.name_rows(bare.graph)
    typed = inference.typed(bare, bounds)
    # Both after inference, so wrong names are reported first, and wrong types at the second try.
    found.wrong += [
        *value_sizes.problems(typed.proto, limits.value_bytes),
        *chain(dtypes.problems(proto, typed.types), class_problems(typed.types, classes)),
    ]
    found.raise_any(headline)
    return typed


def _copied(proto: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    return copy


def _limits(proto: onnx.ModelProto, file: SourceBytes, limits: Limits) -> Limits:
    # The digest of the whole file is computed only for models with Sleep nodes.
    sleeps = any(node.domain == OWN_DOMAIN for node in proto.graph.node)
    return limits.of_ours() if sleeps and is_ours(file.view) else limits


def _weight_bytes(model: ir.Model) -> int:
    weights = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in weights if tensor is not None)


def _with_classes(model: ir.Model, classes: Classes) -> ir.Model:
    for value in model.graph.outputs:
        if labels := classes.get(value.name or ""):
            value.meta[ml_types.CLASSES] = labels
    return model


def _normalized(proto: onnx.ModelProto, headline: str) -> onnx.ModelProto:
    try:
        # Twice for an old model: its upgrade adds nodes, which need names and an order.
        proto = normalize(proto)
        return normalize(upgrade(proto)) if is_old(proto) else proto
    except Exception as error:
        if not proto.functions:
            raise
        raise ModelError(headline, [f"its local functions cannot be written out: {error}"]) from error


def _keep_known_devices(proto: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Remove from the device configurations of nodes what the model does not declare, or its normal form renamed."""
    known = {configuration.name for configuration in proto.configuration if configuration.name}
    for node in nodes:
        if node.device_configurations:
            values = {*node.input, *node.output} - {""}
            named = [told for told in node.device_configurations if told.configuration_id in known]
            kept = [_with_known_values(told, values) for told in named]
            del node.device_configurations[:]
            node.device_configurations.extend(kept)


def _with_known_values(
    told: onnx.NodeDeviceConfigurationProto, values: Set[str]
) -> onnx.NodeDeviceConfigurationProto:
    # Not `remove`, which compares with all before it: 4,000 entries of a node took 0.5 s, 100,000 five minutes.
    kept = onnx.NodeDeviceConfigurationProto()
    kept.CopyFrom(told)
    del kept.sharding_spec[:]
    kept.sharding_spec.extend(spec for spec in told.sharding_spec if spec.tensor_name in values)
    return kept


# External data in memory by its place; None where it stays in its files.
Held = Mapping[external_data.FilePart, bytes] | None


def _held(file: SourceBytes, spans: Sequence[external_data.FilePart], mapped_above: int) -> Held:
    """Return the external data's content, read into memory if it and the model are small together."""
    ranges = set(spans)
    if file.mapped or len(file.view) + sum(span.length for span in ranges) > mapped_above:
        return None if spans else {}
    return {span: external_data.content(span) for span in ranges}


def _files(file: SourceBytes, spans: Sequence[external_data.FilePart], held: Held) -> SourceFiles:
    """Return the files that weights are mapped from."""
    found = []
    if file.mapped and file.path is not None and file.descriptor is not None:
        found.append(seen(file.path, file.descriptor))
    for span in {span.location: span for span in spans if held is None}.values():
        with external_data.opened(span) as descriptor:
            found.append(seen(span.location, descriptor))
    return SourceFiles(found)


def _digest(file: SourceBytes, spans: Sequence[external_data.FilePart], held: Held) -> str:
    if held is not None and not file.mapped:
        return digest.of_memory(file.view, held)
    if file.path is None or file.descriptor is None:
        return digest.of_bytes(file.view)
    return digest.of_file(file.path, file.descriptor, spans)


# Conversion of messages to onnx_ir.


def _to_ir(
    proto: onnx.ModelProto,
    typed: TypedModel,
    file: SourceBytes,
    held: Held,
    files: SourceFiles,
    headline: str,
) -> ir.Model:
    types = typed.types
    for info in [*proto.graph.input, *proto.graph.output]:
        if info.name in types:
            info.type.CopyFrom(types[info.name])
    # Types come from inference, which was given the declared ones.
    del proto.graph.value_info[:]
    computed = set(chain.from_iterable(node.output for node in proto.graph.node))
    computed.difference_update(info.name for info in proto.graph.output)
    for name in sorted(computed & types.keys()):
        proto.graph.value_info.add(name=name).type.CopyFrom(types[name])
    maps = strip_weights.take_maps(proto.graph)
    try:
        model: ir.Model = ir.serde.deserialize_model(proto)
    except ir.serde.SerdeError as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise ModelError(headline, [f"onnx_ir cannot hold it: {reason}"]) from error
    for value in inference.values(model.graph):
        if value.name in maps:
            value.meta[strip_weights.TYPE_PROTO] = maps[value.name]
    _type_bodies(model.graph, typed.proto.graph)
    by_place: dict[tuple[object, ...], bytes] = {span[:3]: content for span, content in (held or {}).items()}
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _outside(value.const_value, file, by_place, files)
    if files:
        model.meta[CHECK] = files
    return model


def _type_bodies(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    """Set the dtypes of values inside bodies; their shapes may change from trip to trip."""
    owners = {tuple(node.output): node for node in inferred.node if bodies(node)}
    for node in graph if owners else ():
        found = owners.get(tuple(value.name or "" for value in node.outputs))
        for body, its in zip(bodies_of(node), bodies(found), strict=False) if found else ():
            _type_body(body, its)
            _type_bodies(body, its)


def _type_body(body: ir.Graph, inferred: onnx.GraphProto) -> None:
    types = inference.types_of(inferred)
    for value in inference.values(body):
        told = inference.from_type(types[value.name]) if value.name in types else inference.UNKNOWN
        if told.kind == "tensor" and told.dtype and value.type is None and value.const_value is None:
            value.type = ir.TensorType(told.dtype)


def _outside(
    tensor: ir.ExternalTensor,
    file: SourceBytes,
    held: Mapping[tuple[object, ...], bytes],
    files: SourceFiles,
) -> ir.TensorProtocol:
    """Return `tensor` with its data: a mapped part of a file, or a view of the bytes in memory."""
    embedded = tensor.location == wire.EMBEDDED
    if embedded and not file.mapped:
        return _viewed(tensor, file.view, tensor.offset or 0)
    place = str(tensor.location), tensor.offset, tensor.length
    if not embedded and place in held:
        return _viewed(tensor, memoryview(held[place]), 0)
    assert file.path is not None
    # The real path and no `base_dir`: onnx_ir refuses links below one, and these have been checked.
    mapped = FileTensor(
        file.path if embedded else str(tensor.location),
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
    )
    mapped.files = files
    return mapped


def _viewed(tensor: ir.ExternalTensor, view: memoryview, offset: int) -> ir.TensorProtocol:
    length = tensor.length or 0
    # numpy has no view of packed elements.
    if tensor.dtype.bitwidth < 8:
        raw = bytes(view[offset : offset + length])
        packed = TensorProto(
            name=tensor.name, data_type=tensor.dtype.value, dims=tensor.shape.numpy(), raw_data=raw
        )
        return ir.serde.deserialize_tensor(packed)
    dtype = np.dtype(tensor.dtype.numpy()).newbyteorder("<")
    array = np.frombuffer(view[offset : offset + length].toreadonly(), dtype).reshape(tensor.shape.numpy())
    return ir.Tensor(array, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)
