"""Batches of a training: each source yields those of an epoch, from any position on.

arrays in memory     one block of rows              blocks in an order by seed and epoch, and the rows of each,
dask arrays          a chunk is a block, lazy       cut into batches (`order`)
parquet files        row groups are a block
a list of batches    in an order by seed and epoch
loaders, functions   as they come: the batches before a position are read and dropped
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import ceil, isnan
from typing import Any, NamedTuple

import numpy as np
import xxhash

from dask_ferro.errors import InputError
from dask_ferro.lower.signature import is_dask_array
from dask_ferro.stream.chunks import Chunks
from dask_ferro.train.order import Rows, block_order, cut

# Blocks of a file have at least so many rows: reading one costs a millisecond or more.
_BLOCK_ROWS = 4096
# Kinds of dtypes: objects, texts, bytes, times, time spans.  Other dtypes of `ml_dtypes` have V, as records have.
_NO_NUMBERS = "OUSMm"
_NUMBERS = "wanted numbers; encode it before, for instance as int64"


class Batch(NamedTuple):
    """The arrays of a batch by name, and the user's form: a name in place of each array.

    Names are the keys of a mapping, "batch_0" and so on in a tuple, and "batch" for one array.  `left_out` has the
    reasons of keys whose arrays have no numbers.
    """

    form: Any
    arrays: Mapping[str, Any]
    left_out: Mapping[str, str] = {}

    @staticmethod
    def of(batch: Any) -> Batch:
        """Return a batch as the user gives it: an array, or a tuple, list or mapping of arrays."""
        if isinstance(batch, Mapping):
            form: Any = {key: str(key) for key in batch}
            values = dict(zip(form.values(), batch.values(), strict=True))
        elif isinstance(batch, (tuple, list)):
            form = tuple(f"batch_{i}" for i in range(len(batch)))
            values = dict(zip(form, batch, strict=True))
        elif _is_frame(batch):
            raise InputError(
                "fit: batches: got a DataFrame, wanted its columns as arrays: {name: frame[name].to_numpy() for name in"
                " frame}, or of a dask DataFrame frame[name].to_dask_array(lengths=True)"
            )
        else:
            form, values = "batch", {"batch": batch}
        arrays = {name: as_array(value, f"batches: {name!r}") for name, value in values.items()}
        # A position is no name to leave out.
        texts = {
            name: a.dtype
            for name, a in arrays.items()
            if a.dtype.kind in _NO_NUMBERS and isinstance(form, dict)
        }
        numbers = {name: a for name, a in arrays.items() if name not in texts}
        return Batch(form, numbers, {name: f"it has {dtype}, {_NUMBERS}" for name, dtype in texts.items()})

    @property
    def rows(self) -> int:
        """The number of rows; raises `InputError` for arrays of different or unknown lengths, or without axes."""
        lengths = {value.shape[0] if value.ndim else -1 for value in self.arrays.values()}
        if any(map(isnan, lengths)):
            raise InputError(
                "fit: batches: a dask array's chunks have unknown lengths, so it cannot be cut into batches; call"
                " compute_chunk_sizes() on it first"
            )
        if len(lengths) != 1 or -1 in lengths:
            shapes = {name: value.shape for name, value in self.arrays.items()}
            raise InputError(f"fit: batches: got shapes {shapes}, wanted arrays of one number of rows")
        return int(lengths.pop())

    @property
    def types(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """The dtype of each array, and the shape of a row."""
        return {name: (value.dtype, value.shape[1:]) for name, value in self.arrays.items()}

    @property
    def nbytes(self) -> int:
        """The bytes of arrays in this process."""
        return sum(value.nbytes for value in self.arrays.values() if isinstance(value, np.ndarray))

    @property
    def digest(self) -> str:
        """A digest of the arrays but texts; empty if one is not in this process: to compute it would read it twice."""
        if any(map(is_dask_array, self.arrays.values())):
            return ""
        arrays = [value for _, value in sorted(self.arrays.items()) if not value.dtype.hasobject]
        memory = (np.ascontiguousarray(value).reshape(-1).view(np.uint8).data for value in arrays)
        return "-".join(map(xxhash.xxh3_128_hexdigest, memory))

    def mapped(self, fn: Callable[[Any], Any]) -> Batch:
        """Return the batch of `fn(array)`."""
        return self._replace(arrays={name: fn(value) for name, value in self.arrays.items()})


@dataclass(frozen=True)
class Batches:
    """The batches of a training: `epoch(number, start)` yields those of an epoch from batch `start` on.

    `facts` have to be the same for the same batches.  An epoch has `count` batches, and `sizes` are the rows of each
    and of the last one; None, and empty, if they are not known.
    """

    epoch: Callable[[int, int], Iterator[Batch]]
    facts: Mapping[str, Any]
    count: int | None = None
    sizes: tuple[int, ...] = ()


def batches_of(batches: Any, size: int | None, seed: int | None, *, keeps_last: bool = True) -> Batches:
    """Return the batches of a training from what `ff.fit` takes as `batches`, `batch_size`, `seed` and `drop_last`."""
    if isinstance(batches, (str, os.PathLike)):
        return _cut(_blocks_of_parquet(os.fspath(batches)), size, seed, keeps_last)
    columns = batches.values() if isinstance(batches, Mapping) else batches
    alone = (hasattr(batches, "dtype") and hasattr(batches, "shape")) or _is_frame(batches)
    if alone or (isinstance(batches, (Mapping, tuple)) and columns and all(map(_has_rows, columns))):
        return _cut(_blocks_of_arrays(Batch.of(batches)), size, seed, keeps_last)
    if not isinstance(batches, Iterable) and not callable(batches):
        raise InputError(
            f"fit: batches: got {type(batches).__name__}, wanted arrays with batch_size=, the path of parquet files, an"
            " iterable of batches, or a function from an epoch's number to one"
        )
    if size is not None or not keeps_last:
        raise InputError(
            "fit: batch_size and drop_last are for arrays and files, and an iterable of batches was given; leave"
            " them out"
        )
    return _batches_of_list(batches, seed) if isinstance(batches, Sequence) else _batches_of_iterable(batches)


def as_array(value: Any, name: str) -> Any:
    """Return an array of numpy, or a dask array as it is; raises `InputError` for None, texts and masks."""
    if value is None or isinstance(value, (str, bytes)):
        raise InputError(f"fit: {name}: got {value!r}, wanted an array")
    if np.ma.is_masked(value) or (is_dask_array(value) and _is_masked(value)):
        raise InputError(
            f"fit: {name}: got a masked array, whose mask would be dropped; fill it (`filled`), and give the mask as an"
            " array of its own if the loss needs it"
        )
    if is_dask_array(value):
        return value
    # A torch.Tensor that has a gradient, or is on a device, gives no array by itself.
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value)


def _is_masked(array: Any) -> bool:
    from dask.array.utils import meta_from_array

    return isinstance(meta_from_array(array), np.ma.MaskedArray)


def _is_frame(value: Any) -> bool:
    # Of pandas, Dask, polars or cuDF.
    return type(value).__name__ == "DataFrame"


def _has_rows(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and len(value.shape) > 0


# ---- batches as they come ----------------------------------------------------------------------------------


def _batches_of_list(batches: Sequence[Any], seed: int | None) -> Batches:
    if not batches:
        raise InputError("fit: batches: got an empty sequence, wanted one batch or more")
    count = len(batches)

    def epoch(number: int, start: int) -> Iterator[Batch]:
        for i in block_order(count, seed, number)[start:]:
            yield _copy(batches[i])

    return Batches(epoch, {"source": "batches", "batches": count, "seed": seed}, count)


def _batches_of_iterable(batches: Any) -> Batches:
    def epoch(number: int, start: int) -> Iterator[Batch]:
        loader = batches(number) if callable(batches) else batches
        # PyTorch's convention for samplers that shuffle by epoch.
        for owner in (loader, getattr(loader, "sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(number)
        is_empty = not start
        for batch in islice(loader, start, None):
            is_empty = False
            yield _copy(batch)
        if is_empty:
            raise InputError(
                f"fit: batches: epoch {number} of a {type(batches).__name__} has none, wanted one batch or more in"
                " each; an iterator can be read once: give a list, a loader, or a function from an epoch's number to an"
                " iterable"
            )

    return Batches(epoch, {"source": "batches", "batches": None, "seed": None})


def _copy(batch: Any) -> Batch:
    # A generator may fill the same buffer again, while this batch is still being computed.
    return Batch.of(batch).mapped(lambda value: value if is_dask_array(value) else value.copy())


# ---- batches of rows ---------------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """The rows of each block, the function that reads one, and what decides them."""

    lengths: tuple[int, ...]
    read: Callable[[int], Batch]
    facts: Mapping[str, Any]


def _cut(blocks: _Blocks, size: int | None, seed: int | None, keeps_last: bool) -> Batches:
    """Return rows in an order by seed and epoch, cut into batches."""
    if size is None:
        raise InputError("fit: batch_size: got None, wanted the number of rows of a batch")
    rows = sum(blocks.lengths)
    full, rest = divmod(rows, size)
    rest = rest if keeps_last else 0
    count = full + bool(rest)
    if not count:
        raise InputError(
            f"fit: batches: {rows} rows give no batch of {size}; take a smaller batch_size, or drop_last=False"
        )

    def epoch(number: int, start: int) -> Iterator[Batch]:
        for takes in islice(cut(blocks.lengths, size, seed, number, start), count - start):
            yield _join([_select(blocks.read(take.block), take.rows) for take in takes])

    facts = {**blocks.facts, "rows": rows, "batch_size": size, "seed": seed, "drop_last": not keeps_last}
    return Batches(epoch, facts, count, tuple(n for n in (size if full else 0, rest) if n))


def _select(block: Batch, rows: Rows) -> Batch:
    # Rows in order are a view; others are a copy.
    first, last = int(rows[0]), int(rows[-1])
    in_order = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
    which = slice(first, last + 1) if in_order else rows
    return block.mapped(lambda value: value[which])


def _join(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    columns = {name: [part.arrays[name] for part in parts] for name in parts[0].arrays}
    return parts[0]._replace(arrays={name: _concatenate(column) for name, column in columns.items()})


def _concatenate(arrays: Sequence[Any]) -> Any:
    if is_dask_array(arrays[0]):
        from dask.array import concatenate

        return concatenate(arrays)
    return np.concatenate(arrays)


def _blocks_of_arrays(batch: Batch) -> _Blocks:
    rows, lazy = batch.rows, next(filter(is_dask_array, batch.arrays.values()), None)
    if lazy is None:
        return _Blocks((rows,), lambda block: batch, {"source": "arrays"})
    chunks = lazy.chunks[0]
    chunked = batch.mapped(lambda value: _in_chunks(value, chunks))

    def read(block: int) -> Batch:
        return chunked.mapped(lambda value: value.blocks[block])

    return _Blocks(tuple(chunks), read, {"source": "dask arrays", "chunks": list(chunks)})


def _in_chunks(array: Any, chunks: tuple[int, ...]) -> Any:
    from dask.array import from_array

    lazy = array if is_dask_array(array) else from_array(array, chunks=(chunks, *array.shape[1:]))
    return lazy if lazy.chunks[0] == chunks else lazy.rechunk({0: chunks})


def _blocks_of_parquet(path: str) -> _Blocks:
    """Return the blocks of a parquet file, or of the files of a folder: of all columns that hold numbers."""
    # pyarrow is an extra, and slow to import.
    from dask_ferro.lower.inputs.tables import lists_as_array
    from dask_ferro.stream.formats.tables import holds_numbers, open_parquet

    if not os.path.exists(path):
        raise InputError(
            f"fit: batches: {path!r} does not exist; wanted a parquet file, or a folder of such files"
        )
    table = open_parquet(path)
    kinds = {field.name: field.type for field in table.schema}
    left_out = {n: f"{path!r} has {kind}, {_NUMBERS}" for n, kind in kinds.items() if not holds_numbers(kind)}
    names = [name for name in kinds if name not in left_out]
    if not names:
        raise InputError("; ".join(f"fit: batches: {name!r}: {why}" for name, why in left_out.items()))
    table = table.select(tuple(names))
    chunks = Chunks(table.rows, table.grain * ceil(max(_BLOCK_ROWS, table.grain) / table.grain))

    # The rows of a block go to successive batches.
    @lru_cache(maxsize=1)
    def read(block: int) -> Batch:
        rows = table.part(*chunks.span(block)).read()
        arrays = {name: lists_as_array(rows.column(name), f"column {name!r} of {path!r}") for name in names}
        return Batch({name: name for name in names}, arrays, left_out)

    lengths = tuple(map(chunks.length, range(chunks.count)))
    return _Blocks(lengths, read, {"source": "parquet", "columns": names, "block": chunks.batch})
