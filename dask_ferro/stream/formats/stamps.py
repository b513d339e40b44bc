"""Stamps of files: size and time of the last change, which differ when a file may have changed.

A change that keeps both is not detected: one through a mapping shortly after another change, or one whose time was
reset.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import xxhash


class Stamp(NamedTuple):
    """Size in bytes, and time of the last change in nanoseconds."""

    size: int
    changed: int

    def __str__(self) -> str:
        return f"{self.size} bytes, changed at {self.changed} ns"


def stamp_of(path: str | int) -> Stamp:
    """Return the stamp of a file, given by its path or an open handle."""
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns)


def check_unchanged(path: str, opened: Stamp) -> None:
    """Raise `OSError` when a file's stamp differs from an earlier stamp."""
    if (now := stamp_of(path)) != opened:
        raise OSError(f"{path!r} changed while it was read: it had {opened}, and has {now}")


def stamps_of(paths: Iterable[str], under: str) -> str:
    """Return number, size and latest change of files, and a digest of their paths below `under` and their stamps."""
    found = {path: stamp for path in sorted(paths) if (stamp := _stamp_if_there(path)) is not None}
    size = sum(stamp.size for stamp in found.values())
    latest = max((stamp.changed for stamp in found.values()), default=0)
    each = "\n".join(f"{os.path.relpath(path, under)}: {stamp}" for path, stamp in found.items())
    return f"{len(found)} files, {size} bytes, changed at {latest} ns, digest {xxhash.xxh3_64_hexdigest(each.encode())}"


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
    if os.path.isdir(path) and not os.path.islink(path):
        return stamps_of(files_in(path), path)
    return str(stamp_of(path))
