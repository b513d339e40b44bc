"""Write a model file again with other values for some weights: the same messages and names.

Each weight is stored as in the file that was read.  Weights inside the file are written into the new file, and
external weights into one file `path` + ".data", large weights at a multiple of a page, so that they can be mapped.
Sizes and offsets are bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import TensorProto

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.messages import external_tensors
from dask_ferro.graph.model import external_data
from dask_ferro.graph.model.embedding import publish
from dask_ferro.graph.model.external_data import FilePart, reference
from dask_ferro.graph.model.outputs import select
from dask_ferro.graph.model.source import SourceFiles

# Large tensors begin at a page, as ONNX recommends.
_PAGE = 4096
_DATA_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data",
                "external_data", "data_location")  # fmt: skip

Values = Mapping[str, npt.NDArray[np.generic]]


class Original(NamedTuple):
    """A model file as it was read, for writing it again.

    Attributes
    ----------
    proto : onnx.ModelProto
        The file's messages without its large weights. Not to be changed.
    content : memoryview
        The file's bytes, in memory or mapped.
    parts : mapping of str to FilePart
        The places of external data by the text of the reference (`reference`).
    held : mapping of FilePart to bytes
        External data in memory; other external data is read from its files.
    files : SourceFiles
        The mapped files; calling it checks that they are unchanged.
    """

    proto: onnx.ModelProto
    content: memoryview
    parts: Mapping[str, FilePart]
    held: Mapping[FilePart, bytes]
    files: SourceFiles

    def write(self, path: str, values: Values, outputs: Sequence[onnx.ValueInfoProto] | None = None) -> None:
        """Write the file again, with new values of initializers by their names in the file, of the same types.

        `outputs` are the outputs of the written model, and may be values inside of the graph; default: the file's
        outputs.

        Raises
        ------
        InputError
            If a folder does not exist, or a file of the model changed after it was loaded.
        """
        with publish(path, "save") as part:
            proto, beside = self._messages(), f"{part}.data"
            if outputs is not None:
                _replace_outputs(proto, outputs)
            with open(beside, "wb") as file:
                self._fill(proto, values, os.path.basename(beside), file)
            if not os.path.getsize(beside):
                os.remove(beside)
            with open(part, "wb") as file:
                file.write(proto.SerializeToString(deterministic=True))

    def _messages(self) -> onnx.ModelProto:
        """Return all of the file's messages, parsed again."""
        self.files()
        proto = onnx.ModelProto()
        proto.ParseFromString(self.content)
        # Before and after: a change meanwhile could not be noticed later.
        self.files()
        return proto

    def _fill(self, proto: onnx.ModelProto, values: Values, beside: str, file: BinaryIO) -> None:
        """Write all data that the messages refer to, and the new values, in the places of their tensors' data."""
        own = list(proto.graph.initializer)
        # The graph's own initializers come first; initializers of bodies may have the same names.
        inner = external_tensors(proto.graph)[sum(map(_is_external, own)) :]
        # By the text of a reference, its offset and length: tensors of one place share one place in the new file too.
        places: dict[str, tuple[int, int]] = {}
        for tensor, new in zip_longest([*own, *inner], [values.get(tensor.name) for tensor in own]):
            is_external = _is_external(tensor)
            if new is None and not is_external:
                continue
            place = reference(tensor) if new is None else ""
            data = b"" if place in places else self._data(tensor) if new is None else ir.Tensor(new).tobytes()
            for field in _DATA_FIELDS:
                tensor.ClearField(field)
            if not is_external:
                tensor.raw_data = data
                continue
            if (span := places.get(place)) is None:
                if len(data) >= _PAGE:
                    file.write(bytes(-file.tell() % _PAGE))
                span = file.tell(), len(data)
                file.write(data)
            if new is None:
                places[place] = span
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in zip(("location", "offset", "length"), (beside, *span), strict=True):
                tensor.external_data.add(key=key, value=str(value))

    def _data(self, tensor: TensorProto) -> bytes:
        """Return the external data of a tensor of the messages."""
        part = self.parts[reference(tensor)]
        try:
            return self.held[part] if part in self.held else external_data.content(part)
        except external_data.Problem as problem:
            raise InputError(f"save: weight {tensor.name!r}: {problem}") from problem


def _replace_outputs(proto: onnx.ModelProto, outputs: Sequence[onnx.ValueInfoProto]) -> None:
    known, wanted = {info.name for info in proto.graph.output}, [info.name for info in outputs]
    proto.graph.output.extend(info for info in outputs if info.name not in known)
    select(proto, wanted, "")
    # A value is declared once, and these are outputs now.
    declared = [info for info in proto.graph.value_info if info.name not in wanted]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(declared)


def _is_external(tensor: TensorProto) -> bool:
    return bool(tensor.data_location == TensorProto.EXTERNAL)
