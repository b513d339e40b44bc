"""Model files written again with other values for some weights: the same messages, names and storage.

Weights that the file held itself are written into the new file, and those beside it into one file `path` + ".data",
each at a multiple of a page where it is large, so that it can be mapped.  Both are written under other names and take
their places when they are whole.  Sizes and offsets are bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.model import external_data
from dask_ferro.graph.model.checks.outputs import select
from dask_ferro.graph.model.data_places import Original, is_embedded, referring

# Large tensors begin at a page, as ONNX recommends.
_PAGE = 4096
_DATA_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data",
                "external_data", "data_location")  # fmt: skip

Values = Mapping[str, npt.NDArray[np.generic]]


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
    proto = onnx.ModelProto()
    proto.CopyFrom(original.proto)
    if outputs is not None:
        _cut(proto, outputs)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as part:
        beside = f"{name}.data"
        with open(os.path.join(part, beside), "wb") as file:
            _fill(proto, original, values, file, beside)
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


def _fill(proto: onnx.ModelProto, original: Original, values: Values, file: BinaryIO, beside: str) -> None:
    """Write all data that the messages refer to, and the new values, each where its tensor's data was."""
    outside = {id(tensor): tensor for tensor in referring(proto)}
    # Tensors of one place in a file that keep their value share one place in the new file.
    places: dict[str, tuple[int, int]] = {}
    own = {id(tensor): values[tensor.name] for tensor in proto.graph.initializer if tensor.name in values}
    rest = (tensor for tensor in proto.graph.initializer if id(tensor) in own and id(tensor) not in outside)
    for tensor in (*outside.values(), *rest):
        is_beside = id(tensor) in outside and not is_embedded(tensor)
        key = str(tensor.external_data) if id(tensor) not in own else ""
        if is_beside and key in places:
            _refer(tensor, beside, *places[key])
            continue
        new = own.get(id(tensor))
        content = _data(original, tensor) if new is None else ir.Tensor(new).tobytes()
        if not is_beside:
            _clear(tensor)
            tensor.raw_data = content
            continue
        place = _append(file, content), len(content)
        places |= {key: place} if key else {}
        _refer(tensor, beside, *place)


def _data(original: Original, tensor: onnx.TensorProto) -> bytes:
    try:
        return original.data(tensor)
    except external_data.Problem as problem:
        raise ConfigError(f"save: weight {tensor.name!r}: {problem}") from problem


def _append(file: BinaryIO, content: bytes) -> int:
    if len(content) >= _PAGE:
        file.write(bytes(-file.tell() % _PAGE))
    offset = file.tell()
    file.write(content)
    return offset


def _clear(tensor: onnx.TensorProto) -> None:
    for field in _DATA_FIELDS:
        tensor.ClearField(field)


def _refer(tensor: onnx.TensorProto, beside: str, offset: int, length: int) -> None:
    _clear(tensor)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", beside), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
