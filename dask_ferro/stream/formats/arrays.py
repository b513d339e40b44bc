"""Sources that are not files: arrays in this process' memory, and dask arrays.

The chunks of a dask array are computed a few at a time and released after the model has run on them, so the array may
be larger than the cluster's memory.  A value on which several of its chunks depend is computed again for each, unless
it is persisted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from dask.base import tokenize
from dask.delayed import Delayed
from dask.optimization import cull

from dask_ferro.errors import ConfigError
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.interfaces import Array, numeric


@dataclass(frozen=True)
class _Wrapper:
    """A source that wraps an array, of numpy or dask."""

    array: Any

    @property
    def rows(self) -> int:
        """Length of axis 0."""
        return int(self.array.shape[0])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of the other axes."""
        return tuple(map(int, self.array.shape[1:]))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array."""
        found: np.dtype[Any] = np.dtype(self.array.dtype)
        return found


@dataclass(frozen=True)
class ArraySource(_Wrapper):
    """A numpy array (or a mapping of a file) in this process."""

    tells_content: ClassVar[bool] = True
    checks_reads: ClassVar[bool] = False
    grain: int = 1

    def fingerprint(self) -> str:
        """Return a token of the content."""
        return f"array {tokenize(self.array)}"

    def pieces(self, chunks: Chunks) -> Callable[[int], Array]:
        """Return the rows by chunk number."""
        return lambda number: np.ascontiguousarray(self.array[slice(*chunks.span(number))])


@dataclass(frozen=True)
class DaskSource(_Wrapper):
    """A dask array of known size."""

    tells_content: ClassVar[bool] = False
    checks_reads: ClassVar[bool] = True

    @property
    def grain(self) -> int:
        """The longest chunk along axis 0."""
        return int(max(1, *self.array.chunks[0]))

    def fingerprint(self) -> str:
        """Return the array's name, which stays the same when a file that the array reads changes."""
        return f"dask array {self.array.name}"

    def pieces(self, chunks: Chunks) -> Callable[[int], Delayed]:
        """Return the chunks by number, as delayed values with small graphs of their own."""
        # A task reads whole rows, so the other axes are one chunk.
        whole_rows = dict.fromkeys(range(1, self.array.ndim), -1)
        blocks = self.array.rechunk({0: chunks.batch, **whole_rows}).to_delayed().reshape(-1)
        # Blocks share one graph: 10,000 copies of it would be 10,000 times 10,000 tasks.
        graph = dict(blocks[0].__dask_graph__())

        def piece(number: int) -> Delayed:
            key = blocks[number].key
            return Delayed(key, cull(graph, [key])[0])  # type: ignore[no-untyped-call]

        return piece


def open_array(array: Array, what: str) -> ArraySource:
    """Return an array in memory as a source.

    Raises
    ------
    ConfigError
        It has no rows, no numbers, or a mask.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise ConfigError(f"{what} is a masked array, and models have no masks: fill it with .filled(value)")
    if not array.ndim:
        raise ConfigError(f"{what} is a single number; wanted rows along axis 0")
    numeric(array.dtype, what)
    return ArraySource(array)


def open_dask(array: Any, what: str) -> DaskSource:
    """Return a dask array as a source.

    Raises
    ------
    ConfigError
        Its size is unknown, or it has no rows or no numbers.
    """
    if not array.ndim:
        raise ConfigError(f"{what} is a single number; wanted rows along axis 0")
    # Dask's unknown sizes are NaN, which differs from itself.
    if any(size != size for size in array.shape):
        raise ConfigError(f"{what} has chunks of unknown size; call .compute_chunk_sizes() on it first")
    numeric(np.dtype(array.dtype), what)
    return DaskSource(array)
