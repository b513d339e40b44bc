"""The seams: where rows come from, where they go, and what of it travels to a worker.

A source or a sink is opened in the client, which looks at headers only.  What a task is handed is a *piece*:
for a file, the names of its rows, read in the worker; for an array in memory, the rows.  A sink travels as it
is and writes the rows of one chunk, which no other task writes.  Rows lie along axis 0; a row's shape is the
rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.stream.chunks import Chunks

Array = np.ndarray[Any, np.dtype[Any]]


class Piece(Protocol):
    """The rows of one chunk by name: picklable, a few hundred bytes."""

    def read(self) -> Array:
        """Return the rows, read now."""
        ...


class Source(Protocol):
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

    def pieces(self, chunks: Chunks) -> Callable[[int], Any]:
        """Return a function of a chunk's number: its `Piece`, its rows, or a delayed value of them."""
        ...


class Layout(NamedTuple):
    """What a sink is to hold: `name` of the output, how its rows are cut, dtype and shape of a row."""

    name: str
    chunks: Chunks
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows."""
        return (self.chunks.rows, *self.row_shape)


class Sink(Protocol):
    """A place for one output, filled chunk by chunk in any order, from any process; picklable."""

    @property
    def layout(self) -> Layout: ...

    def prepare(self) -> None:
        """Make it, empty; in the client, before any `write`."""
        ...

    def fits(self) -> bool:
        """Whether what lies there is what `prepare` made, filled or not."""
        ...

    def write(self, number: int, rows: Array) -> None:
        """Write a chunk, whole, so that it outlives this process; a second time does no harm."""
        ...


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
