"""zarr arrays in folders: regions are read, and whole chunks are written, one or more for each of ours.

A chunk is as durable as zarr's local store makes it: it outlives the process, not always the host.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats import Array, Layout, missing_extra, numeric

# What marks a folder as zarr's, in its formats 3 and 2.
MARKS = ("zarr.json", ".zarray", ".zgroup")


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise missing_extra("zarr", error) from error
    return zarr


@dataclass(frozen=True)
class ZarrSource:
    """A zarr array in a folder."""

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
        """Return path, number, size and latest change of its files."""
        found = [entry for folder, _, names in os.walk(self.path) for entry in _statuses(folder, names)]
        size = sum(s.st_size for s in found)
        latest = max((s.st_mtime_ns for s in found), default=0)
        return f"{self.path}, {len(found)} files, {size} bytes, changed at {latest} ns"

    def pieces(self, chunks: Chunks) -> Callable[[int], ZarrPiece]:
        """Return the regions by chunk number."""
        return lambda number: ZarrPiece(self.path, *chunks.span(number))


def _statuses(folder: str, names: list[str]) -> list[os.stat_result]:
    return [os.stat(os.path.join(folder, name)) for name in names]


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
        part = f"{self.path}.part"
        shutil.rmtree(part, ignore_errors=True)
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

    def write(self, number: int, rows: Array) -> None:
        """Write a chunk."""
        start, stop = self.layout.chunks.span(number)
        _zarr().open_array(self.path, mode="r+")[start:stop] = rows


def remove_zarr(path: str) -> None:
    """Remove a zarr array or group.

    Raises
    ------
    ConfigError
        When something else has its name.
    """
    if not any(os.path.isfile(os.path.join(path, mark)) for mark in MARKS):
        raise ConfigError(f"sink {path!r} is no zarr array to overwrite; remove it yourself")
    shutil.rmtree(path)


def is_group(path: str) -> bool:
    """Whether a path is a zarr group."""
    try:
        with open(os.path.join(path, "zarr.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("node_type") == "group")
    except (OSError, ValueError):
        return os.path.isfile(os.path.join(path, ".zgroup"))
