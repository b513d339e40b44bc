"""Tables as sources: parquet files, CSV files and frames, whose pieces are tables of pyarrow.

t.parquet, a folder, a pattern     row groups, decoded as a whole and kept by a worker while their parts are computed
key=value folders                  the keys are columns
t.csv                              byte ranges between lines, which the client finds by reading the file once
t.csv.gz, or UTF-16                decoded as a whole, and kept as a row group is
frames                             of pandas, polars (a lazy one is collected), pyarrow and dask.dataframe
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, islice
from threading import Lock
from typing import Any, ClassVar, NamedTuple, Self
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
from dask_ferro.stream.files import Stamp, check_unchanged
from dask_ferro.stream.formats import Array, Source, numeric, pa

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


@lru_cache(maxsize=2)
def _latest(decode: Callable[..., Table], *of_what: Any) -> Table:
    return decode(*of_what)


_decoding = Lock()


def _decoded_once(decode: Callable[..., Table], *of_what: Any) -> Table:
    """Return what a function decodes, which this process keeps until it has decoded two others."""
    # Threads that need the same rows wait for the one that decodes them, with all of pyarrow's threads.
    with _decoding:
        return _latest(decode, *of_what)


def forget() -> None:
    """Release what this process decoded; called at the end of a run."""
    _latest.cache_clear()


@dataclass(frozen=True)
class TableSource(Source):
    """Columns of a table, of which `schema` has names and types."""

    label: str
    schema: Schema
    rows: int

    @property
    def row_seconds(self) -> float:
        return _VALUE_S * len(self.schema)

    def select(self, columns: Sequence[str]) -> Self:
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))


def _within(stops: Sequence[int], start: int, stop: int) -> tuple[slice, int]:
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

    is_cut: ClassVar[bool] = True
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
        return f"{shown(self.label)}, {files.summary(files.stamps(paths))}"

    def part(self, start: int, stop: int) -> ParquetTable:
        span, skip = _within(self._stops, start, stop)
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
                _decoded(groups, self.schema) if is_whole else _decoded_once(_decoded, groups, self.schema)
            )
            check_unchanged(path, groups[0].opened)
        return pa.concat_tables(tables).slice(self.skip, self.rows).unify_dictionaries()


def _decoded(groups: tuple[RowGroup, ...], schema: Schema) -> Table:
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
            raise ConfigError(f"source {first.path!r} cannot be read: {error}") from error


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
    paths = files.files_of(path, PARQUET)
    if not paths:
        raise ConfigError(
            f"source {path!r}: no file matches"
            if files.is_pattern(path)
            else f"source {path!r} is a folder without parquet files"
        )
    opened = files.stamps(paths)
    try:
        # Threads, since a footer at an address takes a round trip or two.
        with ThreadPoolExecutor(files.READERS, thread_name_prefix="ferro-stream-open") as threads:
            metas = list(threads.map(_footer, paths))
    except pa.ArrowException as error:
        raise ConfigError(f"source {path!r} is not parquet: {error}") from error
    top = (files.folder_of(path) if files.is_pattern(path) else path).rstrip("/")
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
        _unified(path, paths, schemas, list(map(_keys, folders))),
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


def _unified(
    path: str, paths: Sequence[str], schemas: Sequence[Schema], keys: Sequence[Mapping[str, str | None]]
) -> Schema:
    """Return a schema that holds the values of all files, and of their folders."""
    names = [name for name in schemas[0].names if not name.startswith(_INDEX)]
    plain = []
    for file, schema in zip(paths, schemas, strict=True):
        fields = {field.name: field for field in schema}
        if missing := [name for name in names if name not in fields]:
            raise ConfigError(f"source {file!r} has no column {missing}, which {paths[0]!r} has")
        plain.append(pa.schema([fields[name] for name in names]))
    unified = _one_schema(plain, f"source {path!r}: its files")
    there = set(names)
    for key in dict.fromkeys(name for one in keys for name in one):
        if key in there:
            raise ConfigError(f"source {path!r} has {key!r} as a column and as a folder's key: remove one")
        values = [one.get(key) for one in keys]
        unified = unified.append(pa.field(key, _key_type(values)))
    return unified


def _one_schema(schemas: Sequence[Schema], what: str) -> Schema:
    """Return a schema that holds the values of all tables."""
    plain = dict.fromkeys(pa.schema(map(_widened, schema)) for schema in schemas)
    try:
        return pa.unify_schemas(list(plain), promote_options="permissive").remove_metadata()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ConfigError(
            f"{what} have different types: {error}; write them with one type a column"
        ) from error


def _widened(field: Any) -> Any:
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


# ---- columns as an array ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnsSource(Source):
    """Columns of a parquet table as one array: a column of numbers or lists, or columns of numbers side by side."""

    is_cut: ClassVar[bool] = True
    table: ParquetTable
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    # The number of its first row, for errors.
    start: int = 0

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

    def part(self, start: int, stop: int) -> ColumnsSource:
        return replace(self, table=self.table.part(start, stop), start=start)

    def read(self) -> Array:
        table = self.table.read()
        sizes = self.row_shape if table.num_columns == 1 else ()
        values = [
            _flat(c, sizes, f"column {n!r} in rows from {self.start} of {self.table.label!r}")
            for n, c in zip(table.column_names, table.columns, strict=True)
        ]
        joined = values[0] if len(values) == 1 else np.stack(values, axis=1)
        return np.ascontiguousarray(joined.reshape(table.num_rows, *self.row_shape), dtype=self.dtype)


def _flat(column: Any, sizes: tuple[int, ...], what: str) -> Array:
    """Return a column's numbers as a flat array; `sizes` are the lengths of its lists, outermost first."""
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
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _leaf(kind: Any) -> Any:
    while is_list(kind):
        kind = kind.value_type
    return kind


def holds_numbers(kind: Any) -> bool:
    """Return whether a type of pyarrow is one of numbers, or of lists of them."""
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
    return np.shape(table.part(0, 1).read().column(0)[0].as_py())


# ---- CSV ----------------------------------------------------------------------------------------------------


class CsvOptions(NamedTuple):
    """What a CSV file does not say of itself."""

    separator: str = ","
    encoding: str = "utf-8"
    null_values: tuple[str, ...] = _MISSING
    types: tuple[tuple[str, str], ...] = ()

    def parsing(self) -> dict[str, Any]:
        return {"parse_options": pa.csv.ParseOptions(delimiter=self.separator, newlines_in_values=True)}

    def converting(self, columns: Sequence[str] | None = None, types: Mapping[str, Any] | None = None) -> Any:
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
class CsvTable(TableSource):
    """Columns of a CSV file with a header.

    `marks` are where every 1024th row begins, in bytes, and the end; of a file that is decoded as a whole there are
    none.  A part has its own two marks, with `held` rows between them, of which its own follow the first `skip`.
    `exact` are columns of numbers that are kept, of which the texts have to be those of the numbers.
    """

    is_cut: ClassVar[bool] = True
    names: tuple[str, ...]
    options: CsvOptions
    opened: Stamp
    marks: tuple[int, ...] = ()
    exact: tuple[str, ...] = ()
    held: int = 0
    skip: int = 0

    @property
    def grain(self) -> int:
        return _CSV_GRAIN if self.marks else max(1, self.rows)

    @property
    def row_seconds(self) -> float:
        return 2 * _VALUE_S * len(self.names)

    def typed(self, features: Mapping[str, np.dtype[Any]], keep: Sequence[str]) -> CsvTable:
        """Return the table with the types that a model and the caller want of its columns."""
        chosen, kept = dict(self.options.types), set(keep)
        texts = {name for name, dtype in features.items() if dtype == np.dtype(object)}
        free = kept - texts - set(chosen)
        numbers = [field.name for field in self.schema if field.name in free and _is_number(field.type)]
        exact = self._kept_by_numbers(numbers)
        lost = set(numbers) - set(exact)
        fields = []
        for name, kind in ((field.name, field.type) for field in self.schema):
            dtype = None if name in chosen or name in kept else features.get(name)
            if dtype is not None and dtype.kind in "biuf" and pa.types.is_string(kind):
                raise _misread(self.label, f"column {name!r} has texts, and the model takes {dtype}")
            if (
                dtype is not None
                and dtype.kind == "f"
                and (pa.types.is_integer(kind) or pa.types.is_null(kind))
            ):
                # Whole numbers may have fractions further on.
                kind = pa.float64()
            elif pa.types.is_null(kind) or (name in texts and name not in chosen) or name in lost:
                kind = pa.string()
            fields.append(pa.field(name, kind))
        return replace(self, schema=pa.schema(fields), exact=exact)

    def _kept_by_numbers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the columns whose first texts numbers keep, as they do not keep 0000001 and twenty digits."""
        if not names:
            return ()
        kept = []
        try:
            texts = dict.fromkeys(names, pa.string())
            with _reader(self.label, self.options, _CSV_FIRST, types=texts) as reader:
                # A file without rows has no first batch.
                for batch in islice(reader, 1):
                    for name in names:
                        with suppress(pa.ArrowInvalid):
                            _exact(batch.column(name), self.schema.field(name).type, name)
                            kept.append(name)
        except pa.ArrowInvalid as error:
            raise _misread(self.label, str(error)) from error
        return tuple(kept)

    def fingerprint(self) -> str:
        return f"{shown(self.label)}, {files.stamp(self.label)}"

    def part(self, start: int, stop: int) -> CsvTable:
        if not self.marks:
            return replace(self, rows=stop - start, held=self.rows, skip=start)
        low, high = start // _CSV_GRAIN, -(-stop // _CSV_GRAIN)
        first, held = low * _CSV_GRAIN, min(self.rows, high * _CSV_GRAIN) - low * _CSV_GRAIN
        marks = (self.marks[low], self.marks[high])
        return replace(self, rows=stop - start, marks=marks, held=held, skip=start - first)

    def read(self) -> Table:
        """Return the rows; raises `OSError` when the file changed since it was opened."""
        if self.marks:
            first, stop = self.marks
            table = self.parsed(files.read(self.label, first, stop, self.opened.size))
        else:
            # The same for all parts.
            table = _decoded_once(_whole_csv, replace(self, rows=self.held, skip=0))
        check_unchanged(self.label, self.opened)
        if table.num_rows != self.held:
            raise ConfigError(
                f"source {self.label!r}: {table.num_rows} rows where {self.held} records are, in bytes {self.marks}: a"
                " quote inside of a value splits it otherwise than pandas does; write it as parquet"
            )
        return table.slice(self.skip, self.rows)

    def parsed(self, content: bytes) -> Table:
        """Return the rows of some bytes: lines, or a whole file with its header."""
        if not self.held:
            return self.schema.empty_table()
        kinds = {f.name: pa.string() if f.name in self.exact else f.type for f in self.schema}
        reading = pa.csv.ReadOptions(
            column_names=self.names,
            skip_rows=0 if self.marks else 1,
            encoding=self.options.encoding,
            # One block, since a record must not be longer than a block.
            block_size=max(1 << 20, len(content) + 1),
        )
        try:
            table = pa.csv.read_csv(
                pa.BufferReader(content),
                reading,
                **self.options.parsing(),
                convert_options=self.options.converting(self.schema.names, kinds),
            )
            for name in self.exact:
                number = _exact(table.column(name), self.schema.field(name).type, name)
                table = table.set_column(table.column_names.index(name), name, number)
        except (pa.ArrowException, UnicodeError) as error:
            raise _misread(self.label, str(error)) from error
        return table.cast(self.schema)


def _whole_csv(table: CsvTable) -> Table:
    with files.opened(table.label, "infer") as file:
        return table.parsed(file.read())


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _exact(texts: Any, kind: Any, name: str) -> Any:
    """Return the numbers of some texts; raises pyarrow's error where a number does not keep its text."""
    compute = pa.compute
    numbers = texts.cast(kind)
    if pa.types.is_integer(kind):
        wrong = compute.not_equal(numbers.cast(pa.string()), texts)
    else:
        wrong = compute.match_substring_regex(texts, _LONG_NUMBER)
    if len(lost := texts.filter(compute.fill_null(wrong, False))):
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


@contextmanager
def _reader(
    path: str, options: CsvOptions, block: int, columns: Any = None, types: Any = None
) -> Iterator[Any]:
    """Have the batches of a CSV file, decoded from its beginning."""
    reading = pa.csv.ReadOptions(block_size=block, encoding=options.encoding)
    with files.opened(path, "infer") as file:
        converting = options.converting(columns, types)
        with pa.csv.open_csv(file, reading, **options.parsing(), convert_options=converting) as reader:
            yield reader


def open_csv(path: str, options: CsvOptions) -> CsvTable:
    """Return a CSV file with a header as a table; all of it is read once, to find its rows."""
    try:
        opened = files.stamp(path)
        with _reader(path, options, _CSV_FIRST) as reader:
            schema = reader.schema
        refuse_duplicates(schema.names, f"source {path!r}")
        if options.is_cut and files.suffix_of(path) in (".csv", ".tsv"):
            marks, rows = _marks(path)
        else:
            name = schema.names[0]
            with _reader(path, options, _CSV_BLOCK, [name], {name: pa.string()}) as reader:
                marks, rows = (), sum(batch.num_rows for batch in reader)
    except (pa.ArrowException, UnicodeError, LookupError) as error:
        if "UTF8" in str(error) or isinstance(error, UnicodeError):
            raise _misread(path, str(error)) from error
        raise ConfigError(f"source {path!r} is no CSV with a header: {error}") from error
    # The types and the marks are of one file.
    check_unchanged(path, opened)
    if len(schema) == 1 and (other := [c for c in ";\t|" if c in schema.names[0] and c != options.separator]):
        raise ConfigError(f"source {path!r} has one column, {schema.names[0]!r}: pass separator={other[0]!r}")
    chosen = {name: _type_of(kind) for name, kind in options.types}
    if unknown := sorted(set(chosen) - set(schema.names)):
        raise ConfigError(
            f"types={unknown} are no columns of {path!r}; it has {', '.join(schema.names[:20])}"
        )
    fields = [pa.field(field.name, chosen.get(field.name, field.type)) for field in schema]
    if damaged := [
        field.name for field in fields if pa.types.is_binary(field.type) and field.name not in chosen
    ]:
        raise _misread(path, f"column {damaged[0]!r} has bytes that are no UTF8")
    return CsvTable(path, pa.schema(fields), rows, tuple(schema.names), options, opened, marks)


def _type_of(name: str) -> Any:
    try:
        return pa.string() if name in ("str", "object", "category") else pa.type_for_alias(str(name))
    except ValueError:
        raise ConfigError(
            f"types: {name!r} is no type; wanted one of pyarrow's, such as 'string' or 'float64'"
        ) from None


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
class FrameTable(TableSource):
    """A table in this process, of whatever library."""

    is_cut: ClassVar[bool] = True
    grain: ClassVar[int] = 1
    table: Table

    def fingerprint(self) -> str:
        return f"{self.label}, digest {digest_of(self.part(0, self.rows))}"

    def part(self, start: int, stop: int) -> Table:
        return self.table.select(self.schema.names).slice(start, stop - start)


@dataclass(frozen=True)
class DaskTable(TableSource):
    """A frame of dask.dataframe, which its name identifies, with the rows of its partitions."""

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
        span, skip = _within(self._stops, start, stop)
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
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows.combine_chunks())
    return xxhash.xxh3_128_hexdigest(sink.getvalue())


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
        table = as_arrow(frame, what)
        return FrameTable(what, table.schema, table.num_rows, table)
    import dask

    parts = frame.to_delayed()
    found = dask.compute(*(delayed(_facts)(p) for p in parts), scheduler=client)  # type: ignore[attr-defined]
    lengths, schemas = zip(*found, strict=True)
    schema = _one_schema(schemas, f"{what}: its partitions")
    return DaskTable(f"{what} {frame._name}", schema, sum(lengths), tuple(parts), lengths)
