"""Stamps of files: size and time of the last change, which differ when a file may have changed.

A change that keeps both is not seen: one through a mapping that was changed shortly before, or one whose time was set
back.
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
    """Raise `OSError` when a file's stamp differs from an earlier one."""
    if (now := stamp_of(path)) != opened:
        raise OSError(f"{path!r} changed while it was read: it had {opened}, and has {now}")


def stamps_of(paths: Iterable[str], under: str) -> str:
    """Return number, size and latest change of files, and a digest of each one's path below `under` and stamp."""
    found = {path: stamp for path in sorted(paths) if (stamp := _stamp_if_there(path)) is not None}
    size = sum(stamp.size for stamp in found.values())
    latest = max((stamp.changed for stamp in found.values()), default=0)
    each = "\n".join(f"{os.path.relpath(path, under)}: {stamp}" for path, stamp in found.items())
    return f"{len(found)} files, {size} bytes, changed at {latest} ns, digest {xxhash.xxh3_64_hexdigest(each.encode())}"


def _stamp_if_there(path: str) -> Stamp | None:
    try:
        return stamp_of(path)
    except FileNotFoundError:
        # The file went after its folder was listed.
        return None


def files_in(folder: str) -> list[str]:
    """Return the paths of all that is no folder in a folder and those in it; a link to a folder is no folder."""
    found = []
    for above, folders, names in os.walk(folder):
        links = [n for n in folders if os.path.islink(os.path.join(above, n))]
        found += [os.path.join(above, n) for n in sorted(names + links)]
    return found


def what_lies(path: str) -> str:
    """Return a text that differs when what lies at a path may differ: a file, or a folder with all in it.

    It stays the same when that is moved.
    """
    if os.path.isdir(path) and not os.path.islink(path):
        return stamps_of(files_in(path), path)
    return str(stamp_of(path))
