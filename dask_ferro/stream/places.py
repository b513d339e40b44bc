"""Resolution of the caller's paths and arrays into sources and sinks, by format, input and output.

The format of a source follows from its suffix, or from the files in its folder.  The format of a sink follows from its
suffix; without one it is a folder of `.npy` files, one per output.  All of this is done before anything is created.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import TypeGuard
from urllib.parse import quote

import numpy as np
from dask.base import is_dask_collection

from dask_ferro.errors import ConfigError
from dask_ferro.lower.prepared.remote import OBJECT_STORES, is_address, kind_of, without_secrets
from dask_ferro.lower.signature import ValueSpec
from dask_ferro.stream.formats import zarr_arrays
from dask_ferro.stream.formats.arrays import open_array, open_dask
from dask_ferro.stream.formats.interfaces import Layout, RowSource, Sink
from dask_ferro.stream.formats.npy import NpySink, open_npy
from dask_ferro.stream.formats.parquet import SUFFIXES, ParquetSink, open_parquet
from dask_ferro.stream.formats.tables import CsvSink, TableSink, is_csv
from dask_ferro.stream.formats.zarr_arrays import MARKS, ZarrSink, open_zarr
from dask_ferro.stream.journal import SUFFIX
from dask_ferro.stream.stores import addresses, files

_WANTED = ".npy, .zarr or .parquet"
_SINKS: Mapping[str, Callable[[str, Layout], Sink]] = {
    "npy": NpySink,
    "zarr": ZarrSink,
    "parquet": ParquetSink,
    "table": TableSink,
    "csv": CsvSink,
}


@dataclass(frozen=True)
class SinkPath:
    """The format and the real, absolute path, or the address, of an output."""

    kind: str
    path: str

    def exists(self) -> bool:
        """Whether the path exists."""
        return files.exists(self.path)

    def sink(self, layout: Layout, path: str | None = None) -> Sink:
        """Return the sink for an output of this layout, at another path if one is given."""
        return _SINKS[self.kind](path or self.path, layout)


# ---- sources
# --------------------------------------------------------------------------------------------------


def named_sources(names: Sequence[str], source: object, input: str | None) -> dict[str, object]:
    """Return the source of each model input.

    Raises
    ------
    ConfigError
        An input has no source, or a source belongs to no input.
    """
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


def is_table_path(path: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether a value is the path of a whole table: parquet, a folder or a pattern of it, or CSV."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    text = addresses.address_of(os.fspath(path).rstrip("/"))
    if is_csv(text):
        return True
    kind = _kind_by_name(text)
    if kind is None:
        with readable(text, "path"):
            kind = _kind_by_content(text)
    return kind == "parquet"


def table_place(sink: object, title: str) -> SinkPath:
    """Return the place of a table of results; raises `ConfigError` where it is no path of a table."""
    path = _path(sink)
    if is_csv(path):
        return SinkPath("csv", files.resolved(path))
    if _kind_by_name(path.rstrip("/")) != "parquet":
        raise ConfigError(
            f"{title}: keep= writes a table, and {path!r} is none: wanted a path ending in .parquet or .csv"
        )
    return SinkPath("table", files.resolved(path))


def _holds_several(source: object) -> bool:
    """Whether a source may have an array for each input, by name."""
    if not isinstance(source, (str, os.PathLike)):
        return False
    path = addresses.address_of(os.fspath(source))
    kind = _kind_of_source(path)
    with readable(path):
        return kind == "parquet" or (kind == "zarr" and zarr_arrays.is_group(path))


def open_source(source: object, spec: ValueSpec) -> RowSource:
    """Return the rows for a model input.

    Parameters
    ----------
    source : path, array or dask array
    spec : ValueSpec
        The input.

    Raises
    ------
    ConfigError
        The source does not exist, or is not an array of numbers in a known format.
    """
    if isinstance(source, (str, os.PathLike)):
        axes = None if spec.shape is None else len(spec.shape)
        return _open_path(addresses.address_of(os.fspath(source)), spec.name, axes)
    what = f"source of {spec.name!r}"
    if isinstance(source, np.ndarray):
        return open_array(source, what)
    if is_dask_collection(source) and hasattr(source, "rechunk"):
        return open_dask(source, what)
    raise ConfigError(
        f"{what} is a {type(source).__name__}; wanted a path ending in {_WANTED}, a numpy or a dask array"
    )


def _open_path(path: str, name: str, axes: int | None) -> RowSource:
    kind = _kind_of_source(path)
    column = None
    if kind == "parquet" and (holder := _holder(path)) != path.rstrip("/"):
        # In t.parquet/column the last component is a column.
        path, column = holder, os.path.basename(path.rstrip("/"))
    real = files.resolved(path)
    with readable(path):
        if kind == "npy":
            return open_npy(real)
        if kind == "zarr":
            return open_zarr(real, name)
        return open_parquet(real, column, name, axes)


@contextmanager
def readable(path: str, what: str = "source") -> Iterator[None]:
    """Raise `ConfigError` with the path of a source, or something else, that the file system refuses to read."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} {path!r} cannot be read: {error.strerror or error}") from error


def _kind_of_source(path: str) -> str:
    """Return the format of a path, which may continue to an array of a zarr group or a column of a parquet table."""
    _refuse_unfit(path, "source")
    trail, holder = path.rstrip("/"), _holder(path)
    # What an address has is found when it is read.
    if not (is_address(path) or files.is_pattern(holder)):
        if not os.path.exists(holder) or (holder != trail and not _kind_by_name(holder)):
            raise ConfigError(f"source {path!r} does not exist")
        if not (os.path.isfile(holder) or os.path.isdir(holder)):
            raise ConfigError(f"source {path!r} is neither a file nor a folder")
    with readable(path):
        kind = _kind_by_name(holder) or _kind_by_content(holder)
    if kind is None:
        raise ConfigError(f"source {path!r}: unknown format; wanted {_WANTED}, or a folder of parquet files")
    return kind


def _holder(path: str) -> str:
    """Return the path of the file or folder of a source, of which the last component may name an array or a column."""
    trail = path.rstrip("/")
    above = os.path.dirname(trail)
    if is_address(path):
        # Told by the names alone, since to ask takes a round trip.
        return addresses.address_of(above if not _kind_by_name(trail) and _kind_by_name(above) else trail)
    return trail if os.path.exists(trail) or files.is_pattern(trail) else above


def _kind_by_name(path: str) -> str | None:
    suffix = os.path.splitext(addresses.bare(path))[1].lower()
    if suffix in SUFFIXES:
        return "parquet"
    return suffix[1:] if suffix in (".npy", ".zarr") else None


def _kind_by_content(path: str) -> str | None:
    if not files.is_folder(path):
        return None
    names = files.names_in(path)
    if any(mark in names for mark in MARKS):
        return "zarr"
    # Folders named key=value are partitions of a table.
    holds = any(n.endswith(SUFFIXES) for n in names) or any("=" in n for n in files.folders_in(path))
    return "parquet" if holds else None


def _refuse_unfit(path: str, what: str) -> None:
    # An empty path is the working directory, and a null byte truncates a path.
    if not path or "\0" in path:
        raise ConfigError(f"{what} {path!r} is no path; wanted one ending in {_WANTED}, or a folder")
    addresses.address_of(path)


def paths_of(sources: Iterable[object]) -> list[str]:
    """Return the real paths of opened sources; for an array of a group or a column of a table, the group or table.

    A path that does not exist continues inside its parent, because all sources have been opened; a pattern is in its
    folder.
    """
    found = [os.fspath(s) for s in sources if isinstance(s, (str, os.PathLike))]
    return [files.resolved(files.folder_of(p) if files.is_pattern(p) else _holder(p)) for p in found]


# ---- sinks
# ----------------------------------------------------------------------------------------------------


def named_places(names: Sequence[str], sink: object, output: str | None) -> dict[str, SinkPath]:
    """Return the place of each wanted output, in the model's order.

    Parameters
    ----------
    names : sequence of str
        The model's outputs.
    sink : path, or mapping of str to path
    output : str or None
        The only wanted output.

    Raises
    ------
    ConfigError
        The outputs' places are ambiguous, or a place is invalid.
    """
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
    _refuse_nested(places)
    return places


def _refuse_nested(places: Mapping[str, SinkPath]) -> None:
    """Raise `ConfigError` when two outputs have the same sink, or one sink is inside the other."""
    for one, other in combinations(places, 2):
        if _overlap(places[one].path, places[other].path):
            raise ConfigError(
                f"outputs {one!r} and {other!r} have the same sink, or one in the other: {places[one].path!r} and"
                f" {places[other].path!r}; give each output its own path"
            )


def _spread(names: Sequence[str], sink: object) -> dict[str, str]:
    """Return the path of each output when one path is given for all outputs."""
    path = _path(sink)
    if os.path.splitext(path.rstrip("/"))[1] == "":
        # Quoted, because names of outputs may contain slashes.
        return {name: addresses.joined(path, f"{quote(name, safe='')}.npy") for name in names}
    if len(names) > 1:
        raise ConfigError(
            f"the model has outputs {', '.join(names)}, and sink {path!r} holds one: name it with"
            " output=, or pass a mapping of outputs to sinks, or a folder (a path without a suffix)"
        )
    return {names[0]: path}


def _path(sink: object) -> str:
    if not isinstance(sink, (str, os.PathLike)):
        raise ConfigError(f"sink is a {type(sink).__name__}; wanted a path ending in {_WANTED}, or a folder")
    path = addresses.address_of(os.fspath(sink))
    _refuse_unfit(path, "sink")
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


def _place(sink: object) -> SinkPath:
    path = _path(sink)
    kind = _kind_by_name(path.rstrip("/"))
    if kind is None:
        raise ConfigError(f"sink {path!r}: unknown format; wanted a path ending in {_WANTED}")
    if kind == "npy" and is_address(path):
        raise ConfigError(
            f"sink {path!r}: a .npy file is filled piece by piece, and an object of a store is put as a whole; wanted"
            " an address ending in .zarr or .parquet"
        )
    # Resolved here, because workers may have another working directory.
    return SinkPath(kind, files.resolved(path))


def journal_folder(sink: object, places: Mapping[str, SinkPath]) -> str:
    """Return the journal's folder: beside the sink, the folder of sinks, or the first of several sinks."""
    beside = next(iter(places.values())).path if isinstance(sink, Mapping) else files.resolved(_path(sink))
    return beside + SUFFIX


def _overlap(one: str, other: str) -> bool:
    """Whether two resolved paths, or addresses by any alias of their schemes, are the same, or one is in the other."""
    with readable(one, "path"):
        (store, one), (others, other) = addresses.location_of(one), addresses.location_of(other)
    return store is others and (f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/"))


def check_places(sources: Iterable[str], places: Iterable[SinkPath], folder: str) -> None:
    """Raise `ConfigError` where a sink would overwrite a source, or its folder does not exist.

    Parameters
    ----------
    sources : iterable of str
        Real paths.
    folder : str
        The journal's folder.
    """
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
    """Whether the paths are the same, or one is inside the other."""
    if _overlap(source, sink):
        return True
    if is_address(source) or is_address(sink):
        return False
    # Hard links and mounts give one file several paths.
    return os.path.exists(source) and os.path.exists(sink) and os.path.samefile(source, sink)
