"""Guards on external data: it lies in regular files inside the model's folder, and nowhere else.

A model file names other files to read weights from, and it may be hostile.  So before anything is
opened the name is checked as text (relative, no `..`, no drive, no backslash), then every step of the path is
checked (`lstat`) from the model's real folder down: no symbolic link, at the end a regular file that has no
second name (a hard link to a file elsewhere looks like any other file).  Offset and length must lie inside.
A file that passes is opened without following links, and must be the file that was checked.  Sizes and offsets
are bytes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import onnx

from dask_ferro import portable
from dask_ferro.graph.model.source_files import Identity, identity, read_span

# Digits of the largest offset of a 64-bit file system; longer texts are refused as numbers.
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


class Problem(ValueError):
    """A reference to external data is malformed or unsafe; the text is a sentence."""


class FilePart(NamedTuple):
    """A part of a file; `location` is relative to the model's folder, `identity` is that of the checked file."""

    location: str
    offset: int
    length: int
    size: int
    identity: Identity


def locate(tensor: onnx.TensorProto, folder: str | None, nbytes: int) -> FilePart:
    """Return the part of a file that holds `tensor`, whose dtype and dimensions need `nbytes`.

    Parameters
    ----------
    folder : str or None
        The real folder of the model file; None for a model that came as bytes.

    Raises
    ------
    Problem
        The reference is malformed, unsafe, or does not hold the tensor.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    steps = _steps(location)
    if folder is None:
        raise Problem(
            f"its data is in the file {location!r}, and a model from memory has no folder; load the path"
        )
    status = _look(folder, location, steps)
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
    return FilePart("/".join(steps), offset, length, status.st_size, identity(status))


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


def _look(folder: str, location: str, steps: list[str]) -> os.stat_result:
    path = folder
    for i, step in enumerate(steps, start=1):
        path = os.path.join(path, step)
        try:
            status = os.lstat(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise Problem(
                f"external data {location!r} cannot be read: {reason}; put it beside the model"
            ) from error
        if stat.S_ISLNK(status.st_mode):
            what = "a symbolic link" if i == len(steps) else f"behind the symbolic link {step!r}"
            raise Problem(f"external data {location!r} is {what}; copy the file into the model's folder")
        if i < len(steps) and not stat.S_ISDIR(status.st_mode):
            raise Problem(f"external data {location!r}: {step!r} is no folder")
    if not stat.S_ISREG(status.st_mode):
        raise Problem(f"external data {location!r} is no regular file")
    if status.st_nlink > 1:
        raise Problem(
            f"external data {location!r} has {status.st_nlink} hard links, so it may be a file from "
            "elsewhere; replace it by a copy"
        )
    return status


def number(entries: dict[str, str], key: str, default: int) -> int:
    """Return the number that `entries` hold under `key`."""
    text = entries.get(key)
    if text is None:
        return default
    if not _NUMBER.fullmatch(text):
        raise Problem(f"its external data has {key} {text[:40]!r}; wanted a whole number of bytes, 0 or more")
    return int(text)


@contextmanager
def opened(folder: str, span: FilePart) -> Iterator[int]:
    """Open the file that `locate` checked, and yield its descriptor.

    Raises
    ------
    Problem
        The path leads to another file now.
    """
    # Not blocking: opening a pipe that has replaced the file since the check would wait without end.
    flags = (
        os.O_RDONLY
        | portable.NOT_INHERITED
        | portable.NO_LINK
        | portable.BINARY
        | getattr(os, "O_NONBLOCK", 0)
    )
    descriptor = os.open(os.path.join(folder, span.location), flags)
    try:
        # By the descriptor: a path may lead to another file each time.
        if identity(os.fstat(descriptor)) != span.identity:
            raise Problem(f"external data {span.location!r} changed while it was read; load the model again")
        yield descriptor
    finally:
        os.close(descriptor)


def content(folder: str, span: FilePart) -> bytes:
    """Return the bytes of a part of a file, all as they were at one time.

    Raises
    ------
    Problem
        The file changed since it was checked, or while it was read.
    """
    with opened(folder, span) as descriptor:
        found = read_span(descriptor, span.offset, span.length)
        if found is None or identity(os.fstat(descriptor)) != span.identity:
            raise Problem(f"external data {span.location!r} changed while it was read; load the model again")
        return found
