"""Sources of batches: every one gives the batches of an epoch from any position on.

arrays, dask arrays, parquet   rows in an order by seed, cut into batches (`rows`)
lists, loaders, functions      batches as they come; those of a list in an order by seed (`stream`)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from dask_ferro.errors import ConfigError
from dask_ferro.train.data.order import is_whole
from dask_ferro.train.data.rows import RowBatches, of_arrays, of_parquet
from dask_ferro.train.data.stream import Stream

Source: TypeAlias = RowBatches | Stream


def source_of(
    batches: Any, size: int | None, seed: int | None, *, keeps_last: bool = True, names: Sequence[str] = ()
) -> Source:
    """Return the source of a training's batches, as `ff.fit` takes them; `names` are the columns to read from files."""
    if seed is not None and not 0 <= seed < 2**64:
        raise ConfigError(
            f"fit: seed: got {seed}, wanted a number from 0 to below 2^64, or None for no shuffling"
        )
    if isinstance(batches, (str, os.PathLike)):
        return RowBatches(of_parquet(os.fspath(batches), names), _checked_size(size), seed, keeps_last)
    columns = batches.values() if isinstance(batches, Mapping) else batches
    alone = hasattr(batches, "dtype") and hasattr(batches, "shape")
    if alone or (isinstance(batches, (Mapping, tuple)) and columns and all(map(_has_rows, columns))):
        return RowBatches(of_arrays(batches), _checked_size(size), seed, keeps_last)
    if not isinstance(batches, Iterable) and not callable(batches):
        raise ConfigError(
            f"fit: batches: got {type(batches).__name__}, wanted arrays with batch_size=, the path of parquet files, an"
            " iterable of batches, or a function from an epoch's number to one"
        )
    if size is not None or not keeps_last:
        raise ConfigError(
            "fit: batch_size and last are for arrays and files, and an iterable of batches was given; leave them out"
        )
    return Stream(batches, seed)


def _has_rows(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and len(value.shape) > 0


def _checked_size(size: int | None) -> int:
    if size is None or not is_whole(size, 1):
        raise ConfigError(f"fit: batch_size: got {size!r}, wanted the rows of a batch, from 1 on")
    return int(size)
