"""What a run reads and writes: arrays, or a table, whose columns go to inputs as `lower.inputs.tables` maps them.

parquet or CSV --columns--> inputs --model--> outputs --columns--> parquet or CSV, after the columns to keep
images --preprocess--> input       --model--> outputs --columns--> the same, after their paths
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import narwhals as nw
import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.lower.inputs.tables import (
    check_columns,
    classes_of,
    columns_for,
    empty_results,
    read_table,
    result_columns,
    takes_matrix,
    vectors_of,
)
from dask_ferro.lower.signature import Signature, ValueSpec
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.images import (
    PATH,
    SUFFIXES,
    ImageTable,
    Preprocess,
    is_image_path,
    open_images,
)
from dask_ferro.stream.formats.interfaces import Layout, RowSource
from dask_ferro.stream.formats.parquet import open_table, pyarrow_modules
from dask_ferro.stream.formats.tables import (
    CsvTable,
    ParquetTable,
    is_csv,
    open_csv_table,
    open_parquet_table,
    table_layout,
)
from dask_ferro.stream.places import (
    SinkPath,
    is_table_path,
    named_places,
    named_sources,
    open_source,
    paths_of,
    readable,
    table_place,
)
from dask_ferro.stream.pools import RowFeed
from dask_ferro.stream.prepare import Work
from dask_ferro.stream.stores import addresses, files
from dask_ferro.stream.task import ChunkCall, TableCall

NAME = "table"
TableSource = ParquetTable | CsvTable | ImageTable


@dataclass(frozen=True)
class InputSource:
    """One input's rows of a table, of the shape and dtype that the model declares; a piece has all columns."""

    table: ParquetTable | CsvTable
    row_shape: tuple[int, ...]
    dtype: np.dtype
    keep: tuple[str, ...]
    tells_content: ClassVar[bool] = True
    checks_reads: ClassVar[bool] = True

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.table.rows

    @property
    def grain(self) -> int:
        """Rows that the table's files are read by."""
        return self.table.grain

    def fingerprint(self) -> str:
        """Return a text that changes with the files, and with the columns that are written."""
        return f"{self.table.fingerprint()}, keep {list(self.keep)}"

    def pieces(self, chunks: Chunks) -> Callable[[int], Any]:
        """Return the row ranges of the table by chunk number."""
        return self.table.pieces(chunks)


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table that go to a model's inputs, and those that are written before the results."""

    table: TableSource
    mapped: Mapping[str, Sequence[str] | str]
    keep: tuple[str, ...]

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns for the model, in the order of its inputs."""
        found = ([c] if isinstance(c, str) else c for c in self.mapped.values())
        return tuple(chain.from_iterable(found))

    def sources(self, sig: Signature) -> Mapping[str, RowSource]:
        """Return the source of each input."""
        if isinstance(self.table, ImageTable):
            return dict.fromkeys(self.mapped, self.table.images)
        return {spec.name: self._source(spec) for spec in sig.inputs}

    def _source(self, spec: ValueSpec) -> InputSource:
        assert not isinstance(self.table, ImageTable)
        columns = self.mapped[spec.name]
        wide = 1 if isinstance(columns, str) else len(columns)
        rest = () if spec.shape is None and wide == 1 else (spec.shape or (None, None))[1:]
        sizes = tuple(d if isinstance(d, int) else wide for d in rest)
        # Only the size of a row counts, where the model declares no dtype.
        dtype = np.dtype(np.float32) if spec.dtype is None else spec.dtype
        return InputSource(self.table, sizes, dtype, self.keep)


class Ends(NamedTuple):
    """Where the rows of a run come from and go to; `columns` are those of a table, else None."""

    sources: Mapping[str, RowSource]
    sinks: Mapping[str, SinkPath]
    paths: list[str]
    columns: TableColumns | None


def ends_of(
    sig: Signature,
    source: tuple[object, str | None],
    sink: tuple[object, str | None],
    keep: Sequence[str] | None,
    preprocess: str | Preprocess | None,
    title: str,
) -> Ends:
    """Return the sources and sinks of a run.

    Parameters
    ----------
    sig : Signature
    source : (object, str or None)
        As the caller gives it, and the name of the input that it is for.
    sink : (object, str or None)
        The same, and the name of the only output to write.
    keep : sequence of str or None
        Columns to keep; None: a table only where nothing else fits.
    preprocess : "imagenet", callable or None
        For images.
    title : str
        For errors.

    Raises
    ------
    ConfigError
        They are ambiguous, of an unknown format, or do not fit the model.
    """
    path, input_name = source
    if is_image_path(path):
        return _image_ends(sig, (path, input_name), sink, keep, preprocess, title)
    if preprocess is not None:
        raise ConfigError(
            f"{title}: preprocess= is for images, and the source is none: wanted a folder or a pattern of"
            f" {', '.join(SUFFIXES)}"
        )
    is_whole = input_name is None and sink[1] is None
    if is_whole and is_table_run(path, sink[0], keep, sig):
        columns = open_columns(path, keep, sig, title)
        return Ends(columns.sources(sig), table_sinks(sink[0], title), paths_of([path]), columns)
    if keep is not None:
        raise ConfigError(
            f"{title}: keep= writes one table with all outputs; leave out input= and output=, or keep="
        )
    given = named_sources([s.name for s in sig.inputs], *source)
    sinks = named_places([s.name for s in sig.outputs], *sink)
    sources = {spec.name: open_source(given[spec.name], spec) for spec in sig.inputs}
    return Ends(sources, sinks, paths_of(given.values()), None)


def _image_ends(
    sig: Signature,
    source: tuple[str | os.PathLike[str], str | None],
    sink: tuple[object, str | None],
    keep: Sequence[str] | None,
    preprocess: str | Preprocess | None,
    title: str,
) -> Ends:
    """Return the sources and sinks of a run over images: a table with their paths, or an array an output."""
    name = next(iter(named_sources([s.name for s in sig.inputs], *source)))
    if len(sig.inputs) > 1:
        raise ConfigError(
            f"{title}: images go to one input, and it has {', '.join(s.name for s in sig.inputs)}"
        )
    images = open_images(os.fspath(source[0]), preprocess, sig.inputs[0])
    paths = sorted({addresses.address_of(os.path.dirname(file)) for file in images.files})
    kept = (PATH,) if keep is None else (keep,) if isinstance(keep, str) else tuple(keep)
    if set(kept) - {PATH}:
        raise ConfigError(f"{title}: keep={list(kept)}, and of images there is {PATH!r} alone")
    # A sink that is no table gets arrays, without the paths.
    if sink[1] is None and is_table_path(sink[0]):
        check_columns(sig, kept, title)
        columns = TableColumns(ImageTable(images), {name: ()}, kept)
        return Ends(columns.sources(sig), table_sinks(sink[0], title), paths, columns)
    if keep is not None:
        raise ConfigError(f"{title}: keep= needs a table as sink: a path ending in .parquet or .csv")
    return Ends({name: images}, named_places([s.name for s in sig.outputs], *sink), paths, None)


def is_table_run(source: object, sink: object, keep: Sequence[str] | None, sig: Signature) -> bool:
    """Return whether rows are read from one table and written to one."""
    if keep is not None:
        return True
    if not (is_table_path(source) and is_table_path(sink)):
        return False
    if is_csv(os.fspath(source)) or is_csv(os.fspath(sink)) or len(sig.inputs) > 1 or len(sig.outputs) > 1:
        return True
    has_text = any(spec.dtype == np.dtype(object) for spec in (*sig.inputs, *sig.outputs))
    return has_text or not _is_array(os.fspath(source), sig.inputs[0])


def _is_array(path: str, spec: ValueSpec) -> bool:
    """Return whether a parquet table is read as one array of the input's dtype: one column, or all of one type."""
    pa, _ = pyarrow_modules()
    with readable(addresses.address_of(path)):
        found = open_table(files.resolved(path))
    if spec.name in found.columns:
        return True
    kinds = {found.schemas[0].field(name).type for name in found.columns}
    if len(kinds) != 1:
        return False
    (kind,) = kinds
    # Lists, and types that are no numbers, have errors of their own there.
    return (
        not pa.types.is_primitive(kind)
        or spec.dtype is None
        or np.dtype(kind.to_pandas_dtype()) == spec.dtype
    )


def open_columns(source: object, keep: Sequence[str] | None, sig: Signature, title: str) -> TableColumns:
    """Return the columns of a table that a run reads.

    Raises
    ------
    ConfigError
        It is no table, its columns do not fit the model, or columns to keep are not there.
    """
    table = _opened(source, title)
    kept = (keep,) if isinstance(keep, str) else tuple(dict.fromkeys(keep or ()))
    if unknown := [name for name in kept if name not in table.columns]:
        raise ConfigError(
            f"{title}: keep={unknown} are no columns of {table.path!r}; it has {', '.join(table.columns)}"
        )
    # A column that is kept may be an input by its name as well, but none of a matrix whose columns have no names.
    others = [name for name in table.columns if name not in kept]
    vectors = vectors_of(nw.from_native(table.empty(), eager_only=True))
    by_position = takes_matrix(sig) and not sig.inputs[0].columns
    mapped = columns_for(sig, others if by_position else table.columns, title, vectors)
    columns = TableColumns(table, mapped, kept)
    # Other columns are never read: tables are often wide.
    read = replace(table, columns=tuple(dict.fromkeys((*kept, *columns.features))))
    # The types of the columns are checked; their values are known in the chunks alone.
    read = read.unified()
    if isinstance(read, CsvTable):
        read = read.typed(_dtypes(sig, mapped))
    read_table(read.empty().select(list(columns.features)), sig, title)
    check_columns(sig, kept, title)
    return replace(columns, table=read)


def _dtypes(sig: Signature, mapped: Mapping[str, Sequence[str] | str]) -> dict[str, np.dtype]:
    """Return the dtypes that the model takes of columns, by column."""
    found = dict[str, np.dtype]()
    for spec in sig.inputs:
        columns = mapped[spec.name]
        if spec.dtype is not None:
            found |= dict.fromkeys([columns] if isinstance(columns, str) else columns, spec.dtype)
    return found


def _opened(source: object, title: str) -> ParquetTable | CsvTable:
    if not is_table_path(source):
        given = (
            repr(addresses.address_of(os.fspath(source)))
            if isinstance(source, (str, os.PathLike))
            else f"a {type(source).__name__}"
        )
        raise ConfigError(
            f"{title}: keep= needs a table as source, and {given} is none: wanted a path ending in .parquet or .csv, or"
            " a folder of parquet files"
        )
    path = files.resolved(os.fspath(source))
    with readable(path):
        return open_csv_table(path) if is_csv(path) else open_parquet_table(path)


@dataclass(frozen=True)
class TableWork(Work):
    """The work of a run over a table."""

    columns: TableColumns

    @cached_property
    def call(self) -> ChunkCall:
        """The model as one bundle, and how a table is mapped to its inputs and from its outputs."""
        # `Work` takes a place for each output; which one does not matter to the call.
        place = next(iter(self.places.values()))
        plain = Work(self.opened, self.sources, dict.fromkeys(self.outputs, place), self.chunks).call
        columns, title = self.columns, f"model {self.opened.name!r}"
        table = TableCall(self.opened.signature, title, columns.features, columns.keep, tuple(self.outputs))
        return replace(plain, table=table)

    @property
    def outputs(self) -> list[str]:
        """Names of the model's outputs."""
        return [spec.name for spec in self.opened.signature.outputs]

    def feeds(self) -> list[RowFeed]:
        """Return the rows of the table, all inputs of a chunk in one piece."""
        return [RowFeed(self.columns.table.pieces(self.chunks), True)]

    def hashed(self) -> tuple[int, ...]:
        """Return no position: files tell when they change."""
        return ()

    def known_layouts(self) -> list[Layout]:
        """Return the layout of the table of results."""
        # Only a table without rows is written without results, which have the columns otherwise.
        sig, classes = self.opened.signature, classes_of(self.opened.signature)
        results = {} if self.chunks.rows else empty_results(sig) or {}
        columns = {name: np.empty(0, self._kept_dtype(name)) for name in self.columns.keep}
        columns |= result_columns(results, 0, self.opened.name, classes)
        fields = [(name, value.dtype) for name, value in columns.items()]
        return [table_layout(self.chunks, np.dtype(fields))]

    def _kept_dtype(self, name: str) -> np.dtype:
        """Return numpy's dtype of a column to keep, as near to its own as there is one; objects for strings."""
        table = self.columns.table
        if isinstance(table, ImageTable):
            return np.dtype(object)
        return np.dtype(table.types.field(name).type.to_pandas_dtype())

    def layouts(self, found: Sequence[tuple[Any, Any]]) -> list[Layout]:
        """Return the layout of the table of results."""
        return self.known_layouts()


def table_sinks(sink: object, title: str) -> Mapping[str, SinkPath]:
    """Return the place of the table of results."""
    return {NAME: table_place(sink, title)}
