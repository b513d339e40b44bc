"""CSV files as tables: ranges of bytes between records, which pyarrow parses.

t.csv                    the client reads the file once, and notes where every 1024th record begins
t.csv.gz, or UTF-16      the same of its text, which a worker decodes once and keeps while the parts are computed

A column has the type of its first megabyte, the model's, or the caller's.  One that is kept stays as it is written: it
is a number only where that has the same text.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dask_ferro.errors import InputError
from dask_ferro.lower.inputs.tables import refuse_duplicates
from dask_ferro.lower.preparation.remote import mask
from dask_ferro.stream import files
from dask_ferro.stream.files import Stamp, check_unchanged
from dask_ferro.stream.formats import pa
from dask_ferro.stream.formats.tables import VALUE_S, Table, TableSource, decode_once

# Rows between two places of a file that are remembered, bytes that are looked through at a time, and those of the first
# rows, of which the columns' types follow.
_GRAIN, _BLOCK, _FIRST_BLOCK = 1024, 1 << 24, 1 << 20
_BREAK, _RETURN, _QUOTE = b'\n\r"'
# pandas takes these for missing values.
_MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
# Texts of so many digits are no double: 2 ** 53 has sixteen.
_LONG_NUMBER = r"^[+-]?\d{16,}$"


class CsvOptions(NamedTuple):
    """What a CSV file does not say of itself."""

    separator: str = ","
    encoding: str = "utf-8"
    null_values: tuple[str, ...] = _MISSING
    types: tuple[tuple[str, str], ...] = ()

    def arrow(self, columns: Sequence[str] | None = None, types: Mapping[str, Any] | None = None) -> Any:
        """Return pyarrow's options: the columns that are read, all by default, and types of columns."""
        return {
            "parse_options": pa.csv.ParseOptions(delimiter=self.separator, newlines_in_values=True),
            "convert_options": pa.csv.ConvertOptions(
                null_values=list(self.null_values),
                strings_can_be_null=True,
                column_types=types,
                include_columns=columns,
            ),
        }

    @property
    def is_ascii(self) -> bool:
        """Whether bytes of lines, quotes and separators are those of ASCII."""
        text = f'\n"{self.separator}'
        return text.encode(self.encoding) == text.encode()


@dataclass(frozen=True)
class CsvTable(TableSource):
    """Columns of a CSV file with a header.

    `marks` are where every 1024th row begins, in bytes, and the end.  A part has its own two marks, with `held` rows
    between them, of which its own follow the first `skip`.  `exact` are columns of numbers that are kept, of which the
    texts have to be those of the numbers.
    """

    grain: ClassVar[int] = _GRAIN
    names: tuple[str, ...]
    options: CsvOptions
    opened: Stamp
    marks: tuple[int, ...]
    exact: tuple[str, ...] = ()
    held: int = 0
    skip: int = 0

    @property
    def row_seconds(self) -> float:
        return 2 * VALUE_S * len(self.names)

    def typed(self, features: Mapping[str, np.dtype[Any]], keep: Sequence[str]) -> CsvTable:
        """Return the table with the types that a model and the caller want of its columns."""
        chosen, kept = dict(self.options.types), set(keep)
        texts = {name for name, dtype in features.items() if dtype == np.dtype(object)}
        free = kept - texts - set(chosen)
        is_number = (pa.types.is_integer, pa.types.is_floating)
        numbers = [f.name for f in self.schema if f.name in free and any(test(f.type) for test in is_number)]
        exact = self._kept_by_numbers(numbers)
        lost = set(numbers) - set(exact)
        fields = []
        for name, kind in ((field.name, field.type) for field in self.schema):
            dtype = None if name in chosen or name in kept else features.get(name)
            if dtype is not None and dtype.kind in "biuf" and pa.types.is_string(kind):
                raise _read_error(self.label, f"column {name!r} has texts, and the model takes {dtype}")
            is_whole = pa.types.is_integer(kind) or pa.types.is_null(kind)
            if dtype is not None and dtype.kind == "f" and is_whole:
                # Whole numbers may have fractions further on.
                kind = pa.float64()
            elif pa.types.is_null(kind) or (name in texts and name not in chosen) or name in lost:
                kind = pa.string()
            fields.append(pa.field(name, kind))
        return replace(self, schema=pa.schema(fields), exact=exact)

    def _kept_by_numbers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the columns whose first texts numbers keep, as they do not keep 0000001 and twenty digits."""
        kept = []
        if names:
            first = _first_rows(self.label, self.options, names, dict.fromkeys(names, pa.string()))
        for name in names:
            with suppress(pa.ArrowInvalid):
                _parse_exactly(first.column(name), self.schema.field(name).type, name)
                kept.append(name)
        return tuple(kept)

    def fingerprint(self) -> str:
        return f"{mask(self.label)}, {files.stamp(self.label)}"

    def part(self, start: int, stop: int) -> CsvTable:
        low, high = start // _GRAIN, -(-stop // _GRAIN)
        first, held = low * _GRAIN, min(self.rows, high * _GRAIN) - low * _GRAIN
        marks = (self.marks[low], self.marks[high])
        return replace(self, rows=stop - start, marks=marks, held=held, skip=start - first)

    def read(self) -> Table:
        """Return the rows; raises `OSError` when the file changed since it was opened."""
        first, stop = self.marks
        if _is_plain(self.label, self.options):
            content = files.read(self.label, first, stop, self.opened.size)
        else:
            content = decode_once(_text, self.label, self.options, self.opened)[first:stop]
        check_unchanged(self.label, self.opened)
        table = self._parsed(content)
        if table.num_rows != self.held:
            raise InputError(
                f"source {self.label!r}: {table.num_rows} rows where {self.held} records are, in bytes {self.marks}: a"
                " quote inside of a value splits it otherwise than pandas does; write it as parquet"
            )
        return table.slice(self.skip, self.rows)

    def _parsed(self, content: bytes) -> Table:
        if not self.held:
            return self.schema.empty_table()
        kinds = {f.name: pa.string() if f.name in self.exact else f.type for f in self.schema}
        reading = pa.csv.ReadOptions(
            column_names=self.names,
            encoding=self.options.encoding if self.options.is_ascii else "utf-8",
            # One block, since a record must not be longer than a block.
            block_size=max(1 << 20, len(content) + 1),
        )
        try:
            table = pa.csv.read_csv(
                pa.BufferReader(content), reading, **self.options.arrow(self.schema.names, kinds)
            )
            for name in self.exact:
                number = _parse_exactly(table.column(name), self.schema.field(name).type, name)
                table = table.set_column(table.column_names.index(name), name, number)
        except (pa.ArrowException, UnicodeError) as error:
            raise _read_error(self.label, str(error)) from error
        return table.cast(self.schema)


def _parse_exactly(texts: Any, kind: Any, name: str) -> Any:
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


def _read_error(path: str, said: str) -> InputError:
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
    return InputError(f"source {path!r}: {said}; {remedy}")


# ---- opening ------------------------------------------------------------------------------------------------


def open_csv(path: str, options: CsvOptions) -> CsvTable:
    """Return a CSV file with a header as a table; all of it is read once, to find its rows."""
    opened = files.stamp(path)
    schema = _first_rows(path, options).schema
    refuse_duplicates(schema.names, f"source {path!r}")
    try:
        marks, rows = _marks(path, options)
    except UnicodeError as error:
        raise _read_error(path, str(error)) from error
    # The types and the marks are of one file.
    check_unchanged(path, opened)
    if len(schema) == 1 and (other := [c for c in ";\t|" if c in schema.names[0] and c != options.separator]):
        raise InputError(f"source {path!r} has one column, {schema.names[0]!r}: pass separator={other[0]!r}")
    chosen = {name: _type_of(kind) for name, kind in options.types}
    if unknown := sorted(set(chosen) - set(schema.names)):
        raise InputError(
            f"types={unknown} are not columns of {path!r}; it has {', '.join(schema.names[:20])}"
        )
    fields = [pa.field(field.name, chosen.get(field.name, field.type)) for field in schema]
    if damaged := [f.name for f in fields if pa.types.is_binary(f.type) and f.name not in chosen]:
        raise _read_error(path, f"column {damaged[0]!r} has bytes that are not UTF8")
    return CsvTable(path, pa.schema(fields), rows, tuple(schema.names), options, opened, marks)


def _first_rows(path: str, options: CsvOptions, columns: Any = None, types: Any = None) -> Table:
    """Return the first megabyte of a file, with pyarrow's types where there are no others."""
    reading = pa.csv.ReadOptions(block_size=_FIRST_BLOCK, encoding=options.encoding)
    how = options.arrow(columns, types)
    try:
        with files.open_file(path, "infer") as file, pa.csv.open_csv(file, reading, **how) as reader:
            # A file without rows has no first batch.
            return pa.Table.from_batches(islice(reader, 1), reader.schema)
    except (pa.ArrowException, UnicodeError, LookupError) as error:
        if "UTF8" in str(error) or isinstance(error, UnicodeError):
            raise _read_error(path, str(error)) from error
        raise InputError(f"source {path!r} is no CSV with a header: {error}") from error


def _is_plain(path: str, options: CsvOptions) -> bool:
    """Whether ranges of the file's bytes are ranges of its text."""
    return options.is_ascii and files.suffix_of(path) in (".csv", ".tsv")


def _blocks(path: str, options: CsvOptions) -> Iterator[bytes]:
    """Yield the text of a file, in its own encoding if that is like ASCII, else as UTF-8."""
    with files.open_file(path, "infer") as file:
        if options.is_ascii:
            yield from iter(partial(file.read, _BLOCK), b"")
            return
        with io.TextIOWrapper(file, options.encoding, newline="") as text:
            yield from (block.encode() for block in iter(partial(text.read, _BLOCK), ""))


def _text(path: str, options: CsvOptions, opened: Stamp) -> bytes:
    return b"".join(_blocks(path, options))


def _type_of(name: str) -> Any:
    try:
        return pa.string() if name in ("str", "object", "category") else pa.type_for_alias(str(name))
    except ValueError:
        raise InputError(
            f"types: {name!r} is not a type; wanted one of pyarrow's, such as 'string' or 'float64'"
        ) from None


def _marks(path: str, options: CsvOptions) -> tuple[tuple[int, ...], int]:
    """Return where every `_GRAIN`-th row after the header begins, with the text's end, and the rows.

    A record ends at a line break outside of quotes; empty lines are none.
    """
    at = start = records = quotes = 0
    marks = list[int]()
    rest = b""  # of the record that goes on
    for block in _blocks(path, options):
        data = np.frombuffer(block, np.uint8)
        breaks = np.flatnonzero(data == _BREAK)
        if not len(breaks) and not records and b"\r" in block:
            raise InputError(
                f"source {path!r}: its lines end with a carriage return only; end them with a newline"
            )
        quoted = np.flatnonzero(data == _QUOTE)
        breaks = breaks[(np.searchsorted(quoted, breaks) + quotes) % 2 == 0]
        # The byte before a break, which may be in the block before.
        before = np.concatenate([np.frombuffer(rest[-1:] or b"\n", np.uint8), data])[breaks]
        ends = breaks + at + 1
        length = np.diff(ends, prepend=start) - 1
        full = ~((length == 0) | ((length == 1) & (before == _RETURN)))
        starts = ends[full]
        # The header is record 0, so row k begins after k + 1 records.
        marks += starts[-records % _GRAIN :: _GRAIN].tolist()
        records, quotes = records + len(starts), quotes + len(quoted)
        rest = block[breaks[-1] + 1 :] if len(breaks) else rest + block
        at += len(block)
        start = at - len(rest)
    if quotes % 2:
        raise InputError(f"source {path!r} has a quote that is not closed; write it as parquet")
    records += bool(rest.strip(b"\r\n"))
    rows = max(0, records - 1)
    return (*marks[: -(-rows // _GRAIN)], at), rows
