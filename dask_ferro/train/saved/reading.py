"""Checkpoints are found, and read: a damaged one is an error that says what to remove, and is never passed over."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import xxhash

from dask_ferro.errors import ConfigError
from dask_ferro.train.saved.manifest import Manifest, SavedArray, dtype_named

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{12})")


def found_in(folder: str) -> list[str]:
    """Return the paths of a folder's checkpoints, the newest first."""
    if not os.path.isdir(folder):
        return []
    names = sorted((name for name in os.listdir(folder) if _NAME.fullmatch(name)), reverse=True)
    return [os.path.join(folder, name) for name in names]


def read_manifest(path: str) -> Manifest:
    """Return the manifest of a checkpoint; raises `ConfigError` if it cannot be read."""
    try:
        with open(os.path.join(path, MANIFEST), "rb") as file:
            return Manifest.from_bytes(file.read())
    except (OSError, ValueError) as error:
        raise _damaged(path, MANIFEST, str(error)) from error


def read_arrays(path: str, manifest: Manifest) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a checkpoint, whole; raises `ConfigError` for a damaged file, or values not finite."""
    arrays = {name: _read(path, saved) for name, saved in manifest.arrays.items()}
    if wrong := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise _damaged(
            path, wrong[0], f"{len(wrong)} of {len(arrays)} arrays have values that are not finite"
        )
    return arrays


def _read(path: str, saved: SavedArray) -> np.ndarray[Any, Any]:
    whole = np.empty(saved.shape, dtype_named(saved.dtype))
    for part in saved.parts:
        box = tuple(map(slice, part.start, part.stop))
        size = whole[box].nbytes
        try:
            with open(os.path.join(path, part.file), "rb") as file:
                file.seek(part.offset)
                content = file.read(size)
        except OSError as error:
            raise _damaged(path, part.file, str(error)) from error
        if len(content) < size:
            raise _damaged(
                path, part.file, f"it ends at byte {part.offset + len(content)}, wanted {part.offset + size}"
            )
        if xxhash.xxh3_64_hexdigest(content) != part.check:
            raise _damaged(
                path, part.file, f"the checksum of bytes {part.offset} to {part.offset + size - 1} is wrong"
            )
        whole[box] = np.frombuffer(content, whole.dtype).reshape(whole[box].shape)
    return whole


def _damaged(path: str, file: str, why: str) -> ConfigError:
    earlier = [other for other in found_in(os.path.dirname(path)) if other < path]
    then = f"to go on from {os.path.basename(earlier[0])}" if earlier else "to begin again"
    return ConfigError(f"fit: checkpoint {path!r}: {file}: {why}; remove this checkpoint {then}")
