"""Interfaces of formats: sources of rows, sinks of rows, and the lazy rows that travel to a worker.

A source or a sink is opened in the client, which looks at headers only.  What a task is handed is a *piece*:
for a file, the names of its rows, read in the worker; for an array in memory, the rows.  A sink travels as it
is and writes the rows of one chunk, which no other task writes.  Rows lie along axis 0; a row's shape is the
rest.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from dask_ferro.errors import ConfigError
from dask_ferro.stream.chunks import Chunks

Array = np.ndarray[Any, np.dtype[Any]]

# Files are read for their digests in such blocks.
_BLOCK = 2**20


class LazyRows(Protocol):
    """The rows of one chunk by name: picklable, a few hundred bytes."""

    def read(self) -> Array:
        """Return the rows, read now."""
        ...


class RowSource(Protocol):
    """An array of rows, of which no more than a chunk is read at a time.

    Attributes
    ----------
    rows : int
    row_shape : tuple of int
    dtype : numpy.dtype
    grain : int
        Rows of its own chunks, 1 where it has none: chunks that are multiples of it read nothing twice.
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
        """Return a text that differs when the content may differ."""
        ...

    @property
    def tells_content(self) -> bool:
        """Whether `fingerprint` does so; if not, what is read is noted with each chunk."""
        ...

    @property
    def checks_reads(self) -> bool:
        """Whether a chunk is noted as done only if it was read before the source changed, or with what was read."""
        ...

    def pieces(self, chunks: Chunks) -> Callable[[int], Any]:
        """Return a function of a chunk's number: its `LazyRows`, its rows, or a delayed value of them."""
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
        """Make the sink, empty; in the client, before any `write`."""
        ...

    def fits(self) -> bool:
        """Whether what lies there is what `prepare` made, filled or not."""
        ...

    def write(self, number: int, rows: Array) -> str:
        """Write a chunk, whole, so that it outlives this process, and return its digest; twice does no harm."""
        ...

    def digest(self, number: int) -> str | None:
        """Return the digest of a chunk as it lies there, or None where it cannot be read."""
        ...

    def foreign(self) -> str | None:
        """Return the path of something here that no `write` or `prepare` makes, or None."""
        ...

    def reopen(self) -> None:
        """Make a prepared sink ready for more chunks."""
        ...

    def tidy(self) -> None:
        """Remove half-made files of killed writers."""
        ...


def digest(content: Any) -> str:
    """Return the digest of bytes: 128 bits, at memory speed; against accidents, not against attacks."""
    return xxhash.xxh3_128_hexdigest(content)


def file_digest(path: str, start: int = 0, length: int | None = None) -> str | None:
    """Return the digest of a file, or of `length` bytes from `start`; None where they cannot be read."""
    found = xxhash.xxh3_128()
    left = length
    try:
        with open(path, "rb") as file:
            file.seek(start)
            while left != 0 and (block := file.read(_BLOCK if left is None else min(_BLOCK, left))):
                found.update(block)
                left = None if left is None else left - len(block)
    except OSError:
        return None
    return None if left else found.hexdigest()


def irregular(path: str) -> bool:
    """Whether something else than a file lies at a path: a folder, a link, a device."""
    return not stat.S_ISREG(os.lstat(path).st_mode)


def numeric(dtype: np.dtype[Any], what: str) -> np.dtype[Any]:
    """Return a dtype that every format here stores.

    Raises
    ------
    ConfigError
        For texts, structures, and the narrow floats that numpy itself has not.
    """
    if dtype.kind in "biufc" and issubclass(dtype.type, (np.number, np.bool_)):
        return dtype
    raise ConfigError(f"{what} has dtype {dtype}, which is not streamed; wanted one of numpy's own numbers")


def missing_extra(package: str, error: ImportError) -> ConfigError:
    """Return the error for a format whose package is not installed."""
    return ConfigError(f"{package} is not installed ({error}); install it with: pip install 'dask-ferro[io]'")
