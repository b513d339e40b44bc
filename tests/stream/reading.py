"""Outputs as arrays, read by the format's own package, and the parts of those that are not complete."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import zarr


def read(path: str | Path) -> np.ndarray:
    """Return the rows of an output."""
    if str(path).endswith(".zarr"):
        return np.asarray(zarr.open_array(str(path), mode="r")[:])
    if str(path).endswith(".parquet"):
        return np.asarray(pq.read_table(path).to_pandas())
    return np.asarray(np.load(path))


def done_in(journal: str | Path) -> list[int]:
    """Return the chunks whose parts of the first output are there, by the folder of a record."""
    return [number for folder in Path(journal).glob("parts-*/0") for number in done_at(folder)]


def done_at(folder: Path) -> list[int]:
    """Return the chunks whose parts are in a folder."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    found = (re.fullmatch(r"part-(\d+)\.\w+|c/(\d+)(?:/\d+)*", name) for name in names)
    return sorted(int(match[1] or match[2]) for match in found if match)
