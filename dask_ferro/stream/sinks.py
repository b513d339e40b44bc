"""Sinks: each chunk is written as a part of its own, and the parts are put together when all are there.

    y.npy        parts are arrays, joined to one file            y.zarr      parts are chunks of the array
    y.parquet    parts are the files of the folder               y.csv       parts are texts, joined to one file

A part that is there is whole, so the parts are the record of what is done.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from dask_ferro.errors import ConfigError
from dask_ferro.lower.prepared.remote import is_address
from dask_ferro.stream import files
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats import Array, pa, zarr
from dask_ferro.stream.formats.arrays import read_header, zarr_store
from dask_ferro.stream.formats.tables import PARQUET

# Parts are joined in blocks of this size.
_BLOCK = 1 << 24
# A part's file; below zarr's folder "c", a chunk with one file, whose other axes are whole.
_PART = re.compile(r"part-(\d+)\.(?:npy|csv|parquet)|(\d+)(?:/\d+)*")
# The kinds of sinks by suffix; "table" is parquet with a column a result, "parquet" with one column of lists.
KINDS = {".npy": "npy", ".zarr": "zarr", ".csv": "csv"} | dict.fromkeys(PARQUET, "parquet")


class Layout(NamedTuple):
    """The layout of a sink: the output's name, its chunks, and dtype and shape of a row, or pyarrow's schema."""

    name: str
    chunks: Chunks
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]
    schema: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.chunks.rows, *self.row_shape)


@dataclass(frozen=True)
class Sink:
    """The parts of one output in a folder, of a kind of `KINDS` or "table"; picklable."""

    kind: str
    folder: str
    layout: Layout

    def prepare(self) -> None:
        """Make the folder; of zarr the array, and of no rows the one part that has the types."""
        if self.kind == "zarr":
            if not files.exists(files.joined(self.folder, "zarr.json")):
                self._create()
            return
        files.make_folder(self.folder)
        if self.kind in ("parquet", "table", "csv") and not self.layout.chunks.rows:
            self.write(0, self._no_rows())

    def _create(self) -> None:
        # A chunk of a run has zarr chunks of its own, so no two tasks write one file; zarr has no chunks of length 0.
        chunks = (max(1, self.layout.chunks.batch), *(max(1, d) for d in self.layout.row_shape))
        with files.errors_of(self.folder):
            zarr.create_array(
                zarr_store(self.folder, read_only=False),
                shape=self.layout.shape,
                chunks=chunks,
                dtype=self.layout.dtype,
            )

    def write(self, number: int, rows: Any) -> None:
        """Write the part of a chunk, which is whole when its file is there."""
        if self.kind == "zarr":
            span = slice(*self.layout.chunks.span(number))
            with files.errors_of(self.folder):
                zarr.open_array(zarr_store(self.folder, read_only=False), mode="r+")[span] = rows
            if not files.exists(
                files.joined(self.folder, "c", *[str(number), *"0" * len(self.layout.row_shape)])
            ):
                # Rows of zeros have no file.
                files.make_folder(self._empty)
                files.put(files.joined(self._empty, f"part-{number}.npy"), b"")
        else:
            files.put(self._part(number), _CONTENT[self.kind](rows, number, self))

    def done(self) -> frozenset[int]:
        count = self.layout.chunks.count
        names = [*files.names_in(self.folder), *files.names_in(self._empty)]
        if self.kind == "zarr":
            names += files.find(files.joined(self.folder, "c"))
        found = (int(match[1] or match[2]) for name in names if (match := _PART.fullmatch(name)))
        return frozenset(number for number in found if number < count)

    @property
    def _empty(self) -> str:
        """The folder with the numbers of zarr's chunks that have no file."""
        return f"{self.folder}.empty"

    def whole(self) -> tuple[str, Iterator[Any] | None]:
        """Return the folder of the parts if it is the output, else the path and the pieces of the file of them."""
        for name in files.names_in(self.folder):
            # Of writers that were killed.
            if name.startswith("."):
                files.remove(files.joined(self.folder, name))
        if self.kind not in ("npy", "csv"):
            if self.kind == "zarr" and not is_address(self.folder):
                for name in [n for n in files.find(self.folder) if n.endswith(".partial")]:
                    files.remove(files.joined(self.folder, name))
            return self.folder, None
        return f"{self.folder}.whole", self._joined()

    @property
    def mark(self) -> str:
        """The name of the object without which readers see no complete output at an address; it is put last."""
        return "zarr.json" if self.kind == "zarr" else files.COMPLETE

    def _joined(self) -> Iterator[Any]:
        count = max(self.layout.chunks.count, int(self.kind == "csv"))
        if self.kind == "npy":
            yield npy_header(self.layout)
        for number in range(count):
            with files.opened(self._part(number)) as file:
                if self.kind == "npy":
                    read_header(file)
                yield from iter(partial(file.read, _BLOCK), b"")

    def _no_rows(self) -> Any:
        layout = self.layout
        return np.empty(layout.shape, layout.dtype) if layout.schema is None else layout.schema.empty_table()

    def _part(self, number: int) -> str:
        # The same number of digits in each name, so that names sort like their numbers.
        digits = max(6, len(str(self.layout.chunks.count)))
        suffix = ".parquet" if self.kind == "table" else f".{self.kind}"
        return files.joined(self.folder, f"part-{number:0{digits}d}{suffix}")


def npy_header(layout: Layout) -> bytes:
    buffer = io.BytesIO()
    descr = npy_format.dtype_to_descr(layout.dtype)
    npy_format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": layout.shape})
    return buffer.getvalue()


def _npy(rows: Array, number: int, sink: Sink) -> Any:
    content = io.BytesIO()
    np.save(content, np.ascontiguousarray(rows))
    return content.getbuffer()


def _parquet(rows: Array, number: int, sink: Sink) -> Any:
    """Return the file of an array: a column of lists, of lists of lists and so on."""
    column = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for size in reversed(rows.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return _table(pa.table({sink.layout.name: column}), number, sink)


def _table(rows: Any, number: int, sink: Sink) -> Any:
    content = pa.BufferOutputStream()
    pa.parquet.write_table(rows, content)
    return content.getvalue()


def _csv(rows: Any, number: int, sink: Sink) -> Any:
    content = pa.BufferOutputStream()
    if number and not rows.num_rows:
        return b""
    try:
        # In one piece: without a header, pyarrow 26 writes a table that begins with an empty piece as zeros.
        pa.csv.write_csv(rows.combine_chunks(), content, pa.csv.WriteOptions(include_header=number == 0))
    except (pa.ArrowException, NotImplementedError) as error:
        raise ConfigError(f"a .csv file does not hold its columns: {error}; write it as .parquet") from error
    return content.getvalue()


_CONTENT = {"npy": _npy, "parquet": _parquet, "table": _table, "csv": _csv}


def check_kind(kind: str, path: str, dtype: np.dtype[Any]) -> None:
    """Raise `ConfigError` where the package of a format is missing, or it does not hold a dtype."""
    if kind == "zarr":
        zarr.load()
    elif kind != "npy":
        pa.load()
        if dtype.kind == "c":
            raise ConfigError(
                f"sink {path!r}: {os.path.splitext(path)[1]} has no complex numbers; use .npy or .zarr"
            )
