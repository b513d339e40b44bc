"""Formats of sources: arrays, tables and images, each opened by a function and read by the rows of a chunk in a worker.

A source is opened in the client, which reads headers only.  It has `rows`, `grain` (rows of its own chunks, 1
without), `row_seconds` (what reading a row costs), `fingerprint()`, and `pieces(chunks)`: a function from a chunk's
number to what `read` makes rows of, in a worker.  An array has `row_shape` and `dtype` as well,
a table `label`, `schema` and `select(columns)`; `is_cut` tells that a part of its own chunk is read at little cost, and
`is_named` that its fingerprint stays the same when its rows change.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from dask_ferro.errors import ConfigError

Array = np.ndarray[Any, np.dtype[Any]]


# A table and an array: what they have is said above.
TableSource: TypeAlias = Any
RowSource: TypeAlias = Any


def numeric(dtype: np.dtype[Any], what: str) -> np.dtype[Any]:
    """Return a dtype in this machine's byte order; raises `ConfigError` for texts, structures and narrow floats."""
    if dtype.kind in "biufc" and issubclass(dtype.type, (np.number, np.bool_)):
        return dtype.newbyteorder("=")
    raise ConfigError(
        f"{what} has dtype {dtype}, which is not streamed; wanted one of numpy's own number types"
    )


def missing_extra(package: str, error: ImportError) -> ConfigError:
    return ConfigError(f"{package} is not installed ({error}); install it with: pip install 'dask-ferro[io]'")


def rows_of(piece: Any) -> Any:
    """Return the rows of a piece, which may be the rows themselves; a mask, which no sink has, is refused."""
    found = piece.read() if hasattr(piece, "read") else piece
    if isinstance(found, np.ma.MaskedArray):
        raise ConfigError(
            "its rows are a masked array, and models have no masks: fill it with .filled(value)"
        )
    return found
