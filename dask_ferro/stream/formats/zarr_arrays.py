"""zarr arrays in folders: regions are read, and whole zarr chunks are written, one or more per chunk of a run.

A chunk is as durable as zarr's local store makes it: it survives the process, but not always a crash of the host.
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
from dask_ferro.stream.formats.interfaces import Array, Layout, irregular, missing_extra, numeric, row_digest
from dask_ferro.stream.formats.stamps import files_in, stamps_of

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
        """Return path, number, size and latest change of its files, and a digest of their stamps."""
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
    """Return the zarr array at a path; in a group, the array `name`, or its only array.

    Raises
    ------
    ConfigError
        There is no array, or there are several and none has the name.
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
                f"source {path!r} is a zarr group of {', '.join(arrays) or 'no arrays'}, and none has the name"
                f" {name!r} of the model's input; name one: {path.rstrip('/')}/<array>"
            )
        return open_zarr(os.path.join(path, name if name in arrays else arrays[0]), name)
    if not found.shape:
        raise ConfigError(f"source {path!r} holds a single number; wanted rows along axis 0")
    dtype = numeric(np.dtype(found.dtype), f"source {path!r}")
    return ZarrSource(path, tuple(found.shape), dtype, max(1, found.chunks[0]))


@dataclass(frozen=True)
class ZarrSink:
    """A zarr array with the chunks of a run."""

    path: str
    layout: Layout

    def __post_init__(self) -> None:
        _zarr()

    def prepare(self) -> None:
        """Create the array, empty; it appears complete or not at all."""
        part = f"{self.path}.tmp"
        shutil.rmtree(part, ignore_errors=True)
        # A chunk of a run has zarr chunks of its own, so no two tasks write one file; zarr has no chunks of length 0.
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
        """Write a chunk; the array must exist."""
        start, stop = self.layout.chunks.span(number)
        _zarr().open_array(self.path, mode="r+")[start:stop] = rows
        return row_digest(rows)

    def digest(self, number: int) -> str | None:
        """Return the digest of the rows of a chunk."""
        try:
            return row_digest(ZarrPiece(self.path, *self.layout.chunks.span(number)).read())
        except Exception:  # noqa: BLE001 - zarr and its codecs do not list their errors for damaged files
            return None

    def foreign(self) -> str | None:
        """Return the first path in the folder that is not a file of the array."""
        if os.path.islink(self.path) or not os.path.isdir(self.path):
            return self.path
        return next((p for p in files_in(self.path) if not self._is_ours(p)), None)

    def reopen(self) -> None:
        """Do nothing: there is nothing but the folder."""

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


def is_group(path: str) -> bool:
    """Whether a path is a zarr group."""
    try:
        # Format 3 declares it in its metadata, format 2 by a file `.zgroup`.
        with open(os.path.join(path, "zarr.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("node_type") == "group")
    except (OSError, ValueError):
        return os.path.isfile(os.path.join(path, ".zgroup"))
