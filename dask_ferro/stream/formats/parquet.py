"""parquet: a file or a folder of files is read by row ranges; a sink is a folder with one file per chunk.

The array of a table is the column with the name of the model's input; without such a column, it is the only column,
or all columns side by side if they are numbers of one type.  A column of lists has one list per row, all of one length;
nested lists are further axes.  A sink has the same form: one column with the name of the output.
"""

from __future__ import annotations

import os
import shutil
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from dask.utils import natural_sort_key

from dask_ferro.errors import ConfigError
from dask_ferro.lower.prepared.remote import is_address, shown
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.interfaces import (
    Array,
    Layout,
    digest,
    file_digest,
    irregular,
    missing_extra,
    numeric,
)
from dask_ferro.stream.stores import addresses, files
from dask_ferro.stream.stores.stamps import Stamp, check_unchanged, stamps, stamps_of

# pyarrow has no types.
Table = Any
Schema = Any
SUFFIXES = (".parquet", ".pq")
# Footers of a table's files that are read at a time.
_READERS = 8
# pandas stores an index other than a plain range as a column with this prefix.
_INDEX = "__index_level_"


def pyarrow_modules() -> tuple[ModuleType, ModuleType]:
    """Return pyarrow and its module for parquet; raises `ConfigError` where it is not installed."""
    try:
        # Imported on use: it is an extra.
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra("pyarrow", error) from error
    return pyarrow, pyarrow.parquet


@dataclass(frozen=True)
class ParquetSource:
    """Columns of parquet files, which form one table in Dask's order of their names (2 before 10)."""

    tells_content: ClassVar[bool] = True
    checks_reads: ClassVar[bool] = True
    path: str
    files: tuple[str, ...]
    lengths: tuple[int, ...]
    columns: tuple[str, ...]
    row_shape: tuple[int, ...]
    dtype: np.dtype
    grain: int
    opened: tuple[Stamp, ...]

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(self.lengths)

    def fingerprint(self) -> str:
        """Return path, columns, size and latest change of the files."""
        return f"{shown(self.path)} ({', '.join(self.columns)}), {stamps_of(_files(self.path), self.path)}"

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate(self.lengths))

    def pieces(self, chunks: Chunks) -> Callable[[int], ParquetPiece]:
        """Return the row ranges by chunk number."""
        return lambda number: self._piece(*chunks.span(number))

    def _piece(self, start: int, stop: int) -> ParquetPiece:
        parts = []
        at, file = start, bisect_right(self._stops, start)
        while at < stop:
            begin = self._stops[file] - self.lengths[file]
            end = min(stop, self._stops[file])
            if end > at:
                parts.append(ParquetSlice(self.files[file], at - begin, end - begin, self.opened[file]))
            at, file = end, file + 1
        return ParquetPiece(tuple(parts), self.columns, self.row_shape, self.dtype)


class ParquetSlice(NamedTuple):
    """Rows `first` to `last` (excluded) of a file, and the file's stamp when it was opened."""

    file: str
    first: int
    last: int
    opened: Stamp


@dataclass(frozen=True)
class ParquetPiece:
    """Row ranges of parquet files."""

    parts: tuple[ParquetSlice, ...]
    columns: tuple[str, ...]
    row_shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> Array:
        """Return the rows; raises `OSError` when a file changed since it was opened."""
        read = [self._read(part.file, part.first, part.last) for part in self.parts]
        for part in self.parts:
            check_unchanged(part.file, part.opened)
        if not read:
            return np.empty((0, *self.row_shape), self.dtype)
        return read[0] if len(read) == 1 else np.concatenate(read)

    def table(self, file: str, first: int, last: int) -> Table:
        """Return rows of a file as a pyarrow Table."""
        _, parquet = pyarrow_modules()
        # Without `pre_buffer` each column of each row group is a request.
        with (
            files.readable(file) as content,
            parquet.ParquetFile(content, pre_buffer=is_address(file)) as opened,
        ):
            meta = opened.metadata
            stops = list(accumulate(meta.row_group(g).num_rows for g in range(meta.num_row_groups)))
            # Only whole row groups can be read: those with the rows are read, and sliced.
            low, high = bisect_right(stops, first), bisect_right(stops, last - 1)
            table = opened.read_row_groups(list(range(low, high + 1)), columns=list(self.columns))
            skipped = stops[low - 1] if low else 0
        return table.slice(first - skipped, last - first)

    def _read(self, file: str, first: int, last: int) -> Array:
        table = self.table(file, first, last)
        where = f"rows {first} to {last - 1} of {file!r}"
        sizes = self.row_shape if len(self.columns) == 1 else ()
        values = [_flat(table.column(c), sizes, f"column {c!r} in {where}") for c in self.columns]
        joined = values[0] if len(values) == 1 else np.stack(values, axis=1)
        return np.ascontiguousarray(joined.reshape(last - first, *self.row_shape), dtype=self.dtype)


def _flat(column: Any, sizes: tuple[int, ...], what: str) -> Array:
    """Return a column's numbers as a flat array; `sizes` are the lengths of its lists, outermost first."""
    pa, _ = pyarrow_modules()
    column = column.combine_chunks()
    # pyarrow leaves several chunks where the offsets of lists would overflow.
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    for size in sizes if _is_list(column.type) else ():
        _refuse_nulls(column, what)
        _refuse_ragged(column, size, what)
        column = column.flatten()
    _refuse_nulls(column, what)
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _refuse_ragged(column: Any, size: int, what: str) -> None:
    from pyarrow import compute

    lengths = compute.min_max(compute.list_value_length(column)).as_py().values()
    if len(column) and set(lengths) != {size}:
        low, high = lengths
        raise ConfigError(f"{what}: lists of {low} to {high} values, wanted {size} in every row")


def _refuse_nulls(column: Any, what: str) -> None:
    if column.null_count:
        raise ConfigError(f"{what}: {column.null_count} values are missing (null); fill them in first")


def _is_list(kind: Any) -> bool:
    pa, _ = pyarrow_modules()
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def open_parquet(path: str, column: str | None, name: str, axes: int | None) -> ParquetSource:
    """Return the array in a parquet file, or in the files of a folder.

    Parameters
    ----------
    column : str or None
        Name of the column.
    name : str
        Name of the model's input; by default, a column with this name is read.
    axes : int or None
        Number of the input's axes; a single column of numbers has one axis, or a second one of length 1.

    Raises
    ------
    ConfigError
        The table is not an array of numbers.
    """
    found, lengths, grain, opened, schemas = open_table(path)
    columns = _columns(path, schemas[0], column, name)
    dtype = _dtype(path, schemas, columns)
    if len(columns) > 1:
        row_shape: tuple[int, ...] = (len(columns),)
    else:
        row_shape = _row_shape(found, lengths, columns[0], schemas[0].field(columns[0]).type)
        if not row_shape and axes == 2:
            row_shape = (1,)
    return ParquetSource(path, found, lengths, columns, row_shape, dtype, grain, opened)


class ParquetFiles(NamedTuple):
    """The files of a table, their rows, the rows of a row group, and their stamps and schemas."""

    files: tuple[str, ...]
    lengths: tuple[int, ...]
    grain: int
    opened: tuple[Stamp, ...]
    schemas: Sequence[Schema]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, without an index of pandas that is no range."""
        return tuple(n for n in self.schemas[0].names if not n.startswith(_INDEX))

    @property
    def without_numbers(self) -> dict[str, str]:
        """The types of columns of texts, times and other values that are no numbers, by name."""
        kinds = {name: self.schemas[0].field(name).type for name in self.columns}
        return {name: str(kind) for name, kind in kinds.items() if not _holds_numbers(_leaf(kind))}


def open_table(path: str) -> ParquetFiles:
    """Return the files of a table; raises `ConfigError` where one is not parquet."""
    pa, _ = pyarrow_modules()
    found = _files(path)
    opened = stamps(found)
    try:
        # Threads, since a footer at an address takes a round trip or two.
        with ThreadPoolExecutor(_READERS, thread_name_prefix="ferro-stream-open") as threads:
            metas = list(threads.map(_footer, found))
    except pa.ArrowException as error:
        raise ConfigError(f"source {path!r} is not parquet: {error}") from error
    schemas = [meta.schema.to_arrow_schema() for meta in metas]
    return ParquetFiles(found, tuple(meta.num_rows for meta in metas), _grain(metas), opened, schemas)


def _footer(file: str) -> Any:
    _, parquet = pyarrow_modules()
    with files.readable(file) as content:
        return parquet.read_metadata(content)


def _files(path: str) -> tuple[str, ...]:
    if files.is_pattern(path):
        matched = tuple(sorted(files.matching(path), key=natural_sort_key))
        if not matched:
            raise ConfigError(f"source {path!r}: no file matches")
        return matched
    if not files.is_folder(path):
        return (path,)
    # Writers leave auxiliary files with such names: _SUCCESS, _metadata, .crc.
    names = [n for n in files.names_in(path) if n[0] not in "._"]
    found = sorted((n for n in names if n.endswith(SUFFIXES)), key=natural_sort_key)
    if not found and (partitions := sorted(n for n in names if "=" in n)):
        raise ConfigError(
            f"source {path!r} is a partitioned folder ({partitions[0]!r}), whose files have no order of rows;"
            " pass the files of one partition, or a dask array of the table"
        )
    if not found:
        raise ConfigError(f"source {path!r} is a folder without parquet files")
    return tuple(addresses.joined(path, n) for n in found)


def _columns(path: str, schema: Schema, column: str | None, name: str) -> tuple[str, ...]:
    names = [n for n in schema.names if not n.startswith(_INDEX)]
    if column is not None and column not in names:
        raise ConfigError(f"source {path!r} has no column {column!r}; it has {', '.join(names)}")
    if column is None and name in names:
        column = name
    if column is not None:
        return (column,)
    if not names:
        raise ConfigError(f"source {path!r} has no columns")
    return tuple(names)


def _dtype(path: str, schemas: Sequence[Schema], columns: Sequence[str]) -> np.dtype:
    pairs = list(product(schemas, columns))
    found = {_leaf(schema.field(c).type) for schema, c in pairs if c in schema.names}
    lists = len(columns) > 1 and any(_is_list(schemas[0].field(c).type) for c in columns)
    lacking = any(c not in schema.names for schema, c in pairs)
    if len(found) != 1 or lists or lacking:
        types = ", ".join(f"{c} ({schemas[0].field(c).type})" for c in columns)
        raise ConfigError(
            f"source {path!r} is no array: {types}; wanted numbers of one type in all files, or one column of"
            f" lists, or a column with the name of the model's input; name one: {path.rstrip('/')}/<column>"
        )
    kind = next(iter(found))
    if not _holds_numbers(kind):
        raise ConfigError(f"source {path!r} holds {kind}, wanted numbers")
    return numeric(np.dtype(kind.to_pandas_dtype()), f"source {path!r}")


def _holds_numbers(kind: Any) -> bool:
    pa, _ = pyarrow_modules()
    return bool(pa.types.is_primitive(kind) and not pa.types.is_temporal(kind))


def _leaf(kind: Any) -> Any:
    while _is_list(kind):
        kind = kind.value_type
    return kind


def _row_shape(paths: Sequence[str], lengths: Sequence[int], column: str, kind: Any) -> tuple[int, ...]:
    """Return the lengths of the lists, from the type where it declares them, else from the first row."""
    pa, parquet = pyarrow_modules()
    shape: list[int] = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    if not _is_list(kind):
        return tuple(shape)
    # The type does not declare the length of lists: the first row has it, and each read checks its rows.
    file = next((f for f, rows in zip(paths, lengths, strict=True) if rows), None)
    if file is None:
        raise ConfigError(
            f"source {paths[0]!r} has no rows, so the length of the lists in {column!r} is unknown"
        )
    with files.readable(file) as content, parquet.ParquetFile(content) as opened:
        row = next(opened.iter_batches(1, columns=[column])).column(0)[0].as_py()
    return np.shape(row)


def _grain(metas: Sequence[Any]) -> int:
    """Return the length of the row groups if all but the last have the same length; else 1."""
    groups: list[int] = []
    for meta in metas:
        groups += [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
    even = groups and len(set(groups[:-1])) <= 1 and groups[-1] <= groups[0]
    return max(1, groups[0]) if even else 1


@dataclass(frozen=True)
class ParquetSink:
    """A folder of parquet files, one per chunk; a file is written in a folder beside it, and moved when complete.

    At an address a file is an object, and `_SUCCESS` among them tells that they are complete.
    """

    suffix: ClassVar[str] = ".parquet"
    mark: ClassVar[str] = "_SUCCESS"
    path: str
    layout: Layout

    def __post_init__(self) -> None:
        pyarrow_modules()
        if self.layout.dtype.kind == "c":
            raise ConfigError(f"sink {self.path!r}: parquet has no complex numbers; use .npy or .zarr")

    def prepare(self) -> None:
        """Create the folder; without rows, with one empty file, which has the type."""
        for folder in (self._scratch, self.path):
            files.make_folder(folder)
        if not self.layout.chunks.rows:
            self.write(0, self._no_rows())
        addresses.begin(self.path)

    def fits(self) -> bool:
        """Whether the folder exists, and has no other files that would be read as rows."""
        if not files.is_folder(self.path):
            return False
        return not any(n.endswith((*SUFFIXES, self.suffix)) and n[0] not in "._" for n in self._others())

    def write(self, number: int, rows: Array) -> str:
        """Write the file of a chunk, which is on the disk when this returns; the folders must exist."""
        # Made in memory, so that the digest is of exactly the written bytes.
        made = self._content(rows)
        if is_address(self.path):
            files.put(self._file(number), made)
            return digest(made)
        part = os.path.join(self._scratch, f"{number}-{uuid.uuid4().hex}.tmp")
        try:
            with open(part, "wb") as file:
                file.write(made)
                file.flush()
                os.fdatasync(file.fileno())
            os.replace(part, self._file(number))
        except BaseException:
            if os.path.exists(part):
                os.unlink(part)
            raise
        return digest(made)

    def digest(self, number: int) -> str | None:
        """Return the digest of the file of a chunk."""
        return file_digest(self._file(number))

    def foreign(self) -> str | None:
        """Return the first path in the folder that is not the file of a chunk."""
        if is_address(self.path):
            return next((addresses.joined(self.path, n) for n in sorted(self._others())), None)
        if not os.path.isdir(self.path) or os.path.islink(self.path):
            return self.path
        paths = [os.path.join(self.path, n) for n in sorted(os.listdir(self.path))]
        others = {os.path.join(self.path, n) for n in self._others()}
        return next((p for p in paths if p in others or irregular(p)), None)

    def reopen(self) -> None:
        """Create the folder of incomplete files again."""
        files.make_folder(self._scratch)

    def tidy(self) -> None:
        """Remove the folder of incomplete files."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _content(self, rows: Table) -> Table:
        """Return the bytes of a chunk's file."""
        pa, parquet = pyarrow_modules()
        content = pa.BufferOutputStream()
        parquet.write_table(_table(self.layout.name, rows), content)
        return content.getvalue()

    def _no_rows(self) -> Table:
        return np.empty(self.layout.shape, self.layout.dtype)

    @property
    def _scratch(self) -> str:
        """The folder of incomplete files, which is beside the sink because all files in the sink are read."""
        return f"{self.path}.tmp"

    def _others(self) -> set[str]:
        """Return the names in the folder that are not those of chunks."""
        marks = addresses.MARKS if is_address(self.path) else ()
        return {n for n in files.names_in(self.path) if n not in marks and not self._is_chunk(n)}

    def _is_chunk(self, name: str) -> bool:
        number = name.removeprefix("part-").removesuffix(self.suffix)
        known = number.isascii() and number.isdigit() and int(number) < max(1, self.layout.chunks.count)
        return known and name == os.path.basename(self._file(int(number)))

    def _file(self, number: int) -> str:
        # The same number of digits in each name, so that names sort like their numbers.
        digits = max(6, len(str(self.layout.chunks.count)))
        return addresses.joined(self.path, f"part-{number:0{digits}d}{self.suffix}")


def _table(name: str, rows: Array) -> Any:
    pa, _ = pyarrow_modules()
    column = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for size in reversed(rows.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return pa.table({name: column})
