"""Places of the tensor data that a skeleton refers to: in the model file itself, or in files beside it.

Initializers of the main graph and of bodies may be external.  Tensors in attributes may not: no engine reads
those, so a file that has them is refused.  Embedded data, taken out by `graph.model.wire`, is found by
the same entries under the name `wire.EMBEDDED`.  Sizes and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from math import prod
from typing import NamedTuple

import onnx
from onnx import TensorProto

from dask_ferro.graph.ir.order import all_nodes, bodies
from dask_ferro.graph.model import external_data, wire
from dask_ferro.graph.model.checks import tensors
from dask_ferro.graph.model.source_files import SourceFiles

# The entries of a tensor's reference -> the place that was checked.
Places = dict[tuple[str, ...], external_data.FilePart]


class Original(NamedTuple):
    """A model file as it was read, for writing it again.

    Attributes
    ----------
    proto : onnx.ModelProto
        The file's messages, with references in place of large data. Not to be changed.
    view : memoryview
        The file's bytes, in memory or mapped.
    places : Places
        The places of all data that the messages refer to.
    held : mapping of FilePart to bytes
        External data in memory; other external data is read from its files.
    files : SourceFiles
        The mapped files; calling it checks that they are unchanged.
    """

    proto: onnx.ModelProto
    view: memoryview
    places: Places
    held: Mapping[external_data.FilePart, bytes]
    files: SourceFiles

    def data(self, tensor: TensorProto) -> bytes:
        """Return the data that a tensor of the messages refers to.

        Raises
        ------
        ConfigError, external_data.Problem
            A file changed after the model was loaded.
        """
        span = self.places[_reference(tensor)]
        if span in self.held:
            return self.held[span]
        if not is_embedded(tensor):
            return external_data.content(span)
        # Before and after: a change during the copy could not be noticed later.
        self.files()
        content = bytes(self.view[span.offset : span.offset + span.length])
        self.files()
        return content


def referring_inside(proto: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yield the tensors in attributes and bodies of a model's nodes whose data lies elsewhere."""
    nodes = list(all_nodes(chain(proto.graph.node, *(function.node for function in proto.functions))))
    held = chain.from_iterable(body.initializer for body in chain.from_iterable(map(bodies, nodes)))
    yield from (tensor for tensor in held if tensor.data_location == TensorProto.EXTERNAL)
    yield from chain.from_iterable(map(_in_attributes, nodes))


def locate(proto: onnx.ModelProto, model: str | None, size: int) -> tuple[Places, list[str]]:
    """Return the place of all data outside of the skeleton `proto`, and the problems of references to it.

    Parameters
    ----------
    model : str or None
        Name of the model file, which may be a link, in its real folder; None for a model from memory.
    size : int
        Bytes of the file that the skeleton was made of.
    """
    places: Places = {}
    wrong: list[str] = []
    nodes = list(all_nodes(chain(proto.graph.node, *(function.node for function in proto.functions))))
    referring = [
        (f"initializer {tensor.name!r}", tensor)
        for tensor in _initializers(proto.graph, nodes)
        if tensor.data_location == TensorProto.EXTERNAL
    ]
    for node in nodes:
        referring += [(f"node {node.name!r} ({node.op_type})", tensor) for tensor in _in_attributes(node)]
    for where, tensor in referring:
        # `checks.problems` has reported these already, and without a size there is no place to check.
        if any(tensors.problems(tensor)):
            continue
        try:
            if where.startswith("node") and not is_embedded(tensor):
                raise external_data.Problem(
                    f"an attribute has external data ({_location(tensor)!r}), which only initializers may; "
                    "make it one, or store it in the model"
                )
            _place(tensor, model, size, places)
        except external_data.Problem as problem:
            wrong.append(f"{where}: {problem}")
    return places, wrong


def _place(tensor: TensorProto, model: str | None, size: int, places: Places) -> None:
    """Check the reference of `tensor`, add it to `places`, and write it in its shortest form."""
    nbytes = tensors.size(tensor.data_type, prod(tensor.dims))
    if tensor.data_type == TensorProto.STRING:
        raise external_data.Problem("strings cannot be external data; store them in the model")
    if is_embedded(tensor):
        span = _embedded_span(tensor, nbytes, size)
    else:
        span = external_data.locate(tensor, model, nbytes)
    # Two references to one place are then equal, so it is read, mapped and hashed once.
    del tensor.external_data[:]
    for key in ("location", "offset", "length"):
        tensor.external_data.add(key=key, value=str(getattr(span, key)))
    places[_reference(tensor)] = span


def _embedded_span(tensor: TensorProto, nbytes: int, size: int) -> external_data.FilePart:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    offset, length = (
        external_data.number(entries, "offset", 0),
        external_data.number(entries, "length", nbytes),
    )
    if length != nbytes:
        raise external_data.Problem(
            f"its raw_data has {length} bytes, and its dtype and dimensions need {nbytes}"
        )
    if offset + length > size:
        raise external_data.Problem("its data lies outside of the file; the file is damaged")
    # Zeros for the identity: the model file is open already, and its own is checked with the digest.
    return external_data.FilePart(wire.EMBEDDED, offset, length, size, (0, 0, 0, 0, 0))


def is_embedded(tensor: TensorProto) -> bool:
    """Return whether the data of `tensor` is a part of the model file."""
    return _location(tensor) == wire.EMBEDDED


def _location(tensor: TensorProto) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def _reference(tensor: TensorProto) -> tuple[str, ...]:
    return tuple(entry.value for entry in tensor.external_data)


def _in_attributes(node: onnx.NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        for tensor in [attribute.t] if attribute.HasField("t") else attribute.tensors:
            if tensor.data_location == TensorProto.EXTERNAL:
                yield tensor


def embed_attributes(nodes: Iterable[onnx.NodeProto], view: memoryview) -> None:
    """Copy embedded data back into the attributes of nodes, which `locate` has checked."""
    for node in nodes:
        for tensor in _in_attributes(node):
            _, offset, length = _reference(tensor)
            tensor.raw_data = bytes(view[int(offset) : int(offset) + int(length)])
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")


def external_spans(
    graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto], places: Places
) -> list[external_data.FilePart]:
    """Return the parts of other files that a graph, with these nodes at any depth, uses."""
    tensors = _initializers(graph, nodes)
    used = [tensor for tensor in tensors if tensor.external_data]
    return [places[_reference(tensor)] for tensor in used if not is_embedded(tensor)]


def _initializers(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> Iterator[TensorProto]:
    """Yield the initializers of `graph` and of the bodies of `nodes`."""
    yield from graph.initializer
    for body in chain.from_iterable(map(bodies, nodes)):
        yield from body.initializer
