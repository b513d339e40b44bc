"""Reading and writing of .npy and .npz files, without running code in a file, and without partial writes."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dask_ferro.errors import InputError


def read(path: Path) -> Any:
    """Return the array of an .npy file, memory-mapped, or the arrays of an .npz file by name.

    Raises
    ------
    InputError
        For a file that is neither, or that contains Python objects.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"input {str(path)!r} is not a readable {path.suffix} file: {error}") from error


def check_writable(path: Path) -> None:
    """Raise `InputError` if `path` cannot be written, before anything runs for it."""
    part = _part(path)
    try:
        part.touch()
        part.unlink()
    except OSError as error:
        raise _write_error(path, error) from error


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _write_error(path: Path, error: OSError) -> InputError:
    return InputError(f"output {str(path)!r} cannot be written: {error.strerror or error}")


def save(path: Path, results: Mapping[str, object]) -> None:
    """Write arrays to an .npy or .npz file, completely or not at all.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
    part = _part(path)
    try:
        with part.open("wb") as file:
            if path.suffix == ".npy":
                np.save(file, _storable(next(iter(results.values()))), allow_pickle=False)
            else:
                _write_npz(file, results)
        # Concurrent readers see either the previous file or the complete new one.
        os.replace(part, path)
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        part.unlink(missing_ok=True)


def _write_npz(file: Any, results: Mapping[str, Any]) -> None:
    # numpy.savez takes names as keywords, so an output called "file" would be lost.
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in results.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _storable(value), allow_pickle=False)


def _storable(value: object) -> Any:
    array = np.asarray(value)
    return array.astype(np.str_) if array.dtype.kind == "O" else array
