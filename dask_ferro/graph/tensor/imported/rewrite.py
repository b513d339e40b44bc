"""Model files written again with other values for some weights: the same messages, names and storage.

Weights that the file held itself are written into the new file, and those beside it into one file `path` + ".data",
each at a multiple of a page where it is large, so that it can be mapped.  Both are written under other names and take
their places when they are whole.  Sizes and offsets are bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.messages import external_tensors
from dask_ferro.graph.model import external_data
from dask_ferro.graph.model.external_data import Original, reference
from dask_ferro.graph.model.outputs import select

# Large tensors begin at a page, as ONNX recommends.
_PAGE = 4096
_DATA_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data",
                "external_data", "data_location")  # fmt: skip

Values = Mapping[str, npt.NDArray[np.generic]]


def rewrite(
    original: Original, values: Values, path: str, outputs: Sequence[onnx.ValueInfoProto] | None = None
) -> None:
    """Write a model's file again with new values of initializers, by their names in the file, of the same types.

    The `outputs` are those of the written model, and may be values inside of the graph; by default those of the file.

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
            _fill(proto, original, values, beside, file)
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


def _fill(proto: onnx.ModelProto, original: Original, values: Values, beside: str, file: BinaryIO) -> None:
    """Write all data that the messages refer to, and the new values, each where its tensor's data was."""
    own = list(proto.graph.initializer)
    # The graph's own come first; those of bodies may have the same names.
    inner = external_tensors(proto.graph)[sum(map(_is_external, own)) :]
    # By the text of a reference, its offset and length: tensors of one place share one place in the new file too.
    places: dict[str, tuple[int, int]] = {}
    for tensor, new in zip_longest([*own, *inner], [values.get(tensor.name) for tensor in own]):
        is_external = _is_external(tensor)
        if new is None and not is_external:
            continue
        place = reference(tensor) if new is None else ""
        content = (
            b"" if place in places else _data(original, tensor) if new is None else ir.Tensor(new).tobytes()
        )
        for field in _DATA_FIELDS:
            tensor.ClearField(field)
        if not is_external:
            tensor.raw_data = content
            continue
        if (span := places.get(place)) is None:
            if len(content) >= _PAGE:
                file.write(bytes(-file.tell() % _PAGE))
            span = file.tell(), len(content)
            file.write(content)
        if new is None:
            places[place] = span
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in zip(("location", "offset", "length"), (beside, *span), strict=True):
            tensor.external_data.add(key=key, value=str(value))


def _is_external(tensor: onnx.TensorProto) -> bool:
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def _data(original: Original, tensor: onnx.TensorProto) -> bytes:
    try:
        return original.data(tensor)
    except external_data.Problem as problem:
        raise ConfigError(f"save: weight {tensor.name!r}: {problem}") from problem
