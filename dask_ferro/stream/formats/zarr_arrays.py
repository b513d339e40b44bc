"""zarr arrays in folders: regions are read, and whole zarr chunks are written, one or more per chunk of a run.

A chunk is as durable as zarr's local store makes it: it survives the process, but not always a crash of the host.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.lower.prepared.remote import is_address, shown
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.interfaces import Array, Layout, irregular, missing_extra, numeric, row_digest
from dask_ferro.stream.stores import addresses, files
from dask_ferro.stream.stores.stamps import files_in, what_lies

# Files that mark a folder as zarr's, in its formats 3 and 2.
MARKS = ("zarr.json", ".zarray", ".zgroup")
# The suffix of a file that zarr's local store has not yet moved into place.
_HALF_MADE = ".partial"


def _zarr() -> Any:
    try:
        # Imported on use: it is an extra.
        import zarr
    except ImportError as error:
        raise missing_extra("zarr", error) from error
    return zarr


def _store(path: str, read_only: bool = True) -> Any:
    """Return the store of a folder, as zarr takes it."""
    return _object_store(path, read_only) if is_address(path) else path


# Kept, since a store opens connections of its own; a run has a source and a part for each output.
@lru_cache(maxsize=16)
def _object_store(address: str, read_only: bool) -> Any:
    from zarr.storage import FsspecStore

    return FsspecStore.from_url(address, read_only=read_only)


@dataclass(frozen=True)
class ZarrSource:
    """A zarr array in a folder."""

    checks_reads: ClassVar[bool] = False
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    grain: int

    @property
    def rows(self) -> int:
        """Length of axis 0."""
        return self.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of the other axes."""
        return self.shape[1:]

    @property
    def tells_content(self) -> bool:
        """Whether the files can be listed, as those of a web server cannot."""
        return not addresses.is_web(self.path)

    def fingerprint(self) -> str:
        """Return path, number, size and latest change of its files, and a digest of their stamps."""
        if not self.tells_content:
            return f"{shown(self.path)}, {self.dtype}{list(self.shape)}"
        return f"{shown(self.path)}, {what_lies(self.path)}"

    def pieces(self, chunks: Chunks) -> Callable[[int], ZarrPiece]:
        """Return the regions by chunk number."""
        return lambda number: ZarrPiece(self.path, *chunks.span(number))


@dataclass(frozen=True)
class ZarrPiece:
    """Rows `start` to `stop` of a zarr array."""

    path: str
    start: int
    stop: int

    def read(self) -> Array:
        """Return the rows."""
        with addresses.without_secrets_of(self.path):
            found = _zarr().open_array(_store(self.path), mode="r")[self.start : self.stop]
        return np.ascontiguousarray(found)


def open_zarr(path: str, name: str) -> ZarrSource:
    """Return the zarr array at a path; in a group, the array `name`, or its only array.

    Raises
    ------
    ConfigError
        There is no array, or there are several and none has the name.
    """
    zarr = _zarr()
    try:
        with addresses.without_secrets_of(path):
            found = zarr.open(_store(path), mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"source {path!r} is not a zarr array or group: {error}") from error
    if isinstance(found, zarr.Group):
        # A web server need not list them, so that the name is tried.
        arrays = [name] if addresses.is_web(path) else sorted(key for key, _ in found.arrays())
        if name not in arrays and len(arrays) != 1:
            raise ConfigError(
                f"source {path!r} is a zarr group of {', '.join(arrays) or 'no arrays'}, and none has the name"
                f" {name!r} of the model's input; name one: {path.rstrip('/')}/<array>"
            )
        return open_zarr(addresses.joined(path, name if name in arrays else arrays[0]), name)
    if not found.shape:
        raise ConfigError(f"source {path!r} holds a single number; wanted rows along axis 0")
    dtype = numeric(np.dtype(found.dtype), f"source {path!r}")
    return ZarrSource(path, tuple(found.shape), dtype, max(1, found.chunks[0]))


@dataclass(frozen=True)
class ZarrSink:
    """A zarr array with the chunks of a run; at an address there is no array before its `zarr.json` is there."""

    mark: ClassVar[str] = "zarr.json"
    path: str
    layout: Layout

    def __post_init__(self) -> None:
        _zarr()

    def prepare(self) -> None:
        """Create the array, empty; it appears complete or not at all."""
        # A chunk of a run has zarr chunks of its own, so no two tasks write one file; zarr has no chunks of length 0.
        batch = max(1, min(self.layout.chunks.batch, self.layout.chunks.rows))
        chunks = (batch, *(max(1, d) for d in self.layout.row_shape))
        create = partial(
            _zarr().create_array, shape=self.layout.shape, chunks=chunks, dtype=self.layout.dtype
        )
        if is_address(self.path):
            with addresses.without_secrets_of(self.path):
                create(_store(self.path, read_only=False))
            addresses.begin(self.path)
            return
        part = f"{self.path}.tmp"
        shutil.rmtree(part, ignore_errors=True)
        create(part)
        os.rename(part, self.path)

    def fits(self) -> bool:
        """Whether the array has this shape and dtype."""
        try:
            with addresses.without_secrets_of(self.path):
                found = _zarr().open_array(_store(self.path), mode="r")
        except (OSError, ValueError, KeyError):
            return False
        return (tuple(found.shape), np.dtype(found.dtype)) == (self.layout.shape, self.layout.dtype)

    def write(self, number: int, rows: Array) -> str:
        """Write a chunk; the array must exist."""
        start, stop = self.layout.chunks.span(number)
        with addresses.without_secrets_of(self.path):
            _zarr().open_array(_store(self.path, read_only=False), mode="r+")[start:stop] = rows
        return row_digest(rows)

    def digest(self, number: int) -> str | None:
        """Return the digest of the rows of a chunk."""
        try:
            return row_digest(ZarrPiece(self.path, *self.layout.chunks.span(number)).read())
        except Exception:  # noqa: BLE001 - zarr and its codecs do not list their errors for damaged files
            return None

    def foreign(self) -> str | None:
        """Return the first path in the folder that is not a file of the array."""
        if is_address(self.path):
            names = addresses.objects_below(self.path)
            others = (n for n in names if n not in addresses.MARKS and not _is_of_array(n))
            return next((addresses.joined(self.path, name) for name in others), None)
        if os.path.islink(self.path) or not os.path.isdir(self.path):
            return self.path
        found = ((path, os.path.relpath(path, self.path)) for path in files_in(self.path))
        return next((path for path, name in found if not _is_of_array(name) or irregular(path)), None)

    def reopen(self) -> None:
        """Do nothing: there is nothing but the folder."""

    def tidy(self) -> None:
        """Remove the files that zarr's store had not moved into place."""
        for path in () if is_address(self.path) else files_in(self.path):
            if path.endswith(_HALF_MADE):
                os.unlink(path)


def _is_of_array(name: str) -> bool:
    """Whether zarr creates a file of this name in the folder of an array."""
    known = name == "zarr.json" or name.startswith("c/") or name.endswith(_HALF_MADE)
    chunk = name.removeprefix("c/").removesuffix(_HALF_MADE).split(".")[0].replace("/", "")
    return known and (chunk.isdigit() or not name.startswith("c/"))


def is_group(path: str) -> bool:
    """Whether a path is a zarr group."""
    try:
        # Format 3 declares it in its metadata, format 2 by a file `.zgroup`.
        found = json.loads(files.read(addresses.joined(path, "zarr.json")))
        return bool(found.get("node_type") == "group")
    except (OSError, ValueError):
        return files.exists(addresses.joined(path, ".zgroup"))
