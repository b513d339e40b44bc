"""External data of a model: separate files that hold its weights, and guards on their places.

A model file names other files to read weights from, and it may be hostile.  The name is relative and has no `..`; it
is looked up in the folder of the model's real file, then in the folder of the caller's path, because caches keep
links to files of other names.  Links are followed, which onnx and onnx_ir refuse: a file that is outside of these
folders, or has a second name, has to belong to the model's owner, and neither it nor a folder above may be writable
for everybody.  A file that passes is opened by its real path and must be the one that was checked.  Sizes and offsets
are bytes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

from onnx import TensorProto

from dask_ferro import portable
from dask_ferro.graph.model.guards import size
from dask_ferro.graph.model.source import Identity, identity, read_span

# Everybody may write, and in a folder replace what others own: no sticky bit.
_OPEN = stat.S_IWOTH | stat.S_ISVTX
# Digits of the largest offset of a 64-bit file system; longer texts are refused as numbers.
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


class Problem(ValueError):
    """A reference to external data is malformed or unsafe; the text is a sentence."""


class FilePart(NamedTuple):
    """A part of a file; `location` is its real path, `identity` is the identity of the checked file."""

    location: str
    offset: int
    length: int
    identity: Identity


def reference(tensor: TensorProto) -> str:
    """Return the text of a tensor's reference; tensors of one text have the same data."""
    return repr([(entry.key, entry.value) for entry in tensor.external_data])


def locate(tensor: TensorProto, model: str | None) -> FilePart:
    """Return the part of a file that holds `tensor`.

    Parameters
    ----------
    model : str or None
        Name of the model file, which may be a link, in its real folder; None for a model from bytes.

    Raises
    ------
    Problem
        If the reference is malformed, unsafe, or does not hold the tensor.
    """
    if tensor.data_type == TensorProto.STRING:
        raise Problem("strings cannot be external data; store them in the model")
    nbytes = size(tensor.data_type, prod(tensor.dims))
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if model is None:
        raise Problem(
            f"its data is in the file {location!r}, and a model from memory has no folder; load the path"
        )
    path, status = _look(model, location)
    offset, length = _number(entries, "offset", 0), _number(entries, "length", nbytes)
    if length != nbytes:
        raise Problem(
            f"its external data has length {length}, and its dtype and dimensions need {nbytes} bytes"
        )
    if offset + length > status.st_size:
        raise Problem(
            f"it is bytes {offset} to {offset + length} of {location!r}, and that file has {status.st_size};"
            " the file is cut off or belongs to another model"
        )
    return FilePart(path, offset, length, identity(status))


def _look(model: str, location: str) -> tuple[str, os.stat_result]:
    """Return the real path and the status of the file that a model names."""
    # Windows' forms too, on every system: a model is checked on one host and read on others.  `..` is refused even if
    # it stays inside the folder: a link that is created later would lead out of it.
    windows = PureWindowsPath(location)
    if not PurePosixPath(location).name or windows.anchor or location[0] in "/~" or ".." in windows.parts:
        raise Problem(
            f"external data at {location!r}, which is not in the model's folder; move the file into it"
        )
    folders = [os.path.dirname(os.path.realpath(model)), os.path.dirname(model)]
    names = [os.path.join(folder, location) for folder in folders]
    try:
        path = os.path.realpath(next(filter(os.path.lexists, names), names[0]), strict=True)
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Problem(
            f"external data {location!r} cannot be read: {reason}; put it into the model's folder"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise Problem(f"external data {location!r} is not a regular file")
    if status.st_nlink > 1 or not any(Path(path).is_relative_to(folder) for folder in folders):
        _check_writers(location, Path(path), Path(os.path.realpath(model)))
    return path, status


def _check_writers(location: str, path: Path, model: Path) -> None:
    """Raise `Problem` if a user other than a model's owner may have written a file in another folder."""
    owner, shared = model.stat().st_uid, {folder for folder in model.parents if folder != folder.parent}
    way = [path, *(folder for folder in path.parents if folder not in shared and folder != folder.parent)]
    unsafe = [p for p in way if p.stat().st_uid not in (owner, 0) or p.stat().st_mode & _OPEN == stat.S_IWOTH]
    # The superuser owns files of every kind, so those have to share a folder with the model.
    if path.stat().st_uid != owner or (owner == 0 and shared.isdisjoint(path.parents)):
        unsafe = [path]
    if unsafe:
        raise Problem(
            f"external data {location!r} leads to {str(path)!r}, and {str(unsafe[0])!r} is another user's or"
            " the system's, or everybody may write to it; copy the file into the model's folder"
        )


def _number(entries: dict[str, str], key: str, default: int) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not _NUMBER.fullmatch(text):
        raise Problem(
            f"its external data has {key} {text[:40]!r}; expected a whole number of bytes, 0 or more"
        )
    return int(text)


@contextmanager
def open_checked(part: FilePart) -> Iterator[int]:
    """Open the file that `locate` checked, and yield its descriptor.

    Raises
    ------
    Problem
        If the path now leads to another file, or the file changed meanwhile.
    """
    # Not blocking: opening a pipe that has replaced the file since the check would wait without end.
    flags = os.O_RDONLY | portable.NO_LINK | portable.BINARY | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(part.location, flags)
    try:
        # Read from the descriptor: a path may lead to another file each time.
        _check_identity(part, descriptor)
        yield descriptor
        _check_identity(part, descriptor)
    finally:
        os.close(descriptor)


def _check_identity(part: FilePart, descriptor: int) -> None:
    if identity(os.fstat(descriptor)) != part.identity:
        raise Problem(f"external data {part.location!r} changed while it was read; load the model again")


def content(part: FilePart) -> bytes:
    """Return the bytes of a part of a file, all as they were at one time.

    Raises
    ------
    Problem
        If the file changed since it was checked, or while it was read.
    """
    with open_checked(part) as descriptor:
        found = read_span(descriptor, part.offset, part.length)
    if found is None:
        raise Problem(f"external data {part.location!r} changed while it was read; load the model again")
    return found
