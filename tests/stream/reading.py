"""Outputs as arrays, whatever their format, read by the format's own package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import zarr


def read(path: str | Path) -> np.ndarray:
    """Return the rows of an output."""
    if str(path).endswith(".zarr"):
        return np.asarray(zarr.open_array(str(path), mode="r")[:])
    if str(path).endswith(".parquet"):
        table = pq.read_table(path)
        (name,) = table.column_names
        return np.stack(table.to_pandas()[name].to_list())
    return np.asarray(np.load(path))
