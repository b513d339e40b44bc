"""What a run reads and writes, of the caller's arguments.

    arrays      one for each input                --model--> outputs
    a table     columns --inputs-->                 model --> outputs, beside columns that are kept
    images      files --preprocess--> the input     model --> outputs, beside their paths

    .npy, .zarr          an output as an array
    .parquet, .csv       outputs as columns of a table, after those that are kept

All of this is done before anything is created.
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

from dask_ferro.errors import InputError, did_you_mean
from dask_ferro.lower.inputs.tables import (
    columns_for,
    empty_results,
    read_table,
    result_columns,
    takes_matrix,
)
from dask_ferro.lower.preparation.remote import OBJECT_STORES, is_address, kind_of, mask, without_secrets
from dask_ferro.lower.signature import Signature
from dask_ferro.stream import files
from dask_ferro.stream.formats import rows_of
from dask_ferro.stream.formats.arrays import ZARR_MARKS, open_array, open_npy, open_zarr
from dask_ferro.stream.formats.csv import CsvOptions, CsvTable, open_csv
from dask_ferro.stream.formats.images import PATH, ImageSource, Preprocess, identity, open_images
from dask_ferro.stream.formats.images import SUFFIXES as IMAGES
from dask_ferro.stream.formats.tables import PARQUET, TableSource, is_frame, is_list, open_frame, open_parquet
from dask_ferro.stream.journal import SUFFIX, SinkPath
from dask_ferro.stream.sinks import KINDS

_ARRAYS = "a path ending in .npy or .zarr, or a numpy or a dask array"
_TABLES = "a frame, a path ending in .parquet or .csv, or a folder of parquet files"
_SINKS = "a path ending in .npy, .zarr, .parquet or .csv, or a folder"
_KINDS = KINDS | dict.fromkeys(IMAGES, "images")
_CSV = (".csv", ".csv.gz", ".csv.bz2", ".csv.xz", ".csv.zst", ".tsv")
_IN_FOLDERS = {"images": IMAGES, "parquet": PARQUET}


class InputRows(NamedTuple):
    """The rows of one input of a table: how many, and the shape and dtype that they have for the model."""

    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Endpoints:
    """Where the rows of a run come from and go to.

    `sources` are by input, of a table as `InputRows`; `places` are where the outputs go, in the model's order.  `paths`
    are the sources' real ones, and `settings` tell runs apart as well.  Of a table, `features` are the columns that go
    to the inputs, in the inputs' order, and `keep` those that are kept.
    """

    sources: Mapping[str, Any]
    places: Mapping[str, SinkPath]
    paths: list[str]
    table: TableSource | ImageSource | None = None
    features: tuple[str, ...] | None = None
    keep: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def read(self) -> dict[str, Any]:
        """What is read, by name: the table, or the source of each input."""
        return dict(self.sources) if self.table is None else {"table": self.table}


class Reading(NamedTuple):
    """The caller's options for what is read and kept; see `ff.predict_files`."""

    keep: tuple[str, ...] | None
    columns: Sequence[str] | None
    preprocess: str | Preprocess | None
    unreadable: str
    csv: CsvOptions


def endpoints_of(
    sig: Signature, source: Any, sink: Any, reading: Reading, title: str, client: Any
) -> Endpoints:
    """Return the sources and sinks of a run."""
    if not sig.inputs:
        raise InputError(f"{title} has no inputs, so there are no rows to stream")
    place = _path_of(source)
    kind = place.kind if place else "frame" if is_frame(source) else "arrays"
    _check_options(kind, repr(place.path) if place else f"a {type(source).__name__}", reading, title)
    places = sinks_by_name([spec.name for spec in sig.outputs], sink)
    if kind == "images":
        ends = _image_endpoints(sig, source, places, reading, title)
    elif kind in ("frame", "csv", "parquet"):
        ends = _table_endpoints(
            sig, _open_table(source, place, reading, client), place, places, reading, title
        )
    else:
        given = sources_by_name([spec.name for spec in sig.inputs], source)
        sources = {name: open_source(one, name) for name, one in given.items()}
        ends = Endpoints(sources, places, [one.path for one in sources.values() if hasattr(one, "path")])
    _check_columns(sig, ends, reading, title)
    return ends


def _check_options(kind: str | None, what: str, reading: Reading, title: str) -> None:
    """Raise `InputError` for options that are not for the kind of source."""
    if reading.unreadable not in ("raise", "skip"):
        raise InputError(f"{title}: unreadable={reading.unreadable!r}, wanted 'raise' or 'skip'")
    if reading.csv != CsvOptions() and kind != "csv":
        raise InputError(
            f"{title}: separator=, encoding=, null_values= and types= are for a source that is CSV"
        )
    if (reading.preprocess is not None or reading.unreadable == "skip") and kind != "images":
        raise InputError(
            f"{title}: preprocess= and unreadable= are for images, and {what} is none: wanted a folder or a pattern of"
            f" {', '.join(IMAGES)}"
        )
    if not (reading.keep is None and reading.columns is None) and kind in (None, "arrays", "npy", "zarr"):
        raise InputError(
            f"{title}: passthrough= and columns= need a table as source, and {what} is none: wanted {_TABLES}"
        )


def _check_columns(sig: Signature, ends: Endpoints, reading: Reading, title: str) -> None:
    """Raise `InputError` where results and kept columns have one name, or no sink has columns."""
    empty = empty_results(sig)
    tables = [place for place in ends.places.values() if place.is_table]
    for place in tables:
        results = {name: empty[name] for name in place.outputs if name in empty}
        result_columns(sig, results, 0, title, ends.keep)
    if reading.keep is not None and not tables:
        sinks = ", ".join(repr(place.path) for place in ends.places.values())
        raise InputError(
            f"{title}: passthrough= writes a table, and {sinks} is none: wanted a path ending in .parquet or .csv"
        )


# ---- tables and images --------------------------------------------------------------------------------------


def _open_table(source: Any, place: SourcePath | None, reading: Reading, client: Any) -> TableSource:
    if place is None:
        return open_frame(source, client)
    with readable(place.path):
        return open_csv(place.path, reading.csv) if place.kind == "csv" else open_parquet(place.path)


def _table_endpoints(
    sig: Signature,
    table: TableSource,
    place: SourcePath | None,
    places: Mapping[str, SinkPath],
    reading: Reading,
    title: str,
) -> Endpoints:
    kept = reading.keep or ()
    _check_names("passthrough", kept, table, title)
    mapped = _map_columns(sig, table, kept, reading.columns, title)
    features = tuple(chain.from_iterable(mapped.values()))
    # Other columns are never read: tables are often wide.
    table = table.select(tuple(dict.fromkeys((*kept, *features))))
    settings: dict[str, Any] = {"keep": list(kept), "columns": list(features)}
    if isinstance(table, CsvTable):
        dtypes = {s.name: s.dtype for s in sig.inputs if s.dtype is not None}
        table = table.typed({c: dtypes[n] for n in dtypes for c in mapped[n]}, kept)
        settings |= {"csv": [str(part) for part in reading.csv[:3]], "types": dict(reading.csv.types)}
    # The types of the columns are checked, and the first lists have the lengths of all; other values are known in the
    # chunks alone.
    read = table.select(tuple(dict.fromkeys(features)))
    has_lists = any(is_list(column.type) for column in read.schema)
    with readable(table.label):
        first = rows_of(read.part(0, 1)) if has_lists and table.rows else read.schema.empty_table()
    found = read_table(first, sig, title)
    assert found is not None
    sources = {name: InputRows(table.rows, a.shape[1:], a.dtype) for name, a in found.arrays.items()}
    paths = [files.resolve(files.folder_of(place.path))] if place else []
    return Endpoints(sources, places, paths, table, features, kept, settings)


def _check_names(option: str, names: Sequence[str], table: TableSource, title: str) -> None:
    there = table.schema.names
    if unknown := sorted(set(names) - set(there)):
        raise InputError(
            f"{title}: {option}={unknown[:8]} are not columns of {table.label!r}"
            f"{did_you_mean(unknown[0], there)}; it has {', '.join(there[:20])}"
        )


def _map_columns(
    sig: Signature, table: TableSource, kept: Sequence[str], columns: Sequence[str] | None, title: str
) -> dict[str, list[str]]:
    """Return the columns that go to each input."""
    vectors = frozenset(f.name for f in table.schema if is_list(f.type))
    if columns is not None:
        chosen = [columns] if isinstance(columns, str) else list(columns)
        is_vector = len(sig.inputs) == len(chosen) == 1 and vectors.issuperset(chosen)
        if not (takes_matrix(sig) or is_vector):
            raise InputError(
                f"{title}: columns= is for a model with one input of (rows, columns); others take a column by each"
                " input's name"
            )
        _check_names("columns", chosen, table, title)
        return {sig.inputs[0].name: chosen}
    # A column that is kept may be an input by its name as well, but none of a matrix whose columns have no names; nor
    # is an index of pandas.
    left = {*kept, *getattr(table, "index", ())} - {s.name for s in sig.inputs if not takes_matrix(sig)}
    by_position = len(sig.inputs) == 1 and not sig.inputs[0].columns
    names = [name for name in table.schema.names if not (by_position and name in left)]
    mapped = columns_for(sig, names, title, vectors)
    return {name: [c] if isinstance(c, str) else list(c) for name, c in mapped.items()}


def _image_endpoints(
    sig: Signature, source: Any, places: Mapping[str, SinkPath], reading: Reading, title: str
) -> Endpoints:
    if len(sig.inputs) > 1:
        names = ", ".join(spec.name for spec in sig.inputs)
        raise InputError(
            f"{title}: {mask(os.fspath(source))!r} is of images, which go to one input, and it has {names}"
        )
    with readable(os.fspath(source)):
        images = open_images(
            os.fspath(source), reading.preprocess, sig.inputs[0], reading.unreadable == "skip"
        )
    kept = (PATH,) if reading.keep is None else reading.keep
    if set(kept) - {PATH}:
        raise InputError(f"{title}: passthrough={list(kept)}, but images have only the column {PATH!r}")
    if images.skips and not all(place.is_table for place in places.values()):
        raise InputError(
            f"{title}: unreadable='skip' needs a table as sink: a path ending in .parquet or .csv"
        )
    settings = {
        "keep": list(kept),
        "preprocess": identity(images.preprocess),
        "unreadable": reading.unreadable,
    }
    paths = sorted(map(files.resolve, set(map(os.path.dirname, images.files))))
    return Endpoints({sig.inputs[0].name: images}, places, paths, images, (), kept, settings)


# ---- sources ------------------------------------------------------------------------------------------------


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


class SourcePath(NamedTuple):
    """The kind of a source, and the real path of a file, a folder or a pattern."""

    kind: str | None
    path: str


def _path_of(source: Any) -> SourcePath | None:
    """Return what the path of a source names, or None of what is no path."""
    if not _is_path(source):
        return None
    path = _fit(os.fspath(source), "source")
    if not (is_address(path) or files.is_pattern(path)):
        if not os.path.exists(path):
            raise InputError(f"source {path!r} does not exist")
        if not (os.path.isfile(path) or os.path.isdir(path)):
            raise InputError(f"source {path!r} is neither a file nor a folder")
    with readable(path):
        path = files.resolve(path)
        return SourcePath(_kind_of(path), path)


def _kind_of(path: str) -> str | None:
    """Return the kind of a source by its name, or by what is in its folder."""
    if files.strip_query(path).lower().endswith(_CSV):
        return "csv"
    if kind := _KINDS.get(files.suffix_of(path)):
        return kind
    if files.suffix_of(os.path.dirname(files.strip_query(path))) == ".zarr":
        # An array in a group, of which a web server need not list the files.
        return "zarr"
    if files.is_pattern(path) or not files.is_folder(path):
        return None
    if not set(ZARR_MARKS).isdisjoint(files.names_in(path)):
        return "zarr"
    below = files.find(path)
    return next((kind for kind, ends in _IN_FOLDERS.items() if any(files.files_in(below, ends))), None)


def sources_by_name(names: Sequence[str], source: Any) -> dict[str, Any]:
    """Return the source of each model input."""
    if isinstance(source, Mapping):
        given = dict(source)
    elif len(names) == 1:
        given = {names[0]: source}
    elif (place := _path_of(source)) is not None and place.kind == "zarr":
        # A group has an array for each input.
        given = {name: files.join(place.path, name) for name in names}
    else:
        raise InputError(
            f"the model has inputs {', '.join(names)}; pass a mapping of them to sources, or {_TABLES}"
        )
    _check_named(given, names, "input", "source")
    return {name: given[name] for name in names}


def _check_named(
    given: Mapping[str, Any], names: Sequence[str], what: str, end: str, remedy: str = ""
) -> None:
    problems = [f"no {what} {n!r}" for n in given if n not in names]
    problems += [f"no {end} for {what} {n!r}" for n in names if n not in given]
    if problems:
        raise InputError(f"{'; '.join(problems)}; the model has {what}s {', '.join(names)}{remedy}")


def open_source(source: Any, name: str) -> Any:
    """Return the rows for a model input: of a path, or an array of numpy or Dask."""
    place = _path_of(source)
    if place is not None:
        with readable(place.path):
            if place.kind == "npy":
                return open_npy(place.path)
            if place.kind == "zarr":
                return open_zarr(place.path, name)
        if place.kind is None:
            raise InputError(f"source {place.path!r}: unknown format; wanted {_ARRAYS}, or {_TABLES}")
        raise InputError(
            f"source {place.path!r} is not an array: pass it as the only source, for all inputs, or pass for input"
            f" {name!r} {_ARRAYS}"
        )
    what = f"source of {name!r}"
    if isinstance(source, np.ndarray) or (is_dask_collection(source) and hasattr(source, "rechunk")):
        return open_array(source, what)
    raise InputError(
        f"{what} is a {type(source).__name__}; wanted {_ARRAYS}, or as the only source {_TABLES}"
    )


@contextmanager
def readable(path: str, what: str = "source") -> Iterator[None]:
    """Raise `InputError` with the path of a source, or something else, that the file system refuses to read."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what} {mask(path)!r} cannot be read: {error.strerror or error}") from error


def _fit(path: str, what: str) -> str:
    """Return a path, with the scheme of an address in small letters."""
    # An empty path is the working directory, and a null byte truncates a path.
    if not path or "\0" in path:
        raise InputError(f"{what} {path!r} is not a path; wanted {_SINKS}")
    return files.resolve(path) if is_address(path) else path


# ---- sinks --------------------------------------------------------------------------------------------------


def sinks_by_name(names: Sequence[str], sink: Any) -> dict[str, SinkPath]:
    """Return where the outputs of a model go, in its order, by their names."""
    if isinstance(sink, Mapping):
        remedy = ": name a sink for each, or choose some by ff.from_onnx(model, outputs=...)"
        _check_named(sink, names, "output", "sink", remedy)
        wanted: dict[tuple[str, ...], str] = {(name,): _path(sink[name]) for name in names}
    else:
        wanted = _spread(tuple(names), _path(sink))
    places = {", ".join(outputs): _place(path, outputs) for outputs, path in wanted.items()}
    for one, other in combinations(places, 2):
        if _overlap(places[one].path, places[other].path):
            raise InputError(
                f"outputs {one!r} and {other!r} have the same sink, or one in the other: {places[one].path!r} and"
                f" {places[other].path!r}; give each output its own path"
            )
    return places


def _spread(names: tuple[str, ...], path: str) -> dict[tuple[str, ...], str]:
    """Return the path of each output, or of several, when one path is given for all outputs."""
    suffix = files.suffix_of(path)
    if suffix == "":
        # Quoted, because names of outputs may contain slashes.
        return {(name,): files.join(path, f"{quote(name, safe='')}.npy") for name in names}
    if len(names) > 1 and KINDS.get(suffix) in ("npy", "zarr"):
        raise InputError(
            f"the model has outputs {', '.join(names)}, and sink {path!r} holds one: choose it by ff.from_onnx(model,"
            " outputs=...), or pass a mapping of outputs to sinks, or a folder (a path without a suffix)"
        )
    return {names: path}


def _path(sink: Any) -> str:
    if not _is_path(sink):
        raise InputError(f"sink is a {type(sink).__name__}; wanted {_SINKS}")
    path = _fit(os.fspath(sink), "sink")
    if is_address(path):
        _refuse_address(path)
    return path


def _refuse_address(sink: str) -> None:
    """Raise `InputError` for an address at which an output cannot be written whole, or that has a secret."""
    if kind_of(sink) not in OBJECT_STORES:
        raise InputError(
            f"sink {sink!r}: {kind_of(sink)}:// is read, and not written; wanted a path, or an address of an object"
            f" store: {', '.join(OBJECT_STORES)}"
        )
    if without_secrets(sink) != sink:
        raise InputError(
            f"sink {sink!r} has a user, a password or a query; leave it to the environment, or to fsspec's"
            " configuration"
        )
    if any(letter in sink for letter in "*?["):
        raise InputError(f"sink {sink!r}: stores take '*', '?' and '[' for patterns; choose another name")
    if "/" not in sink.partition("://")[2].strip("/"):
        raise InputError(f"sink {sink!r} is a whole bucket; wanted a name in it")


def _place(path: str, outputs: tuple[str, ...]) -> SinkPath:
    kind = KINDS.get(files.suffix_of(path))
    if kind is None:
        raise InputError(f"sink {path!r}: unknown format; wanted {_SINKS}")
    # Resolved here, because workers may have another working directory.
    return SinkPath(kind, files.resolve(path), outputs)


def journal_folder(sink: Any, places: Mapping[str, SinkPath]) -> str:
    """Return the folder of the record: beside the sink, the folder of sinks, or the first of several sinks."""
    beside = next(iter(places.values())).path if isinstance(sink, Mapping) else files.resolve(_path(sink))
    return files.resolve(beside + SUFFIX) if is_address(beside) else beside + SUFFIX


def _overlap(one: str, other: str) -> bool:
    """Whether two resolved paths, or addresses by any alias of their schemes, are the same, or one is in the other."""
    with readable(one, "path"):
        (store, one), (others, other) = files.location_of(one), files.location_of(other)
    return store is others and (f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/"))


def check_places(sources: Iterable[str], places: Iterable[SinkPath], folder: str) -> None:
    """Raise `InputError` where a sink would overwrite a source, or its folder does not exist."""
    places = list(places)
    if len({is_address(place.path) for place in places}) > 1:
        raise InputError(
            f"sinks {', '.join(repr(place.path) for place in places)}: some are paths and some addresses; a run writes"
            " to either"
        )
    # For a folder of sinks, the folder that the run creates.
    made = folder.removesuffix(SUFFIX)
    for place in places:
        for path in sources:
            if _overlap(path, place.path):
                raise InputError(
                    f"sink {place.path!r} and source {path!r} are the same; write to another path"
                )
        if is_address(place.path):
            # A store has no folders, and whether it can be written to, its lock finds out.
            continue
        above = os.path.dirname(place.path)
        above = os.path.dirname(above) if above == made else above
        if not os.path.isdir(above):
            raise InputError(f"sink {place.path!r}: folder {above!r} does not exist; make it first")
