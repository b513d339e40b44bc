"""Stamps of files: size and time of the last change, which differ when a file may have changed.

A change that keeps both is not detected: one through a mapping shortly after another change, or one whose time was
reset.  An object at an address has its server's mark of the content in place of the time: an ETag where there is one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import xxhash

from dask_ferro.lower.prepared.remote import is_address
from dask_ferro.stream.stores.addresses import StoredObject, entry, is_web, names_in, objects_below


class Stamp(NamedTuple):
    """Size in bytes, and time of the last change in nanoseconds, or a server's mark of the content."""

    size: int
    changed: int
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.size} bytes, {self.mark or f'changed at {self.changed} ns'}"


def stamp_of(path: str | int) -> Stamp:
    """Return the stamp of a file, given by its path, its address or an open handle."""
    if isinstance(path, str) and is_address(path):
        return _stamp(entry(path))
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns)


def _stamp(found: StoredObject) -> Stamp:
    return Stamp(found.size, 0, found.mark or "a server that tells no more")


def stamps_below(folder: str) -> dict[str, Stamp]:
    """Return the stamps of all objects below an address, by their relative names, from one listing."""
    return {name: _stamp(found) for name, found in objects_below(folder).items()}


def check_unchanged(path: str, opened: Stamp) -> None:
    """Raise `OSError` when a file's stamp differs from an earlier stamp."""
    if (now := stamp_of(path)) != opened:
        raise OSError(f"{path!r} changed while it was read: it had {opened}, and has {now}")


def stamps_of(paths: Iterable[str], under: str) -> str:
    """Return number, size and latest change of files, and a digest of their paths below `under` and their stamps."""
    found = {path: stamp for path, stamp in stamps_by_path(sorted(paths)).items() if stamp is not None}
    return summary({os.path.relpath(path, under): stamp for path, stamp in found.items()})


def summary(found: Mapping[str, Stamp]) -> str:
    """Return number, size and latest change of files, and a digest of their names and stamps."""
    size = sum(stamp.size for stamp in found.values())
    latest = max((stamp.changed for stamp in found.values()), default=0)
    each = "\n".join(f"{name}: {stamp}" for name, stamp in found.items())
    return f"{len(found)} files, {size} bytes, changed at {latest} ns, digest {xxhash.xxh3_64_hexdigest(each.encode())}"


def stamps_by_path(paths: Sequence[str]) -> dict[str, Stamp | None]:
    """Return the stamps of files by their paths, None for one that is not there.

    Several objects of a folder are read from its listing, since a request for each of many would take long.
    """
    if len(paths) > 1 and is_address(paths[0]) and not is_web(paths[0]):
        folders = {path: path.rpartition("/")[::2] for path in paths}
        listed = {folder: names_in(folder) for folder in dict(folders.values())}
        found = {path: listed[folder].get(name) for path, (folder, name) in folders.items()}
        return {path: None if there is None else _stamp(there) for path, there in found.items()}
    return {path: _stamp_if_there(path) for path in paths}


def stamps(paths: Sequence[str]) -> tuple[Stamp, ...]:
    """Return the stamps of files that are there."""
    found = stamps_by_path(paths)
    return tuple(stamp if stamp is not None else stamp_of(path) for path, stamp in found.items())


def _stamp_if_there(path: str) -> Stamp | None:
    try:
        return stamp_of(path)
    except FileNotFoundError:
        # The file was removed after its folder was listed.
        return None


def files_in(folder: str) -> list[str]:
    """Return the paths of all files in a folder, recursively; a link to a folder counts as a file."""
    found = []
    for above, folders, names in os.walk(folder):
        links = [n for n in folders if os.path.islink(os.path.join(above, n))]
        found += [os.path.join(above, n) for n in sorted(names + links)]
    return found


def what_lies(path: str) -> str:
    """Return a text that changes when the file or the folder at a path may have changed.

    It stays the same when the file or folder is moved.
    """
    if is_address(path):
        return summary(stamps_below(path))
    if os.path.isdir(path) and not os.path.islink(path):
        return stamps_of(files_in(path), path)
    return str(stamp_of(path))
