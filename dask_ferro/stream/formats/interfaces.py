"""Interfaces of formats: sources of rows, sinks of rows, and lazy rows, which are read in a worker.

A source or a sink is opened in the client, which reads headers only.  A task gets a *piece*: for a file, the range of
its rows, which the worker reads; for an array in memory, the rows.  A sink is pickled to the worker and writes the rows
of one chunk, which no other task writes.  Rows are along axis 0; the other axes are a row's shape.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from dask_ferro.errors import ConfigError
from dask_ferro.lower.prepared.remote import is_address
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.stores import files

Array = np.ndarray[Any, np.dtype[Any]]

# Files are read for their digests in blocks of this size.
_BLOCK = 2**20


class LazyRows(Protocol):
    """A reference to the rows of one chunk: picklable, a few hundred bytes."""

    def read(self) -> Array:
        """Read and return the rows."""
        ...


class RowSource(Protocol):
    """An array of rows, which is read a chunk at a time.

    Attributes
    ----------
    rows : int
    row_shape : tuple of int
    dtype : numpy.dtype
    grain : int
        Rows of its own chunks, 1 without chunks: chunks of a multiple of it read no row twice.
    """

    @property
    def rows(self) -> int: ...
    @property
    def row_shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def grain(self) -> int: ...

    def fingerprint(self) -> str:
        """Return a text that changes when the content may have changed."""
        ...

    @property
    def tells_content(self) -> bool:
        """Whether `fingerprint` does so; if not, a digest of the rows is recorded with each chunk."""
        ...

    @property
    def checks_reads(self) -> bool:
        """Whether a chunk is recorded only if it was read before the source changed, or with a digest of its rows."""
        ...

    def pieces(self, chunks: Chunks) -> Callable[[int], Any]:
        """Return a function from a chunk's number to its `LazyRows`, its rows, or a delayed value of them."""
        ...


class Layout(NamedTuple):
    """The layout of a sink: the output's name, its chunks, and dtype and shape of a row."""

    name: str
    chunks: Chunks
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all rows."""
        return (self.chunks.rows, *self.row_shape)


class Sink(Protocol):
    """A place for one output, filled chunk by chunk in any order, from any process; picklable."""

    @property
    def path(self) -> str: ...
    @property
    def layout(self) -> Layout: ...

    def prepare(self) -> None:
        """Create the sink, empty; in the client, before any `write`."""
        ...

    def fits(self) -> bool:
        """Whether the file or folder has the form that `prepare` gives it, filled or not."""
        ...

    def write(self, number: int, rows: Array) -> str:
        """Write a chunk so that it outlives this process, and return its digest; idempotent."""
        ...

    def digest(self, number: int) -> str | None:
        """Return the digest of a chunk in the sink, or None where it cannot be read."""
        ...

    def foreign(self) -> str | None:
        """Return the path of a file in the sink that `prepare` and `write` do not create, or None."""
        ...

    def reopen(self) -> None:
        """Prepare an existing sink for more chunks."""
        ...

    def tidy(self) -> None:
        """Remove incomplete files of killed writers."""
        ...

    @property
    def mark(self) -> str:
        """The name of the object without which readers see no complete output at an address; it is put last."""
        ...


def digest(content: Any) -> str:
    """Return the digest of bytes: 128 bits, at memory speed; not secure against attacks."""
    return xxhash.xxh3_128_hexdigest(content)


def row_digest(rows: Array) -> str:
    """Return the digest of the bytes of rows, in C order."""
    return digest(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)


def file_digest(path: str, start: int = 0, length: int | None = None) -> str | None:
    """Return the digest of a file, or of `length` bytes from `start`; None where they cannot be read.

    An object at an address is read as a whole.
    """
    found = xxhash.xxh3_128()
    left = length
    try:
        if is_address(path):
            # At once: a block would be a request.
            return digest(files.read(path))
        with open(path, "rb") as file:
            file.seek(start)
            while left != 0 and (block := file.read(_BLOCK if left is None else min(_BLOCK, left))):
                found.update(block)
                left = None if left is None else left - len(block)
    except OSError:
        return None
    return None if left else found.hexdigest()


def irregular(path: str) -> bool:
    """Whether a path is not a regular file, but a folder, a link or a device."""
    return not stat.S_ISREG(os.lstat(path).st_mode)


def numeric(dtype: np.dtype[Any], what: str) -> np.dtype[Any]:
    """Return a dtype that every format here stores.

    Raises
    ------
    ConfigError
        For texts, structures, and the narrow floats that numpy lacks.
    """
    if dtype.kind in "biufc" and issubclass(dtype.type, (np.number, np.bool_)):
        return dtype
    raise ConfigError(
        f"{what} has dtype {dtype}, which is not streamed; wanted one of numpy's own number types"
    )


def missing_extra(package: str, error: ImportError) -> ConfigError:
    """Return the error for a format whose package is not installed."""
    return ConfigError(f"{package} is not installed ({error}); install it with: pip install 'dask-ferro[io]'")
