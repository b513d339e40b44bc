"""Tables as sources: parquet files, CSV files and frames, whose pieces are tables of pyarrow.

t.parquet, a folder, a pattern     row groups, decoded as a whole and kept by a worker while their parts are computed
key=value folders                  the keys are columns
t.csv                              byte ranges between lines, which the client finds by reading the file once
t.csv.gz, or UTF-16                decoded as a whole, and kept as a row group is
frames                             of pandas, polars (a lazy one is collected), pyarrow and dask.dataframe
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from threading import Lock
from types import ModuleType
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote

import narwhals as nw
import numpy as np
import xxhash
from dask.base import is_dask_collection
from dask.delayed import Delayed, delayed

from dask_ferro.errors import ConfigError
from dask_ferro.lower.inputs.tables import refuse_duplicates
from dask_ferro.lower.prepared.remote import is_address, shown
from dask_ferro.stream import files
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.files import Stamp, check_unchanged
from dask_ferro.stream.formats import Array, TableSource, missing_extra, numeric

# pyarrow has no types.
Table = Any
Schema = Any
PARQUET = (".parquet", ".pq")
# pandas stores an index without a name as a column with this prefix.
_INDEX = "__index_level_"
# What a value of a table costs to be read and written, on a core of a laptop.
_VALUE_S = 1e-7
# Rows between two places of a CSV file that are remembered, bytes that are looked through at a time, and those of the
# first rows, of which the columns' types follow.
_CSV_GRAIN, _CSV_BLOCK, _CSV_FIRST = 1024, 1 << 24, 1 << 20
_BREAK, _RETURN, _QUOTE = b'\n\r"'
# pandas takes these for missing values.
_MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
# Texts of so many digits are no double: 2 ** 53 has sixteen.
_LONG_NUMBER = r"^[+-]?\d{16,}$"


def arrow() -> ModuleType:
    """Return pyarrow, with its modules for files; raises `ConfigError` where it is not installed."""
    try:
        # Imported on use: it is an extra.
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.dataset
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra("pyarrow", error) from error
    return pyarrow


class _Latest:
    """The latest two values that were decoded in this process, each once however many threads need it."""

    def __init__(self) -> None:
        self._lock, self._kept = Lock(), dict[object, Future[Any]]()

    def get(self, key: object, decode: Callable[[], Any]) -> Any:
        with self._lock:
            found = self._kept.pop(key, None)
            future = Future[Any]() if found is None or (found.done() and found.exception()) else found
            self._kept[key] = future
            while len(self._kept) > 2:
                del self._kept[next(iter(self._kept))]
        if future is not found:
            try:
                future.set_result(decode())
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


_latest = _Latest()


def forget() -> None:
    """Release what this process decoded; called at the end of a run."""
    _latest.clear()


# ---- parquet ------------------------------------------------------------------------------------------------


class ParquetFile(NamedTuple):
    """A file of a table: rows of its row groups, its stamp, and the keys of its folders as pyarrow's expression."""

    path: str
    groups: tuple[int, ...]
    opened: Stamp
    keys: Any


class GroupRange(NamedTuple):
    """Rows `skip` to `skip + take` of some row groups of a file; `is_part`: of one that others read as well."""

    file: ParquetFile
    groups: tuple[int, ...]
    skip: int
    take: int
    is_part: bool


@dataclass(frozen=True)
class ParquetTable:
    """Columns of parquet files, which form one table."""

    is_cut: ClassVar[bool] = True
    label: str
    files: tuple[ParquetFile, ...]
    schema: Schema
    index: tuple[str, ...] = ()

    @cached_property
    def _groups(self) -> list[tuple[ParquetFile, int]]:
        return [(file, number) for file in self.files for number in range(len(file.groups))]

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate(rows for file in self.files for rows in file.groups))

    @property
    def rows(self) -> int:
        return self._stops[-1] if self._stops else 0

    @property
    def grain(self) -> int:
        """The longest row group if all but the last are as long, else 1."""
        lengths = [rows for file in self.files for rows in file.groups]
        even = lengths and len(set(lengths[:-1])) <= 1 and lengths[-1] <= lengths[0]
        return max(1, lengths[0]) if even else 1

    @property
    def row_seconds(self) -> float:
        return _VALUE_S * len(self.schema)

    def select(self, columns: Sequence[str]) -> ParquetTable:
        pa = arrow()
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def fingerprint(self) -> str:
        paths = [file.path for file in self.files]
        return f"{shown(self.label)}, {files.summary(files.stamps(paths))}"

    def pieces(self, chunks: Chunks) -> Callable[[int], ParquetPiece]:
        return lambda number: ParquetPiece(tuple(self._ranges(*chunks.span(number))), self.schema)

    def _ranges(self, start: int, stop: int) -> Iterator[GroupRange]:
        at, number = start, bisect_right(self._stops, start)
        while at < stop:
            file, first = self._groups[number]
            begin = self._stops[number] - file.groups[first]
            last = first
            # Whole row groups of a file are read together.
            while (
                at == begin
                and last + 1 < len(file.groups)
                and self._stops[number] + file.groups[last + 1] <= stop
            ):
                last, number = last + 1, number + 1
            end = min(stop, self._stops[number])
            is_part = at > begin or end < self._stops[number]
            if end > at:
                yield GroupRange(file, tuple(range(first, last + 1)), at - begin, end - at, is_part)
            at, number = end, number + 1


@dataclass(frozen=True)
class ParquetPiece:
    """Row ranges of parquet files."""

    ranges: tuple[GroupRange, ...]
    schema: Schema

    def read(self) -> Table:
        """Return the rows; raises `OSError` when a file changed since it was opened."""
        pa = arrow()
        found = [self._read(part) for part in self.ranges]
        return pa.concat_tables([self.schema.empty_table(), *found]).unify_dictionaries()

    def _read(self, part: GroupRange) -> Table:
        if part.is_part:
            key = (part.file.path, part.file.opened, part.groups, tuple(self.schema.names))
            table = _latest.get(key, lambda: self._decoded(part))
        else:
            table = self._decoded(part)
        check_unchanged(part.file.path, part.file.opened)
        return table.slice(part.skip, part.take)

    def _decoded(self, part: GroupRange) -> Table:
        pa = arrow()
        with _arrow_file(part.file.path) as (file, system):
            fragment = pa.dataset.ParquetFileFormat().make_fragment(
                file, system, partition_expression=part.file.keys, row_groups=list(part.groups)
            )
            try:
                return fragment.to_table(schema=self.schema, columns=self.schema.names)
            except (pa.ArrowException, NotImplementedError) as error:
                raise ConfigError(f"source {part.file.path!r} cannot be read: {error}") from error


@contextmanager
def _arrow_file(path: str) -> Iterator[tuple[Any, Any]]:
    """Have a file as pyarrow takes it: a path and its own file system, or an open file of fsspec."""
    from pyarrow.fs import LocalFileSystem

    if is_address(path):
        with files.opened(path) as file:
            yield file, None
    else:
        yield path, LocalFileSystem()


def open_parquet(path: str) -> ParquetTable:
    """Return a parquet file, the files of a folder with their keys, or those of a pattern, as a table."""
    pa = arrow()
    found = files.files_of(path, PARQUET)
    if not found:
        raise ConfigError(
            f"source {path!r}: no file matches"
            if files.is_pattern(path)
            else f"source {path!r} is a folder without parquet files"
        )
    opened = files.stamps(found)
    try:
        # Threads, since a footer at an address takes a round trip or two.
        with ThreadPoolExecutor(files.READERS, thread_name_prefix="ferro-stream-open") as threads:
            metas = list(threads.map(_footer, found))
    except pa.ArrowException as error:
        raise ConfigError(f"source {path!r} is not parquet: {error}") from error
    keys = [_keys(file, path) for file in found]
    schemas = [meta.schema.to_arrow_schema() for meta in metas]
    refuse_duplicates(schemas[0].names, f"source {path!r}")
    schema = _unified(path, found, schemas, keys)
    lengths = [tuple(m.row_group(g).num_rows for g in range(m.num_row_groups)) for m in metas]
    made = tuple(
        ParquetFile(file, groups, opened[file], _expression(key, schema))
        for file, groups, key in zip(found, lengths, keys, strict=True)
    )
    return ParquetTable(path, made, schema, _index_of(schemas[0]))


def _footer(file: str) -> Any:
    with _arrow_file(file) as (opened, system):
        return arrow().parquet.read_metadata(opened, filesystem=system)


def _keys(file: str, above: str) -> dict[str, str | None]:
    """Return the keys of a file's folders below the source, as Hive writes them."""
    top = files.folder_of(above) if files.is_pattern(above) else above
    folder = os.path.dirname(file[len(top.rstrip("/")) :]).strip("/")
    if "=" not in folder:
        return {}
    parts = [part.partition("=") for part in folder.split("/") if "=" in part]
    missing = "__HIVE_DEFAULT_PARTITION__"
    return {key: None if value == missing else unquote(value) for key, _, value in parts}


def _unified(
    path: str, found: Sequence[str], schemas: Sequence[Schema], keys: Sequence[Mapping[str, str | None]]
) -> Schema:
    """Return a schema that holds the values of all files, and of their folders."""
    pa = arrow()
    names = [name for name in schemas[0].names if not name.startswith(_INDEX)]
    plain = []
    for file, schema in zip(found, schemas, strict=True):
        fields = {field.name: field for field in schema}
        if missing := [name for name in names if name not in fields]:
            raise ConfigError(f"source {file!r} has no column {missing}, which {found[0]!r} has")
        plain.append(pa.schema([_widened(fields[name]) for name in names]))
    try:
        unified = pa.unify_schemas(list(dict.fromkeys(plain)), promote_options="permissive").remove_metadata()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ConfigError(
            f"source {path!r}: its files have different types: {error}; write them with one type a column"
        ) from error
    there = set(names)
    for key in dict.fromkeys(name for one in keys for name in one):
        if key in there:
            raise ConfigError(f"source {path!r} has {key!r} as a column and as a folder's key: remove one")
        values = [one.get(key) for one in keys]
        unified = unified.append(pa.field(key, _key_type(values)))
    return unified


def _widened(field: Any) -> Any:
    """Return a field without pandas' metadata; categories get the one width of index that all files fit."""
    pa = arrow()
    kind = field.type
    if pa.types.is_dictionary(kind):
        kind = pa.dictionary(pa.int32(), kind.value_type, kind.ordered)
    return pa.field(field.name, kind)


def _key_type(values: Sequence[str | None]) -> Any:
    pa = arrow()
    whole = all(
        value is None or (value.lstrip("-").isdigit() and str(int(value)) == value) for value in values
    )
    return pa.int64() if whole and any(value is not None for value in values) else pa.string()


def _expression(keys: Mapping[str, str | None], schema: Schema) -> Any:
    pa = arrow()
    found = None
    for name, value in keys.items():
        kind = schema.field(name).type
        typed = value if value is None or pa.types.is_string(kind) else int(value)
        one = (
            pa.dataset.field(name).is_null()
            if typed is None
            else pa.dataset.field(name) == pa.scalar(typed, kind)
        )
        found = one if found is None else found & one
    return found


def _index_of(schema: Schema) -> tuple[str, ...]:
    found = (schema.pandas_metadata or {}).get("index_columns", ())
    return tuple(name for name in found if isinstance(name, str))


# ---- columns as an array ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnsSource:
    """Columns of a parquet table as one array: a column of numbers or lists, or columns of numbers side by side."""

    is_cut: ClassVar[bool] = True
    table: ParquetTable
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def rows(self) -> int:
        return self.table.rows

    @property
    def grain(self) -> int:
        return self.table.grain

    @property
    def row_seconds(self) -> float:
        return _VALUE_S * int(np.prod(self.row_shape, dtype=int))

    def fingerprint(self) -> str:
        return f"{self.table.fingerprint()}, {len(self.table.schema)} columns from {self.table.schema.names[0]!r}"

    def pieces(self, chunks: Chunks) -> Callable[[int], ColumnsPiece]:
        piece = self.table.pieces(chunks)
        return lambda number: ColumnsPiece(
            piece(number),
            self.row_shape,
            self.dtype,
            f"rows from {chunks.span(number)[0]} of {self.table.label!r}",
        )


@dataclass(frozen=True)
class ColumnsPiece:
    table: ParquetPiece
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    where: str

    def read(self) -> Array:
        table = self.table.read()
        sizes = self.row_shape if table.num_columns == 1 else ()
        values = [
            _flat(c, sizes, f"column {n!r} in {self.where}")
            for n, c in zip(table.column_names, table.columns, strict=True)
        ]
        joined = values[0] if len(values) == 1 else np.stack(values, axis=1)
        return np.ascontiguousarray(joined.reshape(table.num_rows, *self.row_shape), dtype=self.dtype)


def _flat(column: Any, sizes: tuple[int, ...], what: str) -> Array:
    """Return a column's numbers as a flat array; `sizes` are the lengths of its lists, outermost first."""
    pa = arrow()
    compute = pa.compute
    column = pa.concat_arrays(column.chunks) if column.num_chunks else column.combine_chunks()
    for size in sizes if is_list(column.type) else ():
        _refuse_nulls(column, what)
        lengths = compute.min_max(compute.list_value_length(column)).as_py().values()
        if len(column) and set(lengths) != {size}:
            low, high = lengths
            raise ConfigError(f"{what}: lists of {low} to {high} values, wanted {size} in every row")
        column = column.flatten()
    _refuse_nulls(column, what)
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _refuse_nulls(column: Any, what: str) -> None:
    if column.null_count:
        raise ConfigError(f"{what}: {column.null_count} values are missing (null); fill them in first")


def is_list(kind: Any) -> bool:
    pa = arrow()
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _leaf(kind: Any) -> Any:
    while is_list(kind):
        kind = kind.value_type
    return kind


def holds_numbers(kind: Any) -> bool:
    """Return whether a type of pyarrow is one of numbers, or of lists of them."""
    pa = arrow()
    leaf = _leaf(kind)
    return bool(pa.types.is_primitive(leaf) and not pa.types.is_temporal(leaf))


def columns_source(table: ParquetTable, column: str | None, name: str, axes: int | None) -> ColumnsSource:
    """Return the array in a parquet table: of `column`, else of one with the input's `name`, else of all columns.

    For an input of two `axes`, a single column of numbers has a second one of length 1.
    """
    path, kinds = table.label, {field.name: field.type for field in table.schema}
    if column is not None and column not in kinds:
        raise ConfigError(f"source {path!r} has no column {column!r}; it has {', '.join(kinds)}")
    if not kinds:
        raise ConfigError(f"source {path!r} has no columns")
    column = name if column is None and name in kinds else column
    columns = (column,) if column is not None else tuple(kinds)
    leaves = {_leaf(kinds[c]) for c in columns}
    if len(leaves) != 1 or (len(columns) > 1 and any(is_list(kinds[c]) for c in columns)):
        types = ", ".join(f"{c} ({kinds[c]})" for c in columns[:8]) + (", ..." if len(columns) > 8 else "")
        raise ConfigError(
            f"source {path!r} is no array: {types}; wanted numbers of one type in all files, or one column of"
            f" lists, or a column with the name of the model's input; name one: {path.rstrip('/')}/<column>"
        )
    (kind,) = leaves
    if not holds_numbers(kind):
        raise ConfigError(f"source {path!r} holds {kind}, wanted numbers")
    dtype = numeric(np.dtype(kind.to_pandas_dtype()), f"source {path!r}")
    table = table.select(columns)
    shape = (len(columns),) if len(columns) > 1 else _list_sizes(table, kinds[columns[0]])
    return ColumnsSource(table, (1,) if not shape and axes == 2 else shape, dtype)


def _list_sizes(table: ParquetTable, kind: Any) -> tuple[int, ...]:
    """Return the lengths of the lists, from the type where it declares them, else from the first row."""
    pa = arrow()
    shape: list[int] = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    if not is_list(kind):
        return tuple(shape)
    # The type does not declare the length of lists: the first row has it, and each read checks its rows.
    if not table.rows:
        raise ConfigError(
            f"source {table.label!r} has no rows, so the length of the lists in {table.schema.names[0]!r} is unknown"
        )
    return np.shape(table.pieces(Chunks(table.rows, 1))(0).read().column(0)[0].as_py())


# ---- CSV ----------------------------------------------------------------------------------------------------


class CsvOptions(NamedTuple):
    """What a CSV file does not say of itself."""

    separator: str = ","
    encoding: str = "utf-8"
    null_values: tuple[str, ...] = _MISSING
    types: Mapping[str, str] = {}

    def parsing(self) -> dict[str, Any]:
        pa = arrow()
        return {"parse_options": pa.csv.ParseOptions(delimiter=self.separator, newlines_in_values=True)}

    def converting(self, columns: Sequence[str] | None = None, types: Mapping[str, Any] | None = None) -> Any:
        pa = arrow()
        return pa.csv.ConvertOptions(
            null_values=list(self.null_values), strings_can_be_null=True, column_types=types,
            include_columns=None if columns is None else list(columns),
        )  # fmt: skip

    @property
    def is_cut(self) -> bool:
        """Whether bytes of lines, quotes and separators are those of ASCII, so that ranges of bytes can be read."""
        text = f'\n"{self.separator}'
        return text.encode(self.encoding) == text.encode()


@dataclass(frozen=True)
class CsvTable:
    """Columns of a CSV file with a header.

    `marks` are where every 1024th row begins, in bytes, and the end; of a file that is decoded as a whole there are
    none.  `exact` are columns of numbers that are kept, of which the texts have to be those of the numbers.
    """

    is_cut: ClassVar[bool] = True
    label: str
    rows: int
    marks: tuple[int, ...]
    names: tuple[str, ...]
    schema: Schema
    options: CsvOptions
    opened: Stamp
    exact: tuple[str, ...] = ()

    @property
    def grain(self) -> int:
        return _CSV_GRAIN if self.marks else max(1, self.rows)

    @property
    def row_seconds(self) -> float:
        return 2 * _VALUE_S * len(self.names)

    def select(self, columns: Sequence[str]) -> CsvTable:
        pa = arrow()
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def typed(self, features: Mapping[str, np.dtype[Any]], keep: Sequence[str]) -> CsvTable:
        """Return the table with the types that a model and the caller want of its columns."""
        pa = arrow()
        kept = set(keep)
        exact = tuple(
            f.name
            for f in self.schema
            if f.name in kept
            and f.name not in self.options.types
            and (pa.types.is_integer(f.type) or pa.types.is_floating(f.type))
        )
        fields = []
        for name, found in ((field.name, field.type) for field in self.schema):
            dtype = None if name in self.options.types or name in kept else features.get(name)
            if dtype is not None and dtype.kind in "biuf" and pa.types.is_string(found):
                raise _misread(self.label, f"column {name!r} has texts, and the model takes {dtype}")
            if features.get(name) == np.dtype(object) and name not in self.options.types:
                found = pa.string()
            elif (
                dtype is not None
                and dtype.kind == "f"
                and (pa.types.is_integer(found) or pa.types.is_null(found))
            ):
                # Whole numbers may have fractions further on.
                found = pa.float64()
            elif pa.types.is_null(found):
                found = pa.string()
            fields.append(pa.field(name, found))
        text = {name for name, dtype in features.items() if dtype == np.dtype(object)}
        return replace(
            self, schema=pa.schema(fields), exact=tuple(name for name in exact if name not in text)
        )

    def fingerprint(self) -> str:
        return f"{shown(self.label)}, {files.stamp(self.label)}"

    def pieces(self, chunks: Chunks) -> Callable[[int], CsvPiece]:
        return lambda number: CsvPiece(self._at(*chunks.span(number)), self._shared)

    @cached_property
    def _shared(self) -> CsvTable:
        # The marks of a long file stay in the client.
        return replace(self, marks=())

    def _at(self, start: int, stop: int) -> CsvRange:
        if not self.marks:
            return CsvRange(None, self.rows, start, stop - start)
        low, high = start // _CSV_GRAIN, -(-stop // _CSV_GRAIN)
        held = min(self.rows, high * _CSV_GRAIN) - low * _CSV_GRAIN
        return CsvRange((self.marks[low], self.marks[high]), held, start - low * _CSV_GRAIN, stop - start)


class CsvRange(NamedTuple):
    """A range of bytes (None: all) with `held` rows, of which `take` are wanted after `skip`."""

    extent: tuple[int, int] | None
    held: int
    skip: int
    take: int


@dataclass(frozen=True)
class CsvPiece:
    range: CsvRange
    table: CsvTable

    def read(self) -> Table:
        """Return the rows; raises `OSError` when the file changed since it was opened."""
        table, extent = self.table, self.range.extent
        if extent is None:
            key = (
                table.label,
                table.opened,
                table.options.encoding,
                table.options.separator,
                str(table.schema),
            )
            found = _latest.get(key, lambda: self._parsed(_whole(table.label)))
        else:
            found = self._parsed(files.read(table.label, *extent, table.opened.size))
        check_unchanged(table.label, table.opened)
        if found.num_rows != self.range.held:
            raise ConfigError(
                f"source {table.label!r}: {found.num_rows} rows where {self.range.held} records are, in bytes {extent}:"
                " a quote inside of a value splits it otherwise than pandas does; write it as parquet"
            )
        return found.slice(self.range.skip, self.range.take)

    def _parsed(self, content: bytes) -> Table:
        pa = arrow()
        table = self.table
        if not self.range.held:
            return table.schema.empty_table()
        kinds = {f.name: pa.string() if f.name in table.exact else f.type for f in table.schema}
        reading = pa.csv.ReadOptions(
            column_names=table.names,
            skip_rows=0 if self.range.extent else 1,
            encoding=table.options.encoding,
            # One block, since a record must not be longer than a block.
            block_size=max(1 << 20, len(content) + 1),
        )
        options = table.options
        try:
            found = pa.csv.read_csv(
                pa.BufferReader(content),
                reading,
                **options.parsing(),
                convert_options=options.converting(table.schema.names, kinds),
            )
            for name in table.exact:
                number = _exact(found.column(name), table.schema.field(name).type, name)
                found = found.set_column(found.column_names.index(name), name, number)
        except (pa.ArrowException, UnicodeError) as error:
            raise _misread(table.label, str(error)) from error
        return found.cast(table.schema)


def _exact(texts: Any, kind: Any, name: str) -> Any:
    """Return the numbers of some texts; raises pyarrow's error where a number does not keep its text."""
    pa = arrow()
    compute = pa.compute
    numbers = texts.cast(kind)
    if pa.types.is_integer(kind):
        wrong = compute.not_equal(numbers.cast(pa.string()), texts)
    else:
        wrong = compute.match_substring_regex(texts, _LONG_NUMBER)
    if (lost := texts.filter(compute.fill_null(wrong, False))).length():
        raise pa.ArrowInvalid(f"column {name!r} has {lost[0].as_py()!r}, which {kind} does not keep as it is")
    return numbers


def _misread(path: str, said: str) -> ConfigError:
    """Return the error for a CSV file, with the option that is the likely remedy."""
    if "UTF8" in said or "codec" in said:
        remedy = 'it has another encoding: pass encoding="latin-1", or its own'
    elif "Expected" in said and "columns" in said:
        remedy = 'its lines have different numbers of values: pass separator=";", or its own, or correct them'
    else:
        remedy = (
            'its columns have the types of its first rows: pass types={"column": "string"}, or words for missing'
            ' values by null_values=["-"], or write it as parquet, which holds types'
        )
    return ConfigError(f"source {path!r}: {said}; {remedy}")


def _whole(path: str) -> bytes:
    with files.opened(path, "infer") as file:
        content: bytes = file.read()
    return content


def open_csv(path: str, options: CsvOptions) -> CsvTable:
    """Return a CSV file with a header as a table; all of it is read once, to find its rows."""
    pa = arrow()
    try:
        is_cut = options.is_cut and files.suffix_of(path) in (".csv", ".tsv")
        opened = files.stamp(path)
        schema, texts = _first_rows(path, options)
        refuse_duplicates(schema.names, f"source {path!r}")
        marks, rows = _marks(path) if is_cut else ((), _counted(path, options, schema.names))
    except (pa.ArrowException, UnicodeError, LookupError) as error:
        if "UTF8" in str(error) or isinstance(error, UnicodeError):
            raise _misread(path, str(error)) from error
        raise ConfigError(f"source {path!r} is no CSV with a header: {error}") from error
    # The types and the marks are of one file.
    check_unchanged(path, opened)
    if len(schema) == 1 and (other := [c for c in ";\t|" if c in schema.names[0] and c != options.separator]):
        raise ConfigError(f"source {path!r} has one column, {schema.names[0]!r}: pass separator={other[0]!r}")
    fields = []
    for field in schema:
        kind = field.type
        if field.name in options.types:
            kind = _type_of(options.types[field.name])
        elif pa.types.is_binary(kind):
            raise _misread(path, f"column {field.name!r} has bytes that are no UTF8")
        elif (pa.types.is_integer(kind) or pa.types.is_floating(kind)) and not _keeps(
            texts.column(field.name), kind
        ):
            # Such as 0000001, or a number of twenty digits.
            kind = pa.string()
        fields.append(pa.field(field.name, kind))
    if unknown := sorted(set(options.types) - set(schema.names)):
        raise ConfigError(
            f"types={unknown} are no columns of {path!r}; it has {', '.join(schema.names[:20])}"
        )
    return CsvTable(path, rows, marks, tuple(schema.names), pa.schema(fields), options, opened)


def _type_of(name: str) -> Any:
    pa = arrow()
    try:
        return pa.string() if name in ("str", "object", "category") else pa.type_for_alias(str(name))
    except ValueError:
        raise ConfigError(
            f"types: {name!r} is no type; wanted one of pyarrow's, such as 'string' or 'float64'"
        ) from None


def _first_rows(path: str, options: CsvOptions) -> tuple[Schema, Table]:
    pa = arrow()
    reading = pa.csv.ReadOptions(block_size=_CSV_FIRST, encoding=options.encoding)

    def first(types: Mapping[str, Any] | None) -> tuple[Schema, Table]:
        with (
            files.opened(path, "infer") as file,
            pa.csv.open_csv(
                file, reading, **options.parsing(), convert_options=options.converting(types=types)
            ) as reader,
        ):
            first_batch = next(iter(reader), None)
            batches = [] if first_batch is None else [first_batch]
            return reader.schema, pa.Table.from_batches(batches, reader.schema)

    schema, _ = first(None)
    texts = dict.fromkeys(schema.names, pa.string())
    try:
        return schema, first(texts)[1]
    except pa.ArrowInvalid as error:
        raise _misread(path, str(error)) from error


def _keeps(texts: Any, kind: Any) -> bool:
    pa = arrow()
    try:
        _exact(texts, kind, "")
    except pa.ArrowInvalid:
        return False
    return True


def _counted(path: str, options: CsvOptions, names: Sequence[str]) -> int:
    """Return the rows of a file that is decoded from its beginning."""
    pa = arrow()
    converting = options.converting(names[:1], {names[0]: pa.string()})
    reading = pa.csv.ReadOptions(block_size=_CSV_BLOCK, encoding=options.encoding)
    with (
        files.opened(path, "infer") as file,
        pa.csv.open_csv(file, reading, **options.parsing(), convert_options=converting) as reader,
    ):
        return sum(batch.num_rows for batch in reader)


def _marks(path: str) -> tuple[tuple[int, ...], int]:
    """Return where every `_CSV_GRAIN`-th row after the header begins, with the file's end, and the rows.

    A record ends at a line break outside of quotes; empty lines are none.
    """
    at = records = quotes = 0
    start = 0  # of the record that goes on
    marks = list[int]()
    last = b"\n"
    with files.opened(path) as file:
        while block := file.read(_CSV_BLOCK):
            data = np.frombuffer(block, np.uint8)
            breaks = np.flatnonzero(data == _BREAK)
            if not len(breaks) and not records and b"\r" in block:
                raise ConfigError(
                    f"source {path!r}: its lines end with a carriage return alone; end them with a newline"
                )
            quoted = np.flatnonzero(data == _QUOTE)
            breaks = breaks[(np.searchsorted(quoted, breaks) + quotes) % 2 == 0]
            # The byte before a break, which may be in the block before.
            before = np.concatenate([np.frombuffer(last[-1:], np.uint8), data])[breaks]
            ends = breaks + at + 1
            begins = np.concatenate([[start], ends[:-1]]) if len(ends) else ends
            length = ends - begins - 1
            full = ~((length == 0) | ((length == 1) & (before == _RETURN)))
            starts = ends[full]
            # The header is record 0, so row k begins after k + 1 records.
            marks += starts[-records % _CSV_GRAIN :: _CSV_GRAIN].tolist()
            records, quotes = records + len(starts), quotes + len(quoted)
            start = int(ends[-1]) if len(ends) else start
            at, last = at + len(block), block
        file.seek(start)
        rest = file.read(at - start)
    if quotes % 2:
        raise ConfigError(f"source {path!r} has a quote that is not closed; write it as parquet")
    records += bool(rest.strip(b"\r\n"))
    rows = max(0, records - 1)
    whole = -(-rows // _CSV_GRAIN)
    return (*marks[:whole], at), rows


# ---- frames -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrameTable:
    """A table in this process, of whatever library."""

    is_cut: ClassVar[bool] = True
    grain: ClassVar[int] = 1
    label: str
    table: Table

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def row_seconds(self) -> float:
        return _VALUE_S * self.table.num_columns

    @property
    def schema(self) -> Schema:
        return self.table.schema

    def select(self, columns: Sequence[str]) -> FrameTable:
        return replace(self, table=self.table.select(list(columns)))

    def fingerprint(self) -> str:
        return f"{self.label}, digest {digest_of(self.table)}"

    def pieces(self, chunks: Chunks) -> Callable[[int], SentRows]:
        return lambda number: SentRows(self.table.slice(chunks.span(number)[0], chunks.length(number)))


def digest_of(rows: Any) -> str:
    """Return a digest of the content of an array or a table: 128 bits, at memory speed."""
    if isinstance(rows, np.ndarray):
        return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return xxhash.xxh3_128_hexdigest(_stream_of(rows.combine_chunks()))


def _stream_of(table: Table) -> Any:
    """Return a table in the form in which it is sent."""
    pa = arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


@dataclass(frozen=True)
class SentRows:
    """Rows of a table in this process, of which these alone are sent."""

    table: Table

    def read(self) -> Table:
        return self.table

    @property
    def nbytes(self) -> int:
        return int(self.table.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        # A slice is pickled with all of the table that it is of, and a stream has its own rows.
        return _received, (_stream_of(self.table),)


def _received(content: Any) -> SentRows:
    pa = arrow()
    return SentRows(pa.ipc.open_stream(content).read_all())


@dataclass(frozen=True)
class DaskTable:
    """A frame of dask.dataframe, which its name identifies, with the rows of its partitions."""

    is_named: ClassVar[bool] = True
    label: str
    partitions: tuple[Any, ...]
    lengths: tuple[int, ...]
    schema: Schema
    row_seconds: float = 0.0

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    @property
    def grain(self) -> int:
        return max(1, *self.lengths)

    def select(self, columns: Sequence[str]) -> DaskTable:
        pa = arrow()
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def fingerprint(self) -> str:
        return self.label

    def pieces(self, chunks: Chunks) -> Callable[[int], Delayed]:
        stops = list(accumulate(self.lengths))

        def piece(number: int) -> Delayed:
            start, stop = chunks.span(number)
            first, last = bisect_right(stops, start), bisect_right(stops, stop - 1)
            skip = start - (stops[first - 1] if first else 0)
            parts = list(self.partitions[first : last + 1])
            found: Delayed = delayed(_rows_of_parts, pure=False)(skip, stop - start, self.schema, *parts)
            return found

        return piece


def _rows_of_parts(skip: int, take: int, schema: Schema, *parts: Any) -> SentRows:
    pa = arrow()
    tables = [as_arrow(part, "a partition").select(schema.names).cast(schema) for part in parts]
    return SentRows(pa.concat_tables(tables).slice(skip, take))


def _facts(part: Any) -> tuple[int, Schema]:
    table = as_arrow(part, "a partition")
    return table.num_rows, table.schema


def is_frame(value: Any) -> bool:
    """Return whether a value is a frame: of pandas, polars, pyarrow, dask.dataframe or another library."""
    if is_dask_collection(value):
        return hasattr(value, "npartitions") and hasattr(value, "columns")
    return isinstance(nw.from_native(value, pass_through=True), (nw.DataFrame, nw.LazyFrame))


def as_arrow(frame: Any, what: str) -> Table:
    """Return a frame as a table of pyarrow, without an index; raises `ConfigError` where it has values of no type."""
    pa = arrow()
    if hasattr(frame, "set_axis"):
        # Labels of pandas may be numbers; an index is no column.
        frame = frame.set_axis([str(name) for name in frame.columns], axis=1).reset_index(drop=True)
    read = nw.from_native(frame)
    read = read.collect() if isinstance(read, nw.LazyFrame) else read
    refuse_duplicates(list(read.columns), what)
    try:
        table = read.to_arrow()
    except (pa.ArrowException, TypeError) as error:
        raise ConfigError(f"{what} has a column of values that are of no one type: {error}") from error
    return table.select([n for n in table.column_names if not n.startswith(_INDEX)]).replace_schema_metadata(
        None
    )


def open_frame(frame: Any, client: Any) -> TableSource:
    """Return a frame as a table; of dask.dataframe, the partitions are computed once for their rows and types."""
    what = f"a {type(frame).__module__.partition('.')[0]} {type(frame).__name__}"
    if not is_dask_collection(frame):
        return FrameTable(what, as_arrow(frame, what))
    import dask

    pa = arrow()
    parts = frame.to_delayed()
    found = dask.compute(*(delayed(_facts)(p) for p in parts), scheduler=client)  # type: ignore[attr-defined]
    lengths, schemas = zip(*found, strict=True)
    try:
        schema = pa.unify_schemas(
            [pa.schema(map(_widened, s)) for s in schemas], promote_options="permissive"
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ConfigError(f"{what}: its partitions have different types: {error}") from error
    return DaskTable(f"{what} {frame._name}", tuple(parts), lengths, schema)
