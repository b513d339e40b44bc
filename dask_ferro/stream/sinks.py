"""Sinks: each chunk is written as a part of its own, and the parts are put together when all are there.

    y.npy        parts are bytes, joined behind a header         y.zarr      parts are chunks of the array
    y.parquet    parts are tables, the files of the folder       y.csv       parts are texts, joined to one file

A part that is there is whole, so the parts are the record of what is done.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from dask_ferro.errors import InputError
from dask_ferro.lower.preparation.remote import is_address
from dask_ferro.stream import files
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats import pa, zarr
from dask_ferro.stream.formats.arrays import zarr_store
from dask_ferro.stream.formats.tables import PARQUET

# Parts are joined in blocks of this size.
_BLOCK = 1 << 24
# A part's file; below zarr's folder "c", a chunk with one file, whose other axes are whole.
_PART = re.compile(r"part-(\d+)\.(?:raw|csv|parquet)|(\d+)(?:/\d+)*")
# The kinds of sinks by suffix; parquet and CSV are tables.
KINDS = {".npy": "npy", ".zarr": "zarr", ".csv": "csv"} | dict.fromkeys(PARQUET, "parquet")


@dataclass(frozen=True)
class Sink:
    """The parts of an output, or of a table of several, in a folder; picklable.

    `dtype` and `row_shape` are those of an array, and `schema` is that of a table.
    """

    kind: str
    outputs: tuple[str, ...]
    chunks: Chunks
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    schema: Any = None
    folder: str = ""

    @property
    def name(self) -> str:
        return ", ".join(self.outputs)

    def prepare(self) -> None:
        """Make the folder; of zarr the array, and of no rows the one part that has the types."""
        if self.kind == "zarr":
            if not files.exists(files.join(self.folder, "zarr.json")):
                self._create()
            return
        files.make_folder(self.folder)
        if self.schema is not None and not self.chunks.rows:
            self.write(0, self.schema.empty_table())

    def _create(self) -> None:
        # A chunk of a run has zarr chunks of its own, so no two tasks write one file; zarr has no chunks of length 0.
        chunks = (max(1, self.chunks.batch), *(max(1, d) for d in self.row_shape))
        with files.errors_of(self.folder):
            zarr.create_array(
                zarr_store(self.folder, read_only=False),
                shape=(self.chunks.rows, *self.row_shape),
                chunks=chunks,
                dtype=self.dtype,
            )

    def write(self, number: int, rows: Any) -> None:
        """Write the part of a chunk, which is whole when its file is there."""
        if self.kind == "zarr":
            span = slice(*self.chunks.span(number))
            with files.errors_of(self.folder):
                zarr.open_array(zarr_store(self.folder, read_only=False), mode="r+")[span] = rows
            if not files.exists(files.join(self.folder, "c", *[str(number), *"0" * len(self.row_shape)])):
                # Rows of zeros have no file.
                files.make_folder(self._empty)
                files.put(files.join(self._empty, f"part-{number}.raw"), b"")
        else:
            files.put(self._part(number), _content(self.kind, rows, is_first=number == 0))

    def done(self) -> frozenset[int]:
        names = [*files.names_in(self.folder), *files.names_in(self._empty)]
        if self.kind == "zarr":
            names += files.find(files.join(self.folder, "c"))
        matches = filter(None, map(_PART.fullmatch, names))
        return frozenset(int(match[1] or match[2]) for match in matches)

    @property
    def _empty(self) -> str:
        """The folder with the numbers of zarr's chunks that have no file."""
        return f"{self.folder}.empty"

    def whole(self) -> tuple[str, Iterator[Any] | None]:
        """Return the folder of the parts if it is the output, else the path and the pieces of the file of them."""
        if not is_address(self.folder):
            # Writers that were killed leave ours, and zarr's.
            for name in files.find(self.folder):
                if os.path.basename(name).startswith(".") or name.endswith(".partial"):
                    files.remove(files.join(self.folder, name))
        if self.kind in ("parquet", "zarr"):
            return self.folder, None
        return f"{self.folder}.whole", self._joined()

    @property
    def mark(self) -> str:
        """The name of the object without which readers see no complete folder at an address, put last; "" of a file."""
        return {"zarr": "zarr.json", "parquet": files.COMPLETE}.get(self.kind, "")

    def _joined(self) -> Iterator[Any]:
        count = max(self.chunks.count, int(self.kind == "csv"))
        if self.kind == "npy":
            yield self._npy_header()
        for number in range(count):
            with files.open_file(self._part(number)) as file:
                yield from iter(partial(file.read, _BLOCK), b"")

    def _npy_header(self) -> bytes:
        buffer = io.BytesIO()
        shape = (self.chunks.rows, *self.row_shape)
        descr = npy_format.dtype_to_descr(self.dtype)
        npy_format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
        return buffer.getvalue()

    def _part(self, number: int) -> str:
        # The same number of digits in each name, so that names sort like their numbers.
        digits = max(6, len(str(self.chunks.count)))
        return files.join(
            self.folder, f"part-{number:0{digits}d}.{'raw' if self.kind == 'npy' else self.kind}"
        )


def finished_chunks(sinks: Sequence[Sink], chunks: Chunks) -> frozenset[int]:
    """Return the chunks that have a part in each of some sinks."""
    return frozenset(range(chunks.count)).intersection(*(sink.done() for sink in sinks))


def _content(kind: str, rows: Any, *, is_first: bool) -> Any:
    """Return the content of a part: an array's bytes, or a table's file, of CSV with a header in the first one."""
    if kind == "npy":
        return rows.tobytes()
    content = pa.BufferOutputStream()
    try:
        if kind == "parquet":
            pa.parquet.write_table(rows, content)
        elif rows.num_rows or is_first:
            # In one piece: without a header, pyarrow 26 writes a table that begins with an empty piece as zeros.
            pa.csv.write_csv(rows.combine_chunks(), content, pa.csv.WriteOptions(include_header=is_first))
    except (pa.ArrowException, NotImplementedError) as error:
        raise InputError(
            f"a .{kind} file does not hold its columns: {error}; choose another format"
        ) from error
    return content.getvalue()


def check_kind(kind: str) -> None:
    """Raise `InputError` where the package of a format is missing."""
    if kind != "npy":
        (zarr if kind == "zarr" else pa).load()
