"""Reading and writing by path: of files of this host's file systems, and of objects at addresses.

A file that is put is on the disk when `put` returns, and appears whole, as an object does.
"""

from __future__ import annotations

import glob
import io
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO

from dask_ferro.lines import put as put_file
from dask_ferro.lower.prepared.remote import is_address
from dask_ferro.stream.stores import addresses

# Objects are read for their header in blocks of this size.
_BLOCK = 1 << 16


def resolved(path: str) -> str:
    """Return the real, absolute path of a path; an address as it is, without a slash at its end."""
    return addresses.address_of(path.rstrip("/")) if is_address(path) else os.path.realpath(path)


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern of names, and not one of a file."""
    return "*" in path and (is_address(path) or not os.path.exists(path))


def folder_of(pattern: str) -> str:
    """Return the folder that a pattern is in: what is before its first star, up to a slash."""
    folder, slash, _ = pattern[: pattern.index("*")].rpartition("/")
    return folder or slash or "."


def exists(path: str) -> bool:
    """Return whether a file, a folder or an object is there, or an object below an address."""
    return addresses.exists(path) if is_address(path) else os.path.lexists(path)


def reaches(path: str) -> bool:
    """Return whether this process sees what a path, or a link, leads to."""
    return addresses.exists(path) if is_address(path) else os.path.exists(path)


def is_folder(path: str) -> bool:
    """Return whether a path is a folder; a web server has none, since it need not list them."""
    if addresses.is_web(path):
        return False
    if is_address(path):
        try:
            return addresses.entry(path).is_folder
        except FileNotFoundError:
            return False
    return os.path.isdir(path)


def names_in(folder: str) -> list[str]:
    """Return the names in a folder."""
    return list(addresses.names_in(folder)) if is_address(folder) else os.listdir(folder)


def names_beginning(folder: str, prefix: str) -> list[str]:
    """Return the names in a folder that begin with a prefix."""
    if is_address(folder):
        return addresses.names_beginning(folder, prefix)
    return [name for name in os.listdir(folder) if name.startswith(prefix)]


def folders_in(folder: str) -> list[str]:
    """Return the names of the folders in a folder."""
    if is_address(folder):
        return [name for name, found in addresses.names_in(folder).items() if found.is_folder]
    return [name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name))]


def matching(pattern: str) -> list[str]:
    """Return the absolute paths that a pattern matches."""
    if is_address(pattern):
        return addresses.matching(pattern)
    return [os.path.abspath(path) for path in glob.glob(pattern, recursive=True)]


def opened(path: str) -> BinaryIO:
    """Return a file that is open for reading."""
    if is_address(path):
        return io.BufferedReader(addresses.ObjectFile(path), _BLOCK)
    return open(path, "rb")


def readable(path: str) -> AbstractContextManager[Any]:
    """Return what pyarrow reads a file from, in a `with`: its path, or an object as a file."""
    return addresses.ObjectFile(path) if is_address(path) else nullcontext(path)


def read(path: str, start: int = 0, stop: int | None = None) -> bytes:
    """Return the bytes of a file, or a range of them."""
    if is_address(path):
        size = addresses.entry(path).size if addresses.is_web(path) else None
        return addresses.read(path, start, stop, size)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read() if stop is None else file.read(stop - start)


def read_all(paths: Sequence[str]) -> list[bytes]:
    """Return the content of some files of one folder; b"" for one that was removed meanwhile."""
    if paths and is_address(paths[0]):
        return addresses.read_all(paths)
    return [_read_if_there(path) for path in paths]


def _read_if_there(path: str) -> bytes:
    try:
        return read(path)
    except FileNotFoundError:
        return b""


def put(path: str, content: Any) -> None:
    """Write a file in place of one that is there."""
    if is_address(path):
        addresses.put(path, content)
    else:
        put_file(path, content)


def make_folder(path: str) -> None:
    """Create a folder, if there is none; at an address there is nothing to create."""
    if not is_address(path):
        os.makedirs(path, exist_ok=True)


def move(path: str, to: str) -> None:
    """Rename a file or a folder; objects are copied, and removed when all of them are there."""
    if not is_address(path):
        os.rename(path, to)
        return
    names = list(addresses.objects_below(path))
    old = [addresses.joined(path, name) for name in names] or [path]
    addresses.copy(old, [addresses.joined(to, name) for name in names] or [to])
    addresses.remove(old)


def remove_files(paths: Sequence[str]) -> None:
    """Remove files or objects that are there; objects by as few requests as the store allows."""
    if paths and is_address(paths[0]):
        addresses.remove(paths)
        return
    for path in paths:
        os.unlink(path)


def remove(path: str) -> None:
    """Remove a file or a folder, or the objects at and below an address, if there are any."""
    if is_address(path):
        below = [addresses.joined(path, name) for name in addresses.objects_below(path)]
        addresses.remove(below or ([path] if addresses.exists(path) else []))
    elif os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
