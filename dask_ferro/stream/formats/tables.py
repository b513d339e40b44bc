"""Tables as sources: parquet files and frames, whose pieces are tables of pyarrow; CSV files are in `csv`.

t.parquet, a folder, a pattern     row groups, decoded as a whole and kept by a worker while their parts are computed
key=value folders                  the keys are columns
frames                             of pandas, polars (a lazy one is collected), pyarrow and dask.dataframe
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Self
from urllib.parse import unquote

import narwhals as nw
import numpy as np
import xxhash
from dask.base import is_dask_collection
from dask.delayed import Delayed, delayed

from dask_ferro.errors import InputError
from dask_ferro.lower.inputs.tables import refuse_duplicates
from dask_ferro.lower.preparation.remote import is_address, mask
from dask_ferro.stream import files
from dask_ferro.stream.files import Stamp, check_unchanged
from dask_ferro.stream.formats import Source, pa

# pyarrow has no types.
Table = Any
Schema = Any
PARQUET = (".parquet", ".pq")
# pandas stores an index without a name as a column with this prefix.
_INDEX = "__index_level_"
# Objects are opened so many at a time, since each takes a round trip or two.
_READERS = 16
# What a value of a table costs to be read and written, on a core of a laptop.
VALUE_S = 1e-7


@lru_cache(maxsize=2)
def _decode_cached(decode: Callable[..., Table], *of_what: Any) -> Table:
    return decode(*of_what)


_decoding = Lock()


def decode_once(decode: Callable[..., Table], *of_what: Any) -> Table:
    """Return what a function decodes, which this process keeps until it has decoded two others."""
    # Threads that need the same rows wait for the one that decodes them, with all of pyarrow's threads.
    with _decoding:
        return _decode_cached(decode, *of_what)


def forget() -> None:
    """Release what this process decoded; called at the end of a run."""
    _decode_cached.cache_clear()


@dataclass(frozen=True)
class TableSource(Source):
    """Columns of a table, of which `schema` has names and types."""

    label: str
    schema: Schema
    rows: int

    @property
    def row_seconds(self) -> float:
        return VALUE_S * len(self.schema)

    def select(self, columns: Sequence[str]) -> Self:
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))


def _locate_groups(stops: Sequence[int], start: int, stop: int) -> tuple[slice, int]:
    """Return which groups of rows some rows are in, by the groups' ends, and how many rows are before them."""
    first = bisect_right(stops, start)
    return slice(first, bisect_left(stops, stop) + 1), start - (stops[first - 1] if first else 0)


# ---- parquet ------------------------------------------------------------------------------------------------


class RowGroup(NamedTuple):
    """A row group of a file, with the file's stamp and its folders below the source, such as "year=2026/month=1"."""

    path: str
    opened: Stamp
    folders: str
    number: int
    rows: int


@dataclass(frozen=True)
class ParquetTable(TableSource):
    """Columns of parquet files, which form one table: `rows` after the first `skip` of its row groups."""

    groups: tuple[RowGroup, ...]
    skip: int = 0
    index: tuple[str, ...] = ()

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate(group.rows for group in self.groups))

    @property
    def grain(self) -> int:
        """The longest row group if all but the last are as long, else 1."""
        lengths = [group.rows for group in self.groups]
        even = lengths and len(set(lengths[:-1])) <= 1 and lengths[-1] <= lengths[0]
        return max(1, lengths[0]) if even else 1

    def fingerprint(self) -> str:
        paths = list(dict.fromkeys(group.path for group in self.groups))
        return f"{mask(self.label)}, {files.summary(files.stamps(paths))}"

    def part(self, start: int, stop: int) -> ParquetTable:
        span, skip = _locate_groups(self._stops, start, stop)
        return replace(self, groups=self.groups[span], rows=stop - start, skip=skip)

    def read(self) -> Table:
        """Return the rows; raises `OSError` when a file changed since it was opened."""
        last = len(self.groups) - 1
        cut = {0} if self.skip else set()
        cut |= {last} if self.skip + self.rows < sum(group.rows for group in self.groups) else set()
        tables = [self.schema.empty_table()]
        # Whole row groups of a file are read together, and one of which other parts have rows is kept.
        numbered = groupby(range(last + 1), lambda k: (self.groups[k].path, k if k in cut else None))
        for (path, number), run in numbered:
            groups = tuple(self.groups[k] for k in run)
            is_whole = number is None
            tables.append(
                _decode(groups, self.schema) if is_whole else decode_once(_decode, groups, self.schema)
            )
            check_unchanged(path, groups[0].opened)
        return pa.concat_tables(tables).slice(self.skip, self.rows).unify_dictionaries()


def _decode(groups: tuple[RowGroup, ...], schema: Schema) -> Table:
    """Return row groups of one file, with the keys of its folders as columns."""
    first = groups[0]
    keys = pa.dataset.partitioning(schema, flavor="hive").parse(f"{first.folders}/")
    with _arrow_file(first.path) as (file, system):
        fragment = pa.dataset.ParquetFileFormat().make_fragment(
            file, system, partition_expression=keys, row_groups=[group.number for group in groups]
        )
        try:
            return fragment.to_table(schema=schema, columns=schema.names)
        except (pa.ArrowException, NotImplementedError) as error:
            raise InputError(f"source {first.path!r} cannot be read: {error}") from error


@contextmanager
def _arrow_file(path: str) -> Iterator[tuple[Any, Any]]:
    """Have a file as pyarrow takes it: a path and its own file system, or an open file of fsspec."""
    from pyarrow.fs import LocalFileSystem

    if is_address(path):
        with files.open_file(path) as file:
            yield file, None
    else:
        yield path, LocalFileSystem()


def open_parquet(path: str) -> ParquetTable:
    """Return a parquet file, the files of a folder with their keys, or those of a pattern, as a table."""
    paths = files.files_of(path, PARQUET)
    if not paths:
        raise InputError(
            f"source {path!r}: no file matches"
            if files.is_pattern(path)
            else f"source {path!r} is a folder without parquet files"
        )
    opened = files.stamps(paths)
    try:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="ferro-stream-open") as threads:
            metas = list(threads.map(_footer, paths))
    except pa.ArrowException as error:
        raise InputError(f"source {path!r} is not parquet: {error}") from error
    top = files.folder_of(path).rstrip("/")
    folders = [os.path.dirname(file[len(top) :]).strip("/") for file in paths]
    schemas = [meta.schema.to_arrow_schema() for meta in metas]
    refuse_duplicates(schemas[0].names, f"source {path!r}")
    groups = tuple(
        RowGroup(file, opened[file], folder, number, meta.row_group(number).num_rows)
        for file, folder, meta in zip(paths, folders, metas, strict=True)
        for number in range(meta.num_row_groups)
    )
    index = (schemas[0].pandas_metadata or {}).get("index_columns", ())
    return ParquetTable(
        path,
        _unify(path, paths, schemas, list(map(_keys, folders))),
        sum(group.rows for group in groups),
        groups,
        index=tuple(name for name in index if isinstance(name, str)),
    )


def _footer(file: str) -> Any:
    with _arrow_file(file) as (opened, system):
        return pa.parquet.read_metadata(opened, filesystem=system)


def _keys(folders: str) -> dict[str, str | None]:
    """Return the keys of folders, as Hive writes them."""
    parts = [part.partition("=") for part in folders.split("/") if "=" in part]
    missing = "__HIVE_DEFAULT_PARTITION__"
    return {unquote(key): None if value == missing else unquote(value) for key, _, value in parts}


def _unify(
    path: str, paths: Sequence[str], schemas: Sequence[Schema], keys: Sequence[Mapping[str, str | None]]
) -> Schema:
    """Return a schema that holds the values of all files, and of their folders."""
    names = [name for name in schemas[0].names if not name.startswith(_INDEX)]
    plain = []
    for file, schema in zip(paths, schemas, strict=True):
        fields = {field.name: field for field in schema}
        if missing := [name for name in names if name not in fields]:
            raise InputError(f"source {file!r} has no column {missing}, which {paths[0]!r} has")
        plain.append(pa.schema([fields[name] for name in names]))
    unified = _one_schema(plain, f"source {path!r}: its files")
    there = set(names)
    for key in dict.fromkeys(name for one in keys for name in one):
        if key in there:
            raise InputError(f"source {path!r} has {key!r} as a column and as a folder's key: remove one")
        values = [one.get(key) for one in keys]
        unified = unified.append(pa.field(key, _key_type(values)))
    return unified


def _one_schema(schemas: Sequence[Schema], what: str) -> Schema:
    """Return a schema that holds the values of all tables."""
    plain = dict.fromkeys(pa.schema(map(_widen, schema)) for schema in schemas)
    try:
        return pa.unify_schemas(list(plain), promote_options="permissive").remove_metadata()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(
            f"{what} have different types: {error}; write them with one type a column"
        ) from error


def _widen(field: Any) -> Any:
    """Return a field without pandas' metadata; categories get the one width of index that all files fit."""
    kind = field.type
    if pa.types.is_dictionary(kind):
        kind = pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
    return pa.field(field.name, kind)


def _key_type(values: Sequence[str | None]) -> Any:
    whole = all(
        value is None or (value.lstrip("-").isdigit() and str(int(value)) == value) for value in values
    )
    return pa.int64() if whole and any(value is not None for value in values) else pa.string()


def is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def holds_numbers(kind: Any) -> bool:
    """Return whether a type of pyarrow is one of numbers, or of lists of them."""
    while is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_primitive(kind) and not pa.types.is_temporal(kind))


# ---- frames -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrameTable(TableSource):
    """A table in this process, of whatever library."""

    grain: ClassVar[int] = 1
    table: Table

    def fingerprint(self) -> str:
        return f"{self.label}, digest {digest_of(self.part(0, self.rows))}"

    def part(self, start: int, stop: int) -> Table:
        return self.table.select(self.schema.names).slice(start, stop - start)


@dataclass(frozen=True)
class DaskTable(TableSource):
    """A frame of dask.dataframe, which its name identifies, with the rows of its partitions."""

    is_cut: ClassVar[bool] = False
    is_named: ClassVar[bool] = True
    partitions: tuple[Any, ...]
    lengths: tuple[int, ...]

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate(self.lengths))

    @property
    def grain(self) -> int:
        return max(1, *self.lengths)

    def fingerprint(self) -> str:
        return self.label

    def part(self, start: int, stop: int) -> Delayed:
        span, skip = _locate_groups(self._stops, start, stop)
        rows: Delayed = delayed(_rows_of_parts, pure=False)(
            skip, stop - start, self.schema, *self.partitions[span]
        )
        return rows


def _rows_of_parts(skip: int, take: int, schema: Schema, *parts: Any) -> Table:
    tables = [as_arrow(part, "a partition").select(schema.names).cast(schema) for part in parts]
    return pa.concat_tables(tables).slice(skip, take)


def digest_of(rows: Any) -> str:
    """Return a digest of the content of an array or a table: 128 bits, at memory speed."""
    if isinstance(rows, np.ndarray):
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return xxhash.xxh3_128_hexdigest(_ipc(rows))


def compact(piece: Any) -> Any:
    """Return a table with its own rows alone, as a slice is pickled with all of its table; anything else as it is."""
    return pa.ipc.open_stream(_ipc(piece)).read_all() if hasattr(piece, "combine_chunks") else piece


def _ipc(table: Table) -> Any:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue()


def _facts(part: Any) -> tuple[int, Schema]:
    table = as_arrow(part, "a partition")
    return table.num_rows, table.schema


def is_frame(value: Any) -> bool:
    """Return whether a value is a frame: of pandas, polars, pyarrow, dask.dataframe or another library."""
    if is_dask_collection(value):
        return hasattr(value, "npartitions") and hasattr(value, "columns")
    return isinstance(nw.from_native(value, pass_through=True), (nw.DataFrame, nw.LazyFrame))


def as_arrow(frame: Any, what: str) -> Table:
    """Return a frame as a table of pyarrow, without an index; raises `InputError` where it has values of no type."""
    if hasattr(frame, "set_axis"):
        # Labels of pandas may be numbers; an index is no column.
        frame = frame.set_axis([str(name) for name in frame.columns], axis=1).reset_index(drop=True)
    read = nw.from_native(frame)
    read = read.collect() if isinstance(read, nw.LazyFrame) else read
    refuse_duplicates(list(read.columns), what)
    try:
        table = read.to_arrow()
    except (pa.ArrowException, TypeError) as error:
        raise InputError(f"{what} has a column of values that are of no one type: {error}") from error
    return table.select([n for n in table.column_names if not n.startswith(_INDEX)]).replace_schema_metadata(
        None
    )


def open_frame(frame: Any, client: Any) -> TableSource:
    """Return a frame as a table; of dask.dataframe, the partitions are computed once for their rows and types."""
    what = f"a {type(frame).__module__.partition('.')[0]} {type(frame).__name__}"
    if not is_dask_collection(frame):
        table = as_arrow(frame, what)
        return FrameTable(what, table.schema, table.num_rows, table)
    import dask

    parts = frame.to_delayed()
    found = dask.compute(*(delayed(_facts)(p) for p in parts), scheduler=client)  # type: ignore[attr-defined]
    lengths, schemas = zip(*found, strict=True)
    schema = _one_schema(schemas, f"{what}: its partitions")
    return DaskTable(f"{what} {frame._name}", schema, sum(lengths), tuple(parts), lengths)
