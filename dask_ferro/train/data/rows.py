"""Batches of arrays and files: rows in blocks, in an order by seed, cut into batches.

arrays in memory   one block            dask arrays   a block is a chunk, and stays lazy
parquet files      a block is a row group, or several small ones
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import ceil, isnan
from typing import Any, NamedTuple

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.lower.signature import is_dask_array
from dask_ferro.stream.chunks import Chunks
from dask_ferro.train.data.batch import Batch, Named, form_of, named, rows_of
from dask_ferro.train.data.order import Take, batches

# Blocks of a file have at least so many rows: reading one costs a millisecond or more.
_BLOCK_ROWS = 4096
_NUMBERS = "wanted numbers; encode it before, for instance as int64"


class Blocks(NamedTuple):
    """Rows by block: a batch in the user's form, the rows of each block, its arrays by name, what decides blocks."""

    form: Any
    lengths: tuple[int, ...]
    read: Callable[[int], Batch]
    facts: Mapping[str, Any]


class RowBatches:
    """Rows in blocks, in an order by seed and epoch, cut into batches of `size`.

    Attributes
    ----------
    form : object
        A batch in the user's form, with a name in place of each array.
    facts : dict
        What has to be the same for the same batches.
    count : int
        The number of batches of an epoch.
    sizes : tuple of int
        Rows of a batch, and of the last one.
    """

    def __init__(self, blocks: Blocks, size: int, seed: int | None, keeps_last: bool) -> None:
        self._blocks, self._size, self._seed = blocks, size, seed
        rows, last = sum(blocks.lengths), "keep" if keeps_last else "drop"
        full, rest = divmod(rows, size)
        rest = rest if keeps_last else 0
        self.form, self.count = blocks.form, full + bool(rest)
        self.sizes = tuple(n for n in (size if full else 0, rest) if n)
        self.facts = {**blocks.facts, "rows": rows, "batch_size": size, "seed": seed, "last": last}
        if not self.count:
            raise ConfigError(
                f"fit: batches: {rows} rows give no batch of {size}; take a smaller batch_size, or last='keep'"
            )

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from batch `start` on."""
        found = batches(self._blocks.lengths, self._size, self._seed, epoch, start)
        for takes in islice(found, self.count - start):
            yield _joined([self._taken(take) for take in takes])

    def _taken(self, take: Take) -> Batch:
        block, rows = self._blocks.read(take.block), take.rows
        first, last = int(rows[0]), int(rows[-1])
        # Rows in order are a view; others are a copy.
        in_order = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
        which = slice(first, last + 1) if in_order else rows
        return {name: value[which] for name, value in block.items()}


def _joined(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return {name: _concatenated([part[name] for part in parts]) for name in parts[0]}


def _concatenated(arrays: Sequence[Any]) -> Any:
    if is_dask_array(arrays[0]):
        from dask.array import concatenate

        return concatenate(arrays)
    return np.concatenate(arrays)


def of_arrays(given: Any) -> Blocks:
    """Return the blocks of an array, or of a tuple or mapping of arrays, some of which may be dask arrays."""
    form = form_of(given)
    arrays = named(given, form)
    lazy = next((value for value in arrays.values() if is_dask_array(value)), None)
    if lazy is None:
        return Blocks(form, (rows_of(arrays),), lambda block: arrays, {"source": "arrays"})
    chunks = lazy.chunks[0]
    if any(isnan(length) for length in chunks):
        raise ConfigError(
            "fit: batches: a dask array's chunks have unknown lengths, and batches are cut by rows; call"
            " compute_chunk_sizes() on it first"
        )
    rows_of(arrays)
    parts = {name: _in_chunks(value, chunks) for name, value in arrays.items()}

    def read(block: int) -> Batch:
        return {name: value.blocks[block] for name, value in parts.items()}

    return Blocks(form, tuple(chunks), read, {"source": "dask arrays", "chunks": list(chunks)})


def _in_chunks(array: Any, chunks: tuple[int, ...]) -> Any:
    from dask.array import from_array

    lazy = array if is_dask_array(array) else from_array(array, chunks=(chunks, *array.shape[1:]))
    return lazy if lazy.chunks[0] == chunks else lazy.rechunk({0: chunks})


def of_parquet(path: str, names: Sequence[str] = ()) -> Blocks:
    """Return the blocks of a parquet file, or of the files of a folder, by default of all columns that hold numbers."""
    # pyarrow is an extra, and slow to import.
    from dask_ferro.lower.inputs.tables import lists_as_array
    from dask_ferro.stream.formats.tables import holds_numbers, open_parquet

    if not os.path.exists(path):
        raise ConfigError(
            f"fit: batches: {path!r} does not exist; wanted a parquet file, or a folder of such files"
        )
    table = open_parquet(path)
    kinds = {field.name: field.type for field in table.schema}
    left_out = {n: f"{path!r} has {kind}, {_NUMBERS}" for n, kind in kinds.items() if not holds_numbers(kind)}
    form = Named({name: name for name in kinds if name not in left_out}, left_out)
    # One that is named is refused here if it has no numbers, and so are all if none has.
    columns = tuple(form[name] for name in names or form or left_out)
    table = table.select(columns)
    chunks = Chunks(table.rows, table.grain * ceil(max(_BLOCK_ROWS, table.grain) / table.grain))

    # The rows of a block go to successive batches.
    @lru_cache(maxsize=1)
    def read(block: int) -> Batch:
        rows = table.part(*chunks.span(block)).read()
        return {name: lists_as_array(rows.column(name), f"column {name!r} of {path!r}") for name in columns}

    lengths = tuple(map(chunks.length, range(chunks.count)))
    facts = {"source": "parquet", "columns": list(columns), "block": chunks.batch}
    return Blocks(Named({name: name for name in columns}, left_out), lengths, read, facts)
