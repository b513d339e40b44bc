"""Guards on external data: it lies where nobody can write but who can write the model.

A model file names other files to read weights from, and it may be hostile.  So before anything is opened the name is
checked as text: relative, no `..`, no drive, no backslash.  It is looked up beside the model's real file, then beside
the name that the caller gave, as caches keep links to files of other names.  Links are followed.  A file that lies
outside of these folders, or has a second name, has to belong to the model's owner.  Neither it nor a folder above may
be open to everybody.  Offset and length must lie inside.  A file that passes is opened by its real path and must
be the one that was checked.  Sizes and offsets are bytes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import onnx

from dask_ferro import portable
from dask_ferro.graph.model.source_files import Identity, identity, read_span

# Everybody may write, and in a folder replace what others own: no sticky bit.
_OPEN = stat.S_IWOTH | stat.S_ISVTX
# Digits of the largest offset of a 64-bit file system; longer texts are refused as numbers.
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


class Problem(ValueError):
    """A reference to external data is malformed or unsafe; the text is a sentence."""


class FilePart(NamedTuple):
    """A part of a file; `location` is its real path, `identity` is that of the checked file."""

    location: str
    offset: int
    length: int
    size: int
    identity: Identity


def locate(tensor: onnx.TensorProto, model: str | None, nbytes: int) -> FilePart:
    """Return the part of a file that holds `tensor`, whose dtype and dimensions need `nbytes`.

    Parameters
    ----------
    model : str or None
        Name of the model file, which may be a link, in its real folder; None for a model that came as bytes.

    Raises
    ------
    Problem
        The reference is malformed, unsafe, or does not hold the tensor.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    steps = _steps(location)
    if model is None:
        raise Problem(
            f"its data is in the file {location!r}, and a model from memory has no folder; load the path"
        )
    path, status = _look(model, location, steps)
    offset = number(entries, "offset", 0)
    length = number(entries, "length", nbytes)
    if length != nbytes:
        raise Problem(
            f"its external data has length {length}, and its dtype and dimensions need {nbytes} bytes"
        )
    if offset + length > status.st_size:
        raise Problem(
            f"bytes {offset} to {offset + length} of {location!r} are wanted, and that file has "
            f"{status.st_size}; it is cut off or belongs to another model"
        )
    return FilePart(path, offset, length, status.st_size, identity(status))


def _steps(location: str) -> list[str]:
    if not location:
        raise Problem("its external data names no file (no `location`)")
    # Windows' forms too, on every system: a model is checked on one host and read on others.
    if location.startswith(("/", "~")) or re.match(r"[A-Za-z]:", location):
        raise Problem(f"external data at the absolute path {location!r}; it must lie in the model's folder")
    if "\\" in location or "\0" in location:
        raise Problem(f"external data at {location!r}, a name with a backslash or NUL; rename the file")
    # `..` is refused even where it stays inside the folder: a link that is put there later would lead out of it.
    steps = [step for step in location.split("/") if step not in ("", ".")]
    if ".." in steps or not steps:
        raise Problem(f"external data at {location!r} leaves the model's folder; move the file into it")
    return steps


def _look(model: str, location: str, steps: list[str]) -> tuple[str, os.stat_result]:
    """Return the real path and the status of the file that a model names."""
    folders = [os.path.dirname(os.path.realpath(model)), os.path.dirname(model)]
    names = [os.path.join(folder, *steps) for folder in folders]
    name = next(filter(os.path.lexists, names), names[0])
    try:
        path = os.path.realpath(name, strict=True)
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Problem(
            f"external data {location!r} cannot be read: {reason}; put it beside the model"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise Problem(f"external data {location!r} is no regular file")
    if status.st_nlink > 1 or not any(Path(path).is_relative_to(folder) for folder in folders):
        _check_writers(location, Path(path), Path(os.path.realpath(model)))
    return path, status


def _check_writers(location: str, path: Path, model: Path) -> None:
    """Raise `Problem` where another user than a model's owner may have written a file that lies elsewhere."""
    owner, shared = model.stat().st_uid, {folder for folder in model.parents if folder != folder.parent}
    way = [path, *(folder for folder in path.parents if folder not in shared and folder != folder.parent)]
    unsafe = [p for p in way if p.stat().st_uid not in (owner, 0) or p.stat().st_mode & _OPEN == stat.S_IWOTH]
    # The superuser owns files of every kind, so those have to share a folder with the model.
    if path.stat().st_uid != owner or (owner == 0 and shared.isdisjoint(path.parents)):
        unsafe = [path]
    if unsafe:
        raise Problem(
            f"external data {location!r} leads to {str(path)!r}, and {str(unsafe[0])!r} is another user's or the"
            " system's, or everybody may write to it; copy the file into the model's folder"
        )


def number(entries: dict[str, str], key: str, default: int) -> int:
    """Return the number that `entries` hold under `key`."""
    text = entries.get(key)
    if text is None:
        return default
    if not _NUMBER.fullmatch(text):
        raise Problem(f"its external data has {key} {text[:40]!r}; wanted a whole number of bytes, 0 or more")
    return int(text)


@contextmanager
def opened(span: FilePart) -> Iterator[int]:
    """Open the file that `locate` checked, and yield its descriptor.

    Raises
    ------
    Problem
        The path leads to another file now.
    """
    # Not blocking: opening a pipe that has replaced the file since the check would wait without end.
    flags = os.O_RDONLY | portable.NO_LINK | portable.BINARY | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(span.location, flags)
    try:
        # By the descriptor: a path may lead to another file each time.
        if identity(os.fstat(descriptor)) != span.identity:
            raise Problem(f"external data {span.location!r} changed while it was read; load the model again")
        yield descriptor
    finally:
        os.close(descriptor)


def content(span: FilePart) -> bytes:
    """Return the bytes of a part of a file, all as they were at one time.

    Raises
    ------
    Problem
        The file changed since it was checked, or while it was read.
    """
    with opened(span) as descriptor:
        found = read_span(descriptor, span.offset, span.length)
        if found is None or identity(os.fstat(descriptor)) != span.identity:
            raise Problem(f"external data {span.location!r} changed while it was read; load the model again")
        return found
