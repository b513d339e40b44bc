"""What a run reads and writes, of the caller's arguments: arrays, or a table whose columns go to a model's inputs.

    arrays    an array for each input --model--> an array for each output, each to its sink
    table     columns --inputs--> model --outputs--> columns of one table, after those that are kept
    images    files --preprocess--> the input; their paths are the column that is kept

A table may also go to arrays, and arrays to a table in a `.csv` file.  All of this is done before anything is created.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
from dask.base import is_dask_collection

from dask_ferro.errors import ConfigError
from dask_ferro.lower.inputs.tables import check_columns, columns_for, read_table, takes_matrix
from dask_ferro.lower.prepared.remote import OBJECT_STORES, is_address, kind_of, without_secrets
from dask_ferro.lower.signature import Signature, ValueSpec
from dask_ferro.stream import files
from dask_ferro.stream.formats import pa
from dask_ferro.stream.formats.arrays import ZARR_MARKS, is_group, open_array, open_npy, open_zarr
from dask_ferro.stream.formats.images import PATH, ImageSource, Preprocess, identity, open_images
from dask_ferro.stream.formats.images import SUFFIXES as IMAGES
from dask_ferro.stream.formats.tables import (
    PARQUET,
    CsvOptions,
    CsvTable,
    TableSource,
    columns_source,
    holds_numbers,
    is_frame,
    is_list,
    open_csv,
    open_frame,
    open_parquet,
)
from dask_ferro.stream.journal import SUFFIX, SinkPath
from dask_ferro.stream.sinks import KINDS

_WANTED = ".npy, .zarr or .parquet"
_KINDS = KINDS | dict.fromkeys(IMAGES, "images")
_CSV = (".csv", ".csv.gz", ".csv.bz2", ".csv.xz", ".csv.zst", ".tsv")
_IN_FOLDERS = {"images": IMAGES, "parquet": PARQUET}
TABLE = "table"


class InputRows(NamedTuple):
    """The rows of one input of a table: how many, and the shape and dtype that the model declares."""

    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Columns(NamedTuple):
    """A source that is a table: the columns that go to the inputs, in the inputs' order, and those that are kept."""

    table: TableSource | ImageSource
    features: tuple[str, ...]
    keep: tuple[str, ...]


@dataclass(frozen=True)
class Ends:
    """Where the rows of a run come from and go to.

    `sources` are by input, of a table as `InputRows`; `places` are by output, in the model's order, and the only place
    "table" has all results as columns.  `paths` are the sources' real ones, and `settings` tell runs apart as well.
    """

    sources: Mapping[str, Any]
    outputs: list[str]
    places: Mapping[str, SinkPath]
    paths: list[str]
    columns: Columns | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_table(self) -> bool:
        """Whether the results are columns of one table."""
        return list(self.places) == [TABLE] and self.places[TABLE].kind in ("table", "csv")

    @property
    def read(self) -> dict[str, Any]:
        """What is read, by name: the table, or the source of each input."""
        return {TABLE: self.columns.table} if self.columns else dict(self.sources)


class Reading(NamedTuple):
    """The caller's options for what is read and kept; see `ff.run`."""

    input: str | None
    output: str | None
    keep: tuple[str, ...] | None
    columns: Sequence[str] | None
    preprocess: str | Preprocess | None
    unreadable: str
    csv: CsvOptions


def ends_of(sig: Signature, source: Any, sink: Any, reading: Reading, title: str, client: Any) -> Ends:
    """Return the sources and sinks of a run."""
    if reading.unreadable not in ("raise", "skip"):
        raise ConfigError(f"{title}: unreadable={reading.unreadable!r}, wanted 'raise' or 'skip'")
    place = _located(source)
    kind = None if place is None else place.kind
    if reading.csv != CsvOptions() and kind != "csv":
        raise ConfigError(
            f"{title}: separator=, encoding=, null_values= and types= are for a source that is CSV"
        )
    if place is not None and kind == "images":
        if len(sig.inputs) > 1:
            names = ", ".join(spec.name for spec in sig.inputs)
            raise ConfigError(
                f"{title}: {place.path!r} is of images, which go to one input, and it has {names}"
            )
        return _image_ends(sig, source, sink, reading, title)
    if reading.preprocess is not None or reading.unreadable == "skip":
        raise ConfigError(
            f"{title}: preprocess= and unreadable= are for images, and the source is none: wanted a folder or a"
            f" pattern of {', '.join(IMAGES)}"
        )
    if (table := _table_of(sig, source, place, sink, reading, title, client)) is not None:
        return _table_ends(sig, table, [place.whole] if place else [], sink, reading, title)
    if reading.keep is not None or reading.columns is not None:
        raise ConfigError(
            f"{title}: keep= and columns= are for a source that is a table, read as one: leave out input= and output=,"
            " or keep= and columns="
        )
    given = named_sources([s.name for s in sig.inputs], source, reading.input)
    outputs, places = _places(sig, sink, reading, from_table=False)
    located = {name: _located(source) or source for name, source in given.items()}
    sources = {spec.name: open_source(located[spec.name], spec) for spec in sig.inputs}
    wholes = [place.whole for place in located.values() if isinstance(place, SourcePath)]
    return Ends(sources, outputs, places, wholes)


def _table_of(
    sig: Signature,
    source: Any,
    place: SourcePath | None,
    sink: Any,
    reading: Reading,
    title: str,
    client: Any,
) -> TableSource | None:
    """Return the table whose columns go to the inputs, or None where arrays are read."""
    if reading.input is not None:
        return None
    if is_frame(source):
        return open_frame(source, client)
    is_wanted = reading.keep is not None or reading.columns is not None
    if place is None or place.inner or place.kind not in ("csv", "parquet"):
        if not is_wanted:
            return None
        given = f"a {type(source).__name__}" if place is None else repr(place.path)
        raise ConfigError(
            f"{title}: keep= and columns= need a table as source, and {given} is none: wanted a frame, a path ending in"
            " .parquet or .csv, or a folder of parquet files"
        )
    to = _kind_of_sink(sink)
    with readable(place.path):
        if place.kind == "csv":
            return open_csv(place.path, reading.csv)
        if not is_wanted and (reading.output is not None or to not in ("parquet", "csv")):
            return None
        table = open_parquet(place.path)
    has_text = any(spec.dtype == np.dtype(object) for spec in (*sig.inputs, *sig.outputs))
    if is_wanted or to == "csv" or has_text or len(sig.inputs) > 1 or len(sig.outputs) > 1:
        return table
    return None if _is_array(table.schema, sig.inputs[0]) else table


def _is_array(schema: Any, spec: ValueSpec) -> bool:
    """Return whether a parquet table is read as one array of the input's dtype: one column, or all of one type."""
    if spec.name in set(schema.names):
        return True
    kinds = set(schema.types)
    if len(kinds) != 1:
        return False
    (kind,) = kinds
    # Lists, and types that are no numbers, have errors of their own there.
    if not pa.types.is_primitive(kind) or not holds_numbers(kind):
        return True
    return spec.dtype is None or np.dtype(kind.to_pandas_dtype()) == spec.dtype


# ---- tables -------------------------------------------------------------------------------------------------


def _table_ends(
    sig: Signature, table: TableSource, paths: list[str], sink: Any, reading: Reading, title: str
) -> Ends:
    kept, names = reading.keep or (), table.schema.names
    there = set(names)
    if unknown := [name for name in kept if name not in there]:
        raise ConfigError(
            f"{title}: keep={unknown} are no columns of {table.label!r}; it has {', '.join(names[:20])}"
        )
    mapped = _mapped(sig, table, kept, reading.columns, title)
    features = tuple(chain.from_iterable(mapped.values()))
    # Other columns are never read: tables are often wide.
    table = table.select(tuple(dict.fromkeys((*kept, *features))))
    settings: dict[str, Any] = {"keep": list(kept), "columns": list(features)}
    if isinstance(table, CsvTable):
        dtypes = {s.name: s.dtype for s in sig.inputs if s.dtype is not None}
        table = table.typed({c: dtypes[n] for n in dtypes for c in mapped[n]}, kept)
        settings |= {"csv": [str(part) for part in reading.csv[:3]], "types": dict(reading.csv.types)}
    # The types of the columns are checked; their values are known in the chunks alone.
    read_table(table.select(tuple(dict.fromkeys(features))).schema.empty_table(), sig, title)
    outputs, places = _places(sig, sink, reading, from_table=True)
    sources = {spec.name: _input_rows(table.rows, spec, len(mapped[spec.name])) for spec in sig.inputs}
    ends = Ends(sources, outputs, places, paths, Columns(table, features, kept), settings)
    _check_table(sig, ends, kept, reading, title)
    return ends


def _check_table(sig: Signature, ends: Ends, kept: Sequence[str], reading: Reading, title: str) -> None:
    if ends.is_table:
        check_columns(sig, kept, title)
    elif reading.keep is not None:
        sinks = ", ".join(repr(place.path) for place in ends.places.values())
        raise ConfigError(
            f"{title}: keep= writes a table, and {sinks} is none: wanted a path ending in .parquet or .csv"
        )


def _mapped(
    sig: Signature, table: TableSource, kept: Sequence[str], columns: Sequence[str] | None, title: str
) -> dict[str, list[str]]:
    """Return the columns that go to each input."""
    names, there = table.schema.names, set(table.schema.names)
    vectors = frozenset(f.name for f in table.schema if is_list(f.type))
    if columns is not None:
        chosen = [columns] if isinstance(columns, str) else list(columns)
        if not takes_matrix(sig):
            raise ConfigError(
                f"{title}: columns= is for a model with one input of (rows, columns); others take a column by each"
                " input's name"
            )
        if unknown := [name for name in chosen if name not in there]:
            raise ConfigError(
                f"{title}: columns={unknown[:8]} are no columns of {table.label!r}; it has {', '.join(names[:20])}"
            )
        return {sig.inputs[0].name: chosen}
    # A column that is kept may be an input by its name as well, but none of a matrix whose columns have no names; nor
    # is an index of pandas.
    left = set(kept) | set(getattr(table, "index", ()))
    by_position = takes_matrix(sig) and not sig.inputs[0].columns
    mapped = columns_for(sig, [n for n in names if n not in left] if by_position else names, title, vectors)
    return {name: [c] if isinstance(c, str) else list(c) for name, c in mapped.items()}


def _input_rows(rows: int, spec: ValueSpec, wide: int) -> InputRows:
    rest = () if spec.shape is None and wide == 1 else (spec.shape or (None, None))[1:]
    sizes = tuple(d if isinstance(d, int) else wide for d in rest)
    # Only the size of a row counts, where the model declares no dtype.
    return InputRows(rows, sizes, np.dtype(np.float32) if spec.dtype is None else spec.dtype)


def _image_ends(sig: Signature, source: Any, sink: Any, reading: Reading, title: str) -> Ends:
    name = next(iter(named_sources([s.name for s in sig.inputs], source, reading.input)))
    images = open_images(os.fspath(source), reading.preprocess, sig.inputs[0], reading.unreadable == "skip")
    kept = (PATH,) if reading.keep is None else reading.keep
    if set(kept) - {PATH}:
        raise ConfigError(f"{title}: keep={list(kept)}, and of images there is {PATH!r} alone")
    outputs, places = _places(sig, sink, reading, from_table=True)
    settings = {
        "keep": list(kept),
        "preprocess": identity(images.preprocess),
        "unreadable": reading.unreadable,
    }
    paths = sorted({files.resolved(os.path.dirname(file)) for file in images.files})
    ends = Ends({name: images}, outputs, places, paths, Columns(images, (), kept), settings)
    _check_table(sig, ends, kept, reading, title)
    if images.skips and not ends.is_table:
        raise ConfigError(
            f"{title}: unreadable='skip' needs a table as sink: a path ending in .parquet or .csv"
        )
    return ends


# ---- sources ------------------------------------------------------------------------------------------------


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _suffix_kind(path: str) -> str | None:
    if files.bare(path).rstrip("/").lower().endswith(_CSV):
        return "csv"
    return _KINDS.get(files.suffix_of(path))


class SourcePath(NamedTuple):
    """The path of a source: its kind, the real path of a file, a folder or a pattern, and what is named in it."""

    kind: str | None
    path: str
    inner: str

    @property
    def whole(self) -> str:
        """The file or the folder, of a pattern that which has all of its files."""
        return files.resolved(files.folder_of(self.path)) if files.is_pattern(self.path) else self.path


def _located(source: Any) -> SourcePath | None:
    """Return what the path of a source names, or None of what is no path.

    Its last component may be the name of an array in a zarr group, or of a column of a parquet table.
    """
    if not _is_path(source):
        return None
    path = _fit(os.fspath(source), "source")
    trail = path.rstrip("/")
    above, last = os.path.split(trail)
    is_listed = is_address(path) or files.is_pattern(trail)
    if is_address(path):
        # By the names alone, since to ask takes a round trip.
        is_inner = _suffix_kind(trail) is None and _suffix_kind(above) is not None
    else:
        is_inner = not is_listed and not os.path.exists(trail)
    holder = above if is_inner else trail
    kind = _suffix_kind(holder)
    if (is_inner and kind not in ("zarr", "parquet")) or not (is_listed or os.path.exists(holder)):
        raise ConfigError(f"source {path!r} does not exist")
    if not (is_listed or os.path.isfile(holder) or os.path.isdir(holder)):
        raise ConfigError(f"source {path!r} is neither a file nor a folder")
    with readable(path):
        holder = files.resolved(holder)
        return SourcePath(kind or _kind_by_content(holder), holder, last if is_inner else "")


def named_sources(names: Sequence[str], source: Any, input: str | None) -> dict[str, Any]:
    """Return the source of each model input."""
    if not names:
        raise ConfigError("the model has no inputs, so there are no rows to stream")
    if isinstance(source, Mapping):
        if input is not None:
            raise ConfigError("pass either input= or a mapping of inputs to sources, not both")
        given = dict(source)
    elif input is not None:
        given = {input: source}
    elif len(names) == 1 or _holds_several(source):
        given = dict.fromkeys(names, source)
    else:
        raise ConfigError(f"the model has inputs {', '.join(names)}; pass a mapping of them to sources")
    problems = [f"unknown input {n!r}" for n in given if n not in names]
    problems += [f"no source for input {n!r}" for n in names if n not in given]
    if problems:
        raise ConfigError(f"{'; '.join(problems)}; the model has inputs {', '.join(names)}")
    return {name: given[name] for name in names}


def _holds_several(source: Any) -> bool:
    """Whether a source may have an array for each input, by name."""
    place = _located(source)
    if place is None:
        return False
    with readable(place.path):
        return place.kind == "parquet" or (place.kind == "zarr" and is_group(place.path))


def open_source(source: Any, spec: ValueSpec) -> Any:
    """Return the rows for a model input: of a path, or an array of numpy or Dask."""
    place = source if isinstance(source, SourcePath) else _located(source)
    if place is not None:
        return _open_path(place, spec.name, None if spec.shape is None else len(spec.shape))
    what = f"source of {spec.name!r}"
    if isinstance(source, np.ndarray) or (is_dask_collection(source) and hasattr(source, "rechunk")):
        return open_array(source, what)
    raise ConfigError(
        f"{what} is a {type(source).__name__}; wanted a path ending in {_WANTED}, a frame, or a numpy or a dask array"
    )


def _open_path(place: SourcePath, name: str, axes: int | None) -> Any:
    kind, path, inner = place
    with readable(path):
        if kind == "npy":
            return open_npy(path)
        if kind == "zarr":
            return open_zarr(files.joined(path, inner) if inner else path, name)
        if kind == "parquet":
            return columns_source(open_parquet(path), inner or None, name, axes)
    raise ConfigError(f"source {path!r}: unknown format; wanted {_WANTED}, or a folder of parquet files")


@contextmanager
def readable(path: str, what: str = "source") -> Iterator[None]:
    """Raise `ConfigError` with the path of a source, or something else, that the file system refuses to read."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{what} {without_secrets(path) if is_address(path) else path!r} cannot be read: {error.strerror or error}"
        ) from error


def _kind_by_content(path: str) -> str | None:
    if files.is_pattern(path) or not files.is_folder(path):
        return None
    if any(mark in files.names_in(path) for mark in ZARR_MARKS):
        return "zarr"
    return next((k for k, suffixes in _IN_FOLDERS.items() if files.files_of(path, suffixes)), None)


def _fit(path: str, what: str) -> str:
    """Return a path, with the scheme of an address in small letters."""
    # An empty path is the working directory, and a null byte truncates a path.
    if not path or "\0" in path:
        raise ConfigError(f"{what} {path!r} is no path; wanted one ending in {_WANTED}, or a folder")
    return files.resolved(path) if is_address(path) else path


# ---- sinks --------------------------------------------------------------------------------------------------


def _kind_of_sink(sink: Any) -> str | None:
    return KINDS.get(files.suffix_of(os.fspath(sink))) if _is_path(sink) else None


def _places(
    sig: Signature, sink: Any, reading: Reading, *, from_table: bool
) -> tuple[list[str], dict[str, SinkPath]]:
    names = [spec.name for spec in sig.outputs]
    kind = _kind_of_sink(sink)
    if kind == "csv" or (kind == "parquet" and from_table):
        if reading.output is not None and reading.output not in names:
            raise ConfigError(f"no output {reading.output!r}; the model has outputs {', '.join(names)}")
        path = SinkPath("csv" if kind == "csv" else "table", files.resolved(_path(sink)))
        return names if reading.output is None else [reading.output], {TABLE: path}
    places = named_places(names, sink, reading.output)
    return list(places), places


def named_places(names: Sequence[str], sink: Any, output: str | None) -> dict[str, SinkPath]:
    """Return the place of each wanted output, in the model's order."""
    if isinstance(sink, Mapping):
        if output is not None:
            raise ConfigError("pass either output= or a mapping of outputs to sinks, not both")
        wanted = {name: sink[name] for name in names if name in sink}
        unknown = [n for n in sink if n not in names]
    else:
        unknown = [] if output is None or output in names else [output]
        wanted = _spread(list(names) if output is None else [output], sink)
    if unknown or not wanted:
        raise ConfigError(
            f"no output {', '.join(map(repr, unknown))}; the model has outputs {', '.join(names)}"
        )
    places = {name: _place(path) for name, path in wanted.items()}
    for one, other in combinations(places, 2):
        if _overlap(places[one].path, places[other].path):
            raise ConfigError(
                f"outputs {one!r} and {other!r} have the same sink, or one in the other: {places[one].path!r} and"
                f" {places[other].path!r}; give each output its own path"
            )
    return places


def _spread(names: Sequence[str], sink: Any) -> dict[str, str]:
    """Return the path of each output when one path is given for all outputs."""
    path = _path(sink)
    if files.suffix_of(path) == "":
        # Quoted, because names of outputs may contain slashes.
        return {name: files.joined(path, f"{quote(name, safe='')}.npy") for name in names}
    if len(names) > 1:
        raise ConfigError(
            f"the model has outputs {', '.join(names)}, and sink {path!r} holds one: name it with"
            " output=, or pass a mapping of outputs to sinks, or a folder (a path without a suffix)"
        )
    return {names[0]: path}


def _path(sink: Any) -> str:
    if not _is_path(sink):
        raise ConfigError(f"sink is a {type(sink).__name__}; wanted a path ending in {_WANTED}, or a folder")
    path = _fit(os.fspath(sink), "sink")
    if is_address(path):
        _refuse_address(path)
    return path


def _refuse_address(sink: str) -> None:
    """Raise `ConfigError` for an address at which an output cannot be written whole, or that has a secret."""
    if kind_of(sink) not in OBJECT_STORES:
        raise ConfigError(
            f"sink {sink!r}: {kind_of(sink)}:// is read, and not written; wanted a path, or an address of an object"
            f" store: {', '.join(OBJECT_STORES)}"
        )
    if without_secrets(sink) != sink:
        raise ConfigError(
            f"sink {sink!r} has a user, a password or a query; leave it to the environment, or to fsspec's"
            " configuration"
        )
    if any(letter in sink for letter in "*?["):
        raise ConfigError(f"sink {sink!r}: stores take '*', '?' and '[' for patterns; choose another name")
    if "/" not in sink.partition("://")[2].strip("/"):
        raise ConfigError(f"sink {sink!r} is a whole bucket; wanted a name in it")


def _place(sink: Any) -> SinkPath:
    path = _path(sink)
    kind = KINDS.get(files.suffix_of(path))
    if kind in (None, "csv"):
        raise ConfigError(f"sink {path!r}: unknown format; wanted a path ending in {_WANTED}")
    # Resolved here, because workers may have another working directory.
    return SinkPath(str(kind), files.resolved(path))


def journal_folder(sink: Any, places: Mapping[str, SinkPath]) -> str:
    """Return the folder of the record: beside the sink, the folder of sinks, or the first of several sinks."""
    beside = next(iter(places.values())).path if isinstance(sink, Mapping) else files.resolved(_path(sink))
    return files.resolved(beside + SUFFIX) if is_address(beside) else beside + SUFFIX


def _overlap(one: str, other: str) -> bool:
    """Whether two resolved paths, or addresses by any alias of their schemes, are the same, or one is in the other."""
    with readable(one, "path"):
        (store, one), (others, other) = files.location_of(one), files.location_of(other)
    return store is others and (f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/"))


def check_places(sources: Iterable[str], places: Iterable[SinkPath], folder: str) -> None:
    """Raise `ConfigError` where a sink would overwrite a source, or its folder does not exist."""
    places = list(places)
    if len({is_address(place.path) for place in places}) > 1:
        raise ConfigError(
            f"sinks {', '.join(repr(place.path) for place in places)}: some are paths and some addresses; a run writes"
            " to either"
        )
    # For a folder of sinks, the folder that the run creates.
    made = folder.removesuffix(SUFFIX)
    for place in places:
        for path in sources:
            if _touch(path, place.path):
                raise ConfigError(
                    f"sink {place.path!r} and source {path!r} are the same; write to another path"
                )
        if is_address(place.path):
            # A store has no folders, and whether it can be written to, its lock finds out.
            continue
        above = os.path.dirname(place.path)
        above = os.path.dirname(above) if above == made else above
        if not os.path.isdir(above):
            raise ConfigError(f"sink {place.path!r}: folder {above!r} does not exist; make it first")


def _touch(source: str, sink: str) -> bool:
    # Hard links and mounts give one file several paths.
    return _overlap(source, sink) or (
        os.path.exists(source) and os.path.exists(sink) and os.path.samefile(source, sink)
    )
