"""Arrays as sources: of numpy and Dask, in `.npy` files and in zarr.

The chunks of a dask array are computed a few at a time and released after the model has run on them, so the array may
be larger than the cluster's memory.  A value on which several of its chunks depend is computed again for each, unless
it is persisted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, Self

import numpy as np
from dask.base import tokenize
from dask.delayed import Delayed
from dask.optimization import cull
from numpy.lib import format as npy_format

from dask_ferro.errors import InputError
from dask_ferro.lower.preparation.remote import is_address, mask
from dask_ferro.stream import files
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.files import Stamp, check_unchanged
from dask_ferro.stream.formats import Array, Source, check_numeric, zarr

# Files that mark a folder as zarr's, in its formats 3 and 2.
ZARR_MARKS = ("zarr.json", ".zarray", ".zgroup")
_HEADERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
# What xarray and netCDF write beside packed values, which zarr alone does not unpack.
_PACKING_ATTRIBUTES = ("scale_factor", "add_offset", "_FillValue", "missing_value")


@dataclass(frozen=True)
class MemorySource(Source):
    """An array of numpy, or a mapping of a file, in this process."""

    array: Any
    grain: int = 1

    @property
    def rows(self) -> int:
        return int(self.array.shape[0])

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.array.shape[1:]))

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.array.dtype).newbyteorder("=")

    def fingerprint(self) -> str:
        return f"array {tokenize(self.array)}"

    def part(self, start: int, stop: int) -> Any:
        return np.ascontiguousarray(self.array[start:stop], self.dtype)


@dataclass(frozen=True)
class DaskSource(MemorySource):
    """A dask array of known size, which its name identifies; a digest of its rows is recorded with each chunk."""

    is_cut: ClassVar[bool] = False
    is_named: ClassVar[bool] = True

    def fingerprint(self) -> str:
        return f"dask array {self.array.name}"

    def pieces(self, chunks: Chunks) -> Callable[[int], Any]:
        # A task reads whole rows, so the other axes are one chunk.
        whole_rows = dict.fromkeys(range(1, self.array.ndim), -1)
        rows = self.array.rechunk({0: chunks.batch, **whole_rows}).astype(self.dtype)
        blocks = rows.to_delayed().reshape(-1)
        # Blocks share one graph: 10,000 copies of it would be 10,000 times 10,000 tasks.
        graph = dict(blocks[0].__dask_graph__())

        def piece(number: int) -> Delayed:
            key = blocks[number].key
            return Delayed(key, cull(graph, [key])[0])  # type: ignore[no-untyped-call]

        return piece


def open_array(array: Any, what: str) -> MemorySource:
    if isinstance(array, np.ma.MaskedArray):
        raise InputError(f"{what} is a masked array, and models have no masks: fill it with .filled(value)")
    if not array.ndim:
        raise InputError(f"{what} is a single number; wanted rows along axis 0")
    # Dask's unknown sizes are NaN, which differs from itself.
    if any(size != size for size in array.shape):
        raise InputError(f"{what} has chunks of unknown size; call .compute_chunk_sizes() on it first")
    check_numeric(np.dtype(array.dtype), what)
    if isinstance(array, np.ndarray):
        return MemorySource(array)
    return DaskSource(array, int(max(1, *array.chunks[0])))


# ---- .npy ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StoredSource(Source):
    """Rows from `start` on of an array that workers read from where it is stored."""

    path: str
    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int = field(default=0, kw_only=True)

    def part(self, start: int, stop: int) -> Self:
        return replace(self, rows=stop - start, start=start)


@dataclass(frozen=True)
class NpySource(_StoredSource):
    """An array in a `.npy` file; its data begins at `offset`, with values of the dtype `stored`."""

    grain: ClassVar[int] = 1
    offset: int
    stored: np.dtype[Any]
    opened: Stamp

    def fingerprint(self) -> str:
        return f"{mask(self.path)}, {files.stamp(self.path)}"

    def read(self) -> Array:
        """Return the rows; raises `OSError` when the file changed since it was opened."""
        values = prod(self.row_shape)
        first, number = self.offset + self.start * values * self.stored.itemsize, self.rows * values
        if is_address(self.path):
            content = files.read(self.path, first, first + number * self.stored.itemsize, self.opened.size)
            flat = np.frombuffer(content, self.stored)
        else:
            # Not by a mapping: a truncated file is an `OSError` then, and no bus error that kills the worker.
            flat = np.fromfile(self.path, self.stored, number, offset=first)
        if flat.size < number:
            raise OSError(
                f"{self.path!r} ends before row {self.start + self.rows}: it was truncated after the run began"
            )
        # After the read, so that a change during it is noticed too.
        check_unchanged(self.path, self.opened)
        # A copy where it is of another byte order, or the bytes of an object, to which numpy does not write.
        rows = flat.reshape(self.rows, *self.row_shape).astype(self.dtype, copy=False)
        return rows if rows.flags.writeable else rows.copy()


def open_npy(path: str) -> NpySource:
    try:
        with files.open_file(path) as file:
            opened = files.stamp(path)
            version = npy_format.read_magic(file)
            if version not in _HEADERS:
                raise ValueError(f"format version {version}, wanted (1, 0) or (2, 0)")
            shape, fortran, dtype = _HEADERS[version](file)
            offset = file.tell()
    except (ValueError, EOFError) as error:
        raise InputError(f"source {path!r} is not a .npy file: {error}") from error
    plain = check_numeric(dtype, f"source {path!r}")
    if not shape:
        raise InputError(f"source {path!r} holds a single number; wanted rows along axis 0")
    if opened.size < (whole := offset + prod(shape) * dtype.itemsize):
        raise InputError(
            f"source {path!r} is truncated: {opened.size} bytes, wanted {whole} for shape {shape}"
        )
    # With one axis both orders are the same.
    if fortran and len(shape) > 1:
        raise InputError(
            f"source {path!r} is in Fortran's order, in which a row is scattered over the file: write it in C's order,"
            " numpy.save(path, numpy.ascontiguousarray(x))"
        )
    return NpySource(path, shape[0], shape[1:], plain, offset, dtype, opened)


# ---- zarr ---------------------------------------------------------------------------------------------------


def zarr_store(path: str, read_only: bool = True) -> Any:
    return _object_store(path, read_only) if is_address(path) else path


# Kept, since a store opens connections of its own; a run has a source and a part for each output.
@lru_cache(maxsize=16)
def _object_store(address: str, read_only: bool) -> Any:
    from zarr.storage import FsspecStore

    return FsspecStore.from_url(address, read_only=read_only)


@dataclass(frozen=True)
class ZarrSource(_StoredSource):
    """An array of zarr, of which `grain` rows are a chunk."""

    is_cut: ClassVar[bool] = False
    grain: int

    @property
    def is_named(self) -> bool:
        """Whether its files cannot be listed, as those of a web server."""
        return files.is_web(self.path)

    def fingerprint(self) -> str:
        there: Any = f"{self.dtype}{[self.rows, *self.row_shape]}"
        if not self.is_named:
            names = files.find(self.path)
            there = files.summary(files.stamps([files.join(self.path, name) for name in names]))
        return f"{mask(self.path)}, {there}"

    def read(self) -> Array:
        with files.errors_of(self.path):
            rows = zarr.open_array(zarr_store(self.path), mode="r")[self.start : self.start + self.rows]
        return np.ascontiguousarray(rows, self.dtype)


def open_zarr(path: str, name: str) -> ZarrSource:
    """Return the zarr array at a path; in a group, the array `name`, or its only array."""
    try:
        with files.errors_of(path):
            found = zarr.open(zarr_store(path), mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"source {path!r} is not a zarr array or group: {error}") from error
    if isinstance(found, zarr.Group):
        # A web server need not list them, so that the name is tried.
        arrays = [name] if files.is_web(path) else sorted(key for key, _ in found.arrays())
        if name not in arrays and len(arrays) != 1:
            raise InputError(
                f"source {path!r} is a zarr group of {', '.join(arrays) or 'no arrays'}, and none has the name"
                f" {name!r} of the model's input; name one: {path.rstrip('/')}/<array>"
            )
        return open_zarr(files.join(path, name if name in arrays else arrays[0]), name)
    if not found.shape:
        raise InputError(f"source {path!r} holds a single number; wanted rows along axis 0")
    _refuse_packed(path, found.attrs.asdict())
    dtype = check_numeric(np.dtype(found.dtype), f"source {path!r}")
    return ZarrSource(path, found.shape[0], tuple(found.shape[1:]), dtype, max(1, found.chunks[0]))


def _refuse_packed(path: str, attributes: Mapping[str, Any]) -> None:
    """Raise `InputError` for values that xarray unpacks or masks as it reads them, and zarr does not."""
    # xarray writes NaN as the fill value of floats; some encode it in base64 ("AAAAAAAA+H8=" and "AADAfw==").
    plain = ("NaN", "AAAAAAAA+H8=", "AADAfw==")
    values = {name: attributes[name] for name in _PACKING_ATTRIBUTES if name in attributes}
    # NaN itself differs from itself.
    packed = [name for name, value in values.items() if value == value and value not in plain]
    if packed:
        raise InputError(
            f"source {path!r} has {', '.join(packed)}, by which xarray unpacks or masks its values and zarr does not:"
            " pass xarray.open_zarr(...)[name].data, a dask array"
        )
