"""Checkpoints are found, and read: a damaged one is an error that says what to remove, and is never passed over."""

from __future__ import annotations

import os
from contextlib import ExitStack
from hashlib import file_digest
from pathlib import Path
from typing import Any

# Its dtypes, such as bfloat16, have names in numpy then.
import ml_dtypes  # noqa: F401
import numpy as np
from safetensors import safe_open
from xxhash import xxh3_64

from dask_ferro.errors import ConfigError
from dask_ferro.train.saved.manifest import Manifest

MANIFEST = "manifest.json"


def found_in(folder: str) -> list[str]:
    """Return the paths of a folder's checkpoints, the newest first."""
    names = sorted((name for name in os.listdir(folder) if name.startswith("step-")), reverse=True)
    return [os.path.join(folder, name) for name in names]


def checksum(path: str) -> str:
    """Return the checksum of a file; safetensors have none."""
    with open(path, "rb") as file:
        return file_digest(file, xxh3_64).hexdigest()


def read_manifest(path: str) -> Manifest:
    """Return the manifest of a checkpoint; raises `ConfigError` if it cannot be read."""
    try:
        return Manifest.from_bytes(Path(path, MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(path, MANIFEST, error) from error


def read_arrays(path: str, manifest: Manifest) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a checkpoint, whole; raises `ConfigError` for a damaged file."""
    arrays = {name: np.empty(saved["shape"], saved["dtype"]) for name, saved in manifest.arrays.items()}
    with ExitStack() as stack:
        files = {}
        for name, check in manifest.files.items():
            file = os.path.join(path, name)
            try:
                if checksum(file) != check:
                    raise ValueError("its checksum is wrong")
            except (OSError, ValueError) as error:
                raise _damaged(path, name, error) from error
            files[name] = stack.enter_context(safe_open(file, "numpy"))
        for name, saved in manifest.arrays.items():
            for part in saved["parts"]:
                box = tuple(map(slice, part["start"], part["stop"]))
                arrays[name][box] = files[part["file"]].get_tensor(part["key"])
    return arrays


def _damaged(path: str, file: str, why: Exception) -> ConfigError:
    earlier = [other for other in found_in(os.path.dirname(path)) if other < path]
    then = f"to go on from {os.path.basename(earlier[0])}" if earlier else "to begin again"
    return ConfigError(f"fit: checkpoint {path!r}: {file}: {why}; remove this checkpoint {then}")
