"""zarr arrays in folders: regions are read, and whole chunks are written, one or more for each of ours.

A chunk is as durable as zarr's local store makes it: it outlives the process, not always the host.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.interfaces import Array, Layout, digest, irregular, missing_extra, numeric
from dask_ferro.stream.formats.stamps import files_in, stamps_of

# What marks a folder as zarr's, in its formats 3 and 2.
MARKS = ("zarr.json", ".zarray", ".zgroup")
# How zarr's local store calls a file that it has not yet moved into place.
_HALF_MADE = ".partial"


def _zarr() -> Any:
    try:
        # Imported on use: it is an extra.
        import zarr
    except ImportError as error:
        raise missing_extra("zarr", error) from error
    return zarr


@dataclass(frozen=True)
class ZarrSource:
    """A zarr array in a folder."""

    tells_content: ClassVar[bool] = True
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

    def fingerprint(self) -> str:
        """Return path, number, size and latest change of its files, and a digest of all these."""
        return f"{self.path}, {stamps_of(files_in(self.path), self.path)}"

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
        return np.ascontiguousarray(_zarr().open_array(self.path, mode="r")[self.start : self.stop])


def open_zarr(path: str, name: str) -> ZarrSource:
    """Return the zarr array at a path; of a group, the array called `name`, or its only one.

    Raises
    ------
    ConfigError
        When there is none, or there are several and none has the name.
    """
    zarr = _zarr()
    try:
        found = zarr.open(path, mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"source {path!r} is not a zarr array or group: {error}") from error
    if isinstance(found, zarr.Group):
        arrays = sorted(key for key, _ in found.arrays())
        if name not in arrays and len(arrays) != 1:
            raise ConfigError(
                f"source {path!r} is a zarr group of {', '.join(arrays) or 'no arrays'}, and none is called"
                f" {name!r} as the model's input; name one: {path.rstrip('/')}/<array>"
            )
        return open_zarr(os.path.join(path, name if name in arrays else arrays[0]), name)
    if not found.shape:
        raise ConfigError(f"source {path!r} holds a single number; wanted rows along axis 0")
    dtype = numeric(np.dtype(found.dtype), f"source {path!r}")
    return ZarrSource(path, tuple(found.shape), dtype, max(1, found.chunks[0]))


@dataclass(frozen=True)
class ZarrSink:
    """A zarr array whose chunks are ours."""

    path: str
    layout: Layout

    def __post_init__(self) -> None:
        _zarr()

    def prepare(self) -> None:
        """Make the array, empty, so that it is there whole or not at all."""
        part = f"{self.path}.tmp"
        shutil.rmtree(part, ignore_errors=True)
        # One chunk of a run is one of zarr's, so no two tasks write one file; zarr takes none of length 0.
        batch = max(1, min(self.layout.chunks.batch, self.layout.chunks.rows))
        chunks = (batch, *(max(1, d) for d in self.layout.row_shape))
        _zarr().create_array(part, shape=self.layout.shape, chunks=chunks, dtype=self.layout.dtype)
        os.rename(part, self.path)

    def fits(self) -> bool:
        """Whether the array has this shape and dtype."""
        try:
            found = _zarr().open_array(self.path, mode="r")
        except (OSError, ValueError, KeyError):
            return False
        return (tuple(found.shape), np.dtype(found.dtype)) == (self.layout.shape, self.layout.dtype)

    def write(self, number: int, rows: Array) -> str:
        """Write a chunk; the array must be there."""
        start, stop = self.layout.chunks.span(number)
        _zarr().open_array(self.path, mode="r+")[start:stop] = rows
        return _digest(rows)

    def digest(self, number: int) -> str | None:
        """Return the digest of the rows of a chunk."""
        try:
            return _digest(ZarrPiece(self.path, *self.layout.chunks.span(number)).read())
        except Exception:  # noqa: BLE001 - what zarr and its codecs raise for damaged files is not listed
            return None

    def foreign(self) -> str | None:
        """Return the first thing in the folder that is no file of the array."""
        if os.path.islink(self.path) or not os.path.isdir(self.path):
            return self.path
        return next((p for p in files_in(self.path) if not self._is_ours(p)), None)

    def reopen(self) -> None:
        """Do nothing: the folder is all there is."""

    def tidy(self) -> None:
        """Remove the files that zarr's store had not moved into place."""
        for path in files_in(self.path):
            if path.endswith(_HALF_MADE):
                os.unlink(path)

    def _is_ours(self, path: str) -> bool:
        name = os.path.relpath(path, self.path)
        known = name == "zarr.json" or name.startswith("c/") or name.endswith(_HALF_MADE)
        chunk = name.removeprefix("c/").removesuffix(_HALF_MADE).split(".")[0].replace("/", "")
        return known and not irregular(path) and (chunk.isdigit() or not name.startswith("c/"))


def _digest(rows: Array) -> str:
    return digest(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)


def is_group(path: str) -> bool:
    """Whether a path is a zarr group."""
    try:
        # zarr's format 3 says it in its metadata, format 2 by a file of that name.
        with open(os.path.join(path, "zarr.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("node_type") == "group")
    except (OSError, ValueError):
        return os.path.isfile(os.path.join(path, ".zgroup"))
