"""Model files written again with other values for some weights: the same messages, names and storage.

Weights that the file held itself are written into the new file, and those beside it into one file `path` + ".data",
each at a multiple of a page where it is large, so that it can be mapped.  Both are written under other names and take
their places when they are whole.  Sizes and offsets are bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.model import external_data
from dask_ferro.graph.model.external_data import Original, external_tensors, reference
from dask_ferro.graph.model.outputs import select

# Large tensors begin at a page, as ONNX recommends.
_PAGE = 4096
_DATA_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data",
                "external_data", "data_location")  # fmt: skip

Values = Mapping[str, npt.NDArray[np.generic]]


class DataSpan(NamedTuple):
    """A part of the file beside the model."""

    offset: int
    length: int


class _DataFile(NamedTuple):
    """The file beside the model, and the new places of data by the text of its old ones, and the text of new ones."""

    name: str
    file: BinaryIO
    places: dict[str, DataSpan]


def rewrite(
    original: Original, values: Values, path: str, outputs: Sequence[onnx.ValueInfoProto] | None = None
) -> None:
    """Write a model's file again.

    Parameters
    ----------
    original : Original
    values : mapping of str to array
        New values of initializers by their names in the file, of the same dtypes and shapes.
    path : str
    outputs : sequence of ValueInfoProto, optional
        The outputs of the written model, which may be values inside of the graph; by default those of the file.

    Raises
    ------
    ConfigError
        A folder that does not exist, or a file of the model that changed after it was loaded.
    """
    folder, name = os.path.split(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise ConfigError(f"save: {path!r}: folder {folder!r} does not exist; make it first")
    proto = original.messages()
    if outputs is not None:
        _cut(proto, outputs)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as part:
        beside = f"{name}.data"
        with open(os.path.join(part, beside), "wb") as file:
            _fill(proto, original, values, _DataFile(beside, file, {}))
            is_used = file.tell() > 0
        with open(os.path.join(part, name), "wb") as file:
            file.write(proto.SerializeToString(deterministic=True))
        for written in (beside, name) if is_used else (name,):
            os.replace(os.path.join(part, written), os.path.join(folder, written))


def _cut(proto: onnx.ModelProto, outputs: Sequence[onnx.ValueInfoProto]) -> None:
    known, wanted = {info.name for info in proto.graph.output}, [info.name for info in outputs]
    proto.graph.output.extend(info for info in outputs if info.name not in known)
    select(proto, wanted, "")
    # A value is declared once, and these are outputs now.
    declared = [info for info in proto.graph.value_info if info.name not in wanted]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(declared)


def _fill(proto: onnx.ModelProto, original: Original, values: Values, data: _DataFile) -> None:
    """Write all data that the messages refer to, and the new values, each where its tensor's data was."""
    for tensor in proto.graph.initializer:
        if (new := values.get(tensor.name)) is not None:
            _store(tensor, ir.Tensor(new).tobytes(), data)
        elif tensor.data_location == onnx.TensorProto.EXTERNAL:
            _move(tensor, original, data)
    own = [tensor for tensor in proto.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    # The graph's own come first, and refer to the new file by now.
    for tensor in external_tensors(proto)[len(own) :]:
        _move(tensor, original, data)


def _move(tensor: onnx.TensorProto, original: Original, data: _DataFile) -> None:
    """Write a tensor's data anew; tensors of one place in a file share one place in the new file too."""
    place = reference(tensor)
    if place in data.places:
        _refer(tensor, data, data.places[place])
    elif (written := _store(tensor, _data(original, tensor), data)) is not None:
        data.places[place] = written


def _store(tensor: onnx.TensorProto, content: bytes, data: _DataFile) -> DataSpan | None:
    """Write a tensor's data where it was, in the model's file or beside it; return its new place beside it."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        _clear(tensor)
        tensor.raw_data = content
        return None
    if len(content) >= _PAGE:
        data.file.write(bytes(-data.file.tell() % _PAGE))
    place = DataSpan(data.file.tell(), len(content))
    data.file.write(content)
    _refer(tensor, data, place)
    return place


def _data(original: Original, tensor: onnx.TensorProto) -> bytes:
    try:
        return original.data(tensor)
    except external_data.Problem as problem:
        raise ConfigError(f"save: weight {tensor.name!r}: {problem}") from problem


def _clear(tensor: onnx.TensorProto) -> None:
    for field in _DATA_FIELDS:
        tensor.ClearField(field)


def _refer(tensor: onnx.TensorProto, data: _DataFile, place: DataSpan) -> None:
    _clear(tensor)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", data.name), ("offset", place.offset), ("length", place.length)):
        tensor.external_data.add(key=key, value=str(value))
