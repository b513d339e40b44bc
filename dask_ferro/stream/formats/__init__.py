"""Formats of sources: arrays, tables and images, each opened by a function and read by the rows of a chunk in a worker.

A source is opened in the client, which reads headers only.  It has `rows`, `grain` (rows of its own chunks, 1
without), `row_seconds` (what reading a row costs), `fingerprint()`, and `part(start, stop)`: these rows, or what `read`
makes them of in a worker.  An array has `row_shape` and `dtype` as well, a table `label`, `schema` and
`select(columns)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from dask.delayed import Delayed

from dask_ferro.errors import InputError, missing_extra
from dask_ferro.stream.chunks import Chunks

Array = np.ndarray[Any, np.dtype[Any]]


class Source:
    """What all sources have in common; see above.

    `is_cut` tells that a part of its own chunk is read at little cost, and `is_named` that its fingerprint stays the
    same when its rows change.
    """

    is_cut: ClassVar[bool] = True

    @property
    def is_named(self) -> bool:
        return False

    @property
    def row_seconds(self) -> float:
        return 0.0

    def part(self, start: int, stop: int) -> Any:
        """Return some rows, or what `read` makes them of."""
        raise NotImplementedError

    def pieces(self, chunks: Chunks) -> Callable[[int], Any]:
        """Return what gives the rows of a chunk by its number."""
        return lambda number: self.part(*chunks.span(number))


def check_numeric(dtype: np.dtype[Any], what: str) -> np.dtype[Any]:
    """Return a dtype in this machine's byte order; raises `InputError` for texts, structures and narrow floats."""
    if dtype.kind in "biufc" and issubclass(dtype.type, (np.number, np.bool_)):
        return dtype.newbyteorder("=")
    raise InputError(
        f"{what} has dtype {dtype}, which is not streamed; wanted one of numpy's own number types"
    )


class OptionalModule:
    """A package of the extra `io`, imported where it is used; `InputError` where it is not installed."""

    def __init__(self, use: str, package: str, *modules: str, by: str = "") -> None:
        self._use, self._package, self._modules, self._by = use, package, modules, by or package

    def __getattr__(self, name: str) -> Any:
        module = sys.modules.get(self._package)
        return getattr(module if hasattr(module, name) else self.load(), name)

    def load(self) -> ModuleType:
        """Return the package, with its modules that are used."""
        try:
            for module in self._modules:
                import_module(f"{self._package}.{module}")
            return import_module(self._package)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != self._package:
                raise
            raise missing_extra(self._use, self._by, "io") from None


pa: Any = OptionalModule("reading and writing tables", "pyarrow", "compute", "csv", "dataset", "parquet")
zarr: Any = OptionalModule("reading and writing zarr", "zarr")
pillow: Any = OptionalModule("reading images", "PIL", "Image", "ImageOps", by="Pillow")


def rows_of(piece: Any) -> Any:
    """Return the rows of a piece, which may be the rows themselves; a mask, which no sink has, is refused."""
    if isinstance(piece, Delayed):
        # The caller is a thread of a pool already, and a second pool would share its cores.
        piece = piece.compute(scheduler="synchronous")  # type: ignore[no-untyped-call]
    rows = piece.read() if hasattr(piece, "read") else piece
    if isinstance(rows, np.ma.MaskedArray):
        raise InputError("its rows are a masked array, and models have no masks: fill it with .filled(value)")
    return rows
