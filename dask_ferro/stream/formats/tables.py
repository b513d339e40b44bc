"""Tables with columns of any type: parquet and CSV files as sources, folders of them as sinks.

A piece of a table is a pyarrow Table.  A CSV file is cut at line breaks, which the client finds by reading the file
once, so a value must not contain one; the types of its columns are those of its first rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.lower.inputs.tables import refuse_duplicates
from dask_ferro.lower.prepared.remote import shown
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.interfaces import Layout, missing_extra
from dask_ferro.stream.formats.parquet import (
    ParquetPiece,
    ParquetSink,
    ParquetSource,
    open_table,
    pyarrow_modules,
)
from dask_ferro.stream.stores import addresses, files
from dask_ferro.stream.stores.stamps import Stamp, check_unchanged, stamp_of, stamps_of

# Rows between two places of a CSV file that are remembered.
_CSV_GRAIN = 1024
_CSV_BLOCK = 1 << 24
_LINE_BREAK = 10

# pyarrow has no types.
Table = Any
Schema = Any
Buffer = Any


def _csv() -> ModuleType:
    try:
        # Imported on use: it is an extra.
        import pyarrow.csv
    except ImportError as error:
        raise missing_extra("pyarrow", error) from error
    return pyarrow.csv


@dataclass(frozen=True)
class ParquetTable(ParquetSource):
    """Columns of parquet files, as a table, whose types are the same in all files once they are `unified`."""

    schemas: tuple[Schema, ...] = ()
    types: Schema = None

    def unified(self) -> ParquetTable:
        """Return the table with types that hold the values of all files.

        Raises
        ------
        ConfigError
            A file lacks a column, or has it of a type that does not go with that of another file.
        """
        pa, _ = pyarrow_modules()
        used = []
        for file, schema in zip(self.files, self.schemas, strict=True):
            if missing := [name for name in self.columns if name not in schema.names]:
                raise ConfigError(f"source {file!r} has no column {missing}, which {self.files[0]!r} has")
            used.append(pa.schema([schema.field(name) for name in self.columns]))
        try:
            types = pa.unify_schemas(used, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ConfigError(
                f"source {self.path!r}: its files have different types: {error}; write them with one type a column"
            ) from error
        # Files may have metadata of pandas, which tells of columns that are not read.
        return replace(self, types=types.remove_metadata())

    def _piece(self, start: int, stop: int) -> ParquetPiece:
        found = super()._piece(start, stop)
        return ParquetTablePiece(found.parts, found.columns, (), found.dtype, self.types)

    def empty(self) -> Table:
        """Return the table of no rows."""
        return self.unified().types.empty_table()


@dataclass(frozen=True)
class ParquetTablePiece(ParquetPiece):
    """Row ranges of parquet files, as a table of some types."""

    types: Schema

    def read(self) -> Table:
        """Return the rows; raises `OSError` when a file changed since it was opened."""
        pa, _ = pyarrow_modules()
        read = [self.table(part.file, part.first, part.last) for part in self.parts]
        for part in self.parts:
            check_unchanged(part.file, part.opened)
        # Files of one table may differ in types that hold the same numbers, such as int32 and int64.
        return pa.concat_tables([table.select(self.types.names).cast(self.types) for table in read])


@dataclass(frozen=True)
class CsvTable:
    """Columns of a CSV file with a header.

    Attributes
    ----------
    marks : tuple of int
        Where every `grain`-th row begins, in bytes, and the file's size.
    types : pyarrow.Schema
        Of all columns, by the file's first rows.
    """

    path: str
    rows: int
    grain: int
    marks: tuple[int, ...]
    columns: tuple[str, ...]
    types: Schema
    opened: Stamp

    def fingerprint(self) -> str:
        """Return path, columns, size and latest change of the file."""
        return f"{shown(self.path)} ({', '.join(self.columns)}), {stamps_of((self.path,), self.path)}"

    def unified(self) -> CsvTable:
        """Return the table itself: it is one file."""
        return self

    def typed(self, dtypes: Mapping[str, np.dtype]) -> CsvTable:
        """Return the table with floats and strings where a model takes them, whatever the first rows are."""
        pa, _ = pyarrow_modules()
        kinds = {"f": pa.float64(), "O": pa.string()}
        fields = [
            field.with_type(kinds[dtypes[field.name].kind])
            if field.name in dtypes and dtypes[field.name].kind in kinds
            else field
            for field in self.types
        ]
        return replace(self, types=pa.schema(fields))

    def empty(self) -> Table:
        """Return the table of no rows."""
        return self.types.empty_table().select(list(self.columns))

    def pieces(self, chunks: Chunks) -> Callable[[int], CsvPiece]:
        """Return the row ranges by chunk number."""
        return lambda number: self._piece(*chunks.span(number))

    def _piece(self, start: int, stop: int) -> CsvPiece:
        # From the last remembered place before the rows to the first one after them.
        low, high = start // self.grain, -(-stop // self.grain)
        first, last = self.marks[low], self.marks[min(high, len(self.marks) - 1)]
        held = min(self.rows, high * self.grain) - low * self.grain
        span = (start - low * self.grain, stop - start)
        return CsvPiece(self.path, (first, last), held, span, self.columns, self.types, self.opened)


@dataclass(frozen=True)
class CsvPiece:
    """A range of bytes of a CSV file with `held` rows, and the first and the number of the rows that are wanted."""

    path: str
    extent: tuple[int, int]
    held: int
    span: tuple[int, int]
    columns: tuple[str, ...]
    types: Schema
    opened: Stamp

    def read(self) -> Table:
        """Return the rows; raises `OSError` when the file changed since it was opened."""
        content = files.read(self.path, *self.extent)
        check_unchanged(self.path, self.opened)
        table = _parsed(content, self.types, self.columns, self.path)
        if table.num_rows != self.held:
            raise ConfigError(
                f"source {self.path!r}: {table.num_rows} rows where {self.held} lines are, in bytes {self.extent[0]} to"
                f" {self.extent[1]}: empty lines, and line breaks inside of values, are not read; write it as parquet"
            )
        return table.slice(*self.span)


def _parsed(content: bytes, types: Schema, columns: Sequence[str], path: str) -> Table:
    pa, _ = pyarrow_modules()
    csv = _csv()
    if not content:
        return types.empty_table().select(list(columns))
    try:
        return csv.read_csv(
            pa.BufferReader(content),
            read_options=csv.ReadOptions(column_names=types.names),
            convert_options=csv.ConvertOptions(
                column_types={field.name: field.type for field in types}, include_columns=list(columns)
            ),
        )
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"source {path!r}: {error}; its columns have the types of its first rows: write it as parquet, which holds"
            " types"
        ) from error


def open_parquet_table(path: str) -> ParquetTable:
    """Return a parquet file, or a folder of them, as a table.

    Raises
    ------
    ConfigError
        It is no parquet.
    """
    found = open_table(path)
    refuse_duplicates(found.schemas[0].names, f"source {path!r}")
    plain = (path, found.files, found.lengths, found.columns, (), np.dtype(object), found.grain, found.opened)
    return ParquetTable(*plain, tuple(found.schemas))


def open_csv_table(path: str) -> CsvTable:
    """Return a CSV file with a header as a table; all of it is read once, to find its rows.

    Raises
    ------
    ConfigError
        It has no header, or cannot be parsed.
    """
    pa, _ = pyarrow_modules()
    csv, opened = _csv(), stamp_of(path)
    try:
        # Reads the first megabyte, of which the types of the columns are told.
        with files.readable(path) as content, csv.open_csv(content) as reader:
            types = reader.schema
    except pa.ArrowInvalid as error:
        raise ConfigError(f"source {path!r} is no CSV with a header: {error}") from error
    refuse_duplicates(types.names, f"source {path!r}")
    marks, rows = _marks(path)
    # The types and the marks are of one file.
    check_unchanged(path, opened)
    return CsvTable(path, rows, _CSV_GRAIN, marks, tuple(types.names), types, opened)


def _marks(path: str) -> tuple[tuple[int, ...], int]:
    """Return where every `_CSV_GRAIN`-th row after the header begins, with the end of the last row, and the rows."""
    end, lines, at = _end(path), 0, 0
    marks = list[int]()
    with files.opened(path) as file:
        while block := file.read(min(_CSV_BLOCK, end - at)):
            if not lines and b"\r" in block and b"\n" not in block:
                raise ConfigError(
                    f"source {path!r}: its lines end with a carriage return alone; end them with a newline"
                )
            breaks = np.flatnonzero(np.frombuffer(block, np.uint8) == _LINE_BREAK) + at + 1
            # The header is line 0, so row k begins after k + 1 line breaks.
            wanted = np.arange(-lines % _CSV_GRAIN, len(breaks), _CSV_GRAIN)
            marks += breaks[wanted].tolist()
            lines += len(breaks)
            at += len(block)
    # The last line has no line break before the end.
    return (*(marks or [end]), end), lines


def _end(path: str) -> int:
    """Return where the last line that is not empty ends."""
    with files.opened(path) as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _CSV_GRAIN)
            file.seek(start)
            content = file.read(end - start).rstrip(b"\r\n")
            end = start + len(content)
            if content:
                break
    return end


@dataclass(frozen=True)
class TableSink(ParquetSink):
    """A folder with a parquet file of each chunk's table."""

    def _content(self, rows: Table) -> Buffer:
        pa, parquet = pyarrow_modules()
        content = pa.BufferOutputStream()
        parquet.write_table(rows, content)
        return content.getvalue()

    def _no_rows(self) -> Table:
        pa, _ = pyarrow_modules()
        kinds = self.layout.dtype
        columns = {name: np.empty(0, kinds[name]) for name in kinds.names or ()}
        texts = {name: pa.array([], pa.string()) for name in columns if columns[name].dtype.kind == "O"}
        return pa.table({name: texts.get(name, pa.array(values)) for name, values in columns.items()})


@dataclass(frozen=True)
class CsvSink(TableSink):
    """A folder with a CSV file of each chunk's table, each with a header."""

    suffix: ClassVar[str] = ".csv"

    def _content(self, rows: Table) -> Buffer:
        pa, _ = pyarrow_modules()
        content = pa.BufferOutputStream()
        try:
            _csv().write_csv(rows, content)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"sink {self.path!r}: {error}; write it as parquet") from error
        return content.getvalue()


def table_layout(chunks: Chunks, columns: np.dtype) -> Layout:
    """Return the layout of a table; `columns` are those of results that are known, for a table without rows."""
    return Layout("table", chunks, columns, ())


def is_csv(path: str) -> bool:
    """Return whether a path is that of a CSV file, by its name."""
    return os.path.splitext(addresses.bare(path).rstrip("/"))[1].lower() == ".csv"
