"""`.npy` files, which are read by slices, and created at their full size and filled by slices.

Rows are read and written with plain system calls, not through a mapping: a truncated file or a full disk is then an
`OSError` and not a bus error that kills the worker, and the worker's resident memory is bounded by a chunk.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, BinaryIO, ClassVar

import numpy as np
from numpy.lib import format as npy_format

from dask_ferro.errors import ConfigError
from dask_ferro.lower.prepared.remote import is_address, shown
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.interfaces import Array, Layout, digest, file_digest, irregular, numeric
from dask_ferro.stream.stores import addresses, files
from dask_ferro.stream.stores.stamps import Stamp, check_unchanged, stamp_of


@dataclass(frozen=True)
class NpySource:
    """An array in a `.npy` file; its data begins at `offset`."""

    tells_content: ClassVar[bool] = True
    checks_reads: ClassVar[bool] = True
    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    opened: Stamp
    grain: int = 1

    @property
    def rows(self) -> int:
        """Length of axis 0."""
        return self.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of the other axes."""
        return self.shape[1:]

    def fingerprint(self) -> str:
        """Return path, size and time of the last change."""
        return f"{shown(self.path)}, {stamp_of(self.path)}"

    def pieces(self, chunks: Chunks) -> Callable[[int], NpyPiece]:
        """Return the pieces of the file by chunk number."""
        return lambda number: NpyPiece(self, *chunks.span(number))


@dataclass(frozen=True)
class NpyPiece:
    """Rows `start` to `stop` of a `.npy` file."""

    source: NpySource
    start: int
    stop: int

    def read(self) -> Array:
        """Return the rows in C order; raises `OSError` when the file changed since it was opened."""
        found = self._read()
        # After the read, so that a change during it is detected too.
        check_unchanged(self.source.path, self.source.opened)
        return found

    def _read(self) -> Array:
        source = self.source
        # In Fortran order a row is scattered over the file, so the file is mapped.
        if source.fortran:
            mapped = np.memmap(source.path, source.dtype, "r", source.offset, source.shape, order="F")
            return np.array(mapped[self.start : self.stop], order="C")
        values = prod(source.row_shape)
        first = source.offset + self.start * values * source.dtype.itemsize
        wanted = (self.stop - self.start) * values
        flat = self._flat(first, wanted)
        if flat.size < wanted:
            raise OSError(
                f"{source.path!r} ends before row {self.stop}: it was truncated after the run began"
            )
        return flat.reshape(self.stop - self.start, *source.row_shape)

    def _flat(self, first: int, values: int) -> Array:
        """Return values from the byte `first` on."""
        source = self.source
        if not is_address(source.path):
            return np.fromfile(source.path, source.dtype, values, offset=first)
        size = values * source.dtype.itemsize
        content = addresses.read(source.path, first, first + size, source.opened.size)
        # Copied, since numpy does not write to the bytes of an object.
        return np.frombuffer(content, source.dtype).copy()


def open_npy(path: str) -> NpySource:
    """Return the array in a `.npy` file.

    Raises
    ------
    ConfigError
        The file is not a `.npy` file, is shorter than its header declares, or has no numbers.
    """
    try:
        with files.opened(path) as file:
            shape, fortran, dtype = _read_header(file)
            offset = file.tell()
            opened = stamp_of(path if is_address(path) else file.fileno())
    except (ValueError, EOFError) as error:
        raise ConfigError(f"source {path!r} is not a .npy file: {error}") from error
    numeric(dtype, f"source {path!r}")
    if not shape:
        raise ConfigError(f"source {path!r} holds a single number; wanted rows along axis 0")
    if opened.size < (wanted := offset + prod(shape) * dtype.itemsize):
        raise ConfigError(
            f"source {path!r} is truncated: {opened.size} bytes, wanted {wanted} for shape {shape}"
        )
    # With one axis both orders are the same.
    fortran = fortran and len(shape) > 1
    if fortran and is_address(path):
        raise ConfigError(
            f"source {path!r} is in Fortran's order, in which a row is scattered over the object: write it in C's order"
        )
    return NpySource(path, offset, shape, dtype, fortran, opened)


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy_format.read_magic(file)
    readers = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"format version {version}, wanted (1, 0) or (2, 0)")
    return readers[version](file)


@dataclass(frozen=True)
class NpySink:
    """A `.npy` file of all rows; at no address, because an object is not written piece by piece."""

    mark: ClassVar[str] = ""
    path: str
    layout: Layout

    def prepare(self) -> None:
        """Create the file at its full size; it appears complete or not at all."""
        header = self._header()
        size = len(header) + prod(self.layout.shape) * self.layout.dtype.itemsize
        # The file is sparse: without this check a full disk would stop the run in the middle.
        free = shutil.disk_usage(os.path.dirname(self.path)).free
        if size > free:
            raise ConfigError(f"sink {self.path!r} needs {size} bytes, and {free} are free there")
        part = f"{self.path}.tmp"
        with open(part, "wb") as file:
            file.write(header)
            file.truncate(size)
        # Renamed when complete, so that a killed run leaves no file with a header and too few bytes.
        os.replace(part, self.path)

    def fits(self) -> bool:
        """Whether the file has this shape and dtype."""
        try:
            found = open_npy(self.path)
        except (OSError, ConfigError):
            return False
        return (found.shape, found.dtype, found.offset) == (
            self.layout.shape,
            self.layout.dtype,
            len(self._header()),
        )

    def write(self, number: int, rows: Array) -> str:
        """Write a chunk, which is on the disk when this returns; the file must exist."""
        offset, _ = self._bytes(number)
        content = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        handle = os.open(self.path, os.O_WRONLY)
        try:
            _write_all(handle, content, offset)
            # 80 kB take 1 ms, 16 MB some 30 ms; without it a crash of the host would lose chunks that the journal
            # records.
            os.fdatasync(handle)
        finally:
            os.close(handle)
        return digest(content)

    def digest(self, number: int) -> str | None:
        """Return the digest of the bytes of a chunk."""
        return file_digest(self.path, *self._bytes(number))

    def foreign(self) -> str | None:
        """Return the path when it is not a file."""
        return self.path if irregular(self.path) else None

    def reopen(self) -> None:
        """Do nothing: there is nothing but the file."""

    def tidy(self) -> None:
        """Do nothing: there is nothing but the file."""

    def _bytes(self, number: int) -> tuple[int, int]:
        """Return a chunk's offset in the file, and its length."""
        start, stop = self.layout.chunks.span(number)
        row = prod(self.layout.row_shape) * self.layout.dtype.itemsize
        return len(self._header()) + start * row, (stop - start) * row

    def _header(self) -> bytes:
        buffer = io.BytesIO()
        descr = npy_format.dtype_to_descr(self.layout.dtype)
        npy_format.write_array_header_1_0(
            buffer, {"descr": descr, "fortran_order": False, "shape": self.layout.shape}
        )
        return buffer.getvalue()


def _write_all(handle: int, content: memoryview, offset: int) -> None:
    write = partial(os.pwrite, handle)
    while content:
        # Linux writes at most 2 GB a call.
        written = write(content, offset)
        content, offset = content[written:], offset + written
