"""Log files that stay readable when the writer is killed: a line of JSON with a checksum for each record.

    {"name": "default-0", ..., "check": "5f0c31b2a96de784"}

A line that was cut short or changed fails its checksum and is ignored.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import xxhash

from dask_ferro import portable

# In front of the checksum, which is the last field.
_CHECK = b', "check": "'


def sealed(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON; its last field is a checksum of the fields before it."""
    body = json.dumps(record).encode()[:-1]
    return body + _CHECK + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def opened(text: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if the checksum is wrong or the line is no JSON object."""
    body, mark, check = text.rstrip(b"\n").rpartition(_CHECK)
    if not mark or check != xxhash.xxh3_64_hexdigest(body).encode() + b'"}':
        return None
    try:
        record = json.loads(body + b"}")
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def append(path: str, text: bytes) -> None:
    """Append lines to a file by one `write`; if its last line was cut short, start a new line first.

    Raises
    ------
    OSError
        If only a part was written.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | portable.BINARY, 0o644)
    try:
        size = os.fstat(handle).st_size
        if size and portable.read_at(handle, 1, size - 1) != b"\n":
            text = b"\n" + text
        written = os.write(handle, text)
    finally:
        os.close(handle)
    if written < len(text):
        raise OSError(f"only {written} of {len(text)} bytes went into {path!r}: is the disk full?")


def put(path: str, text: bytes) -> None:
    """Replace a file by one rename once its content is on disk; an existing file keeps its permissions."""
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name}.part")
    with suppress(FileNotFoundError):
        # Left by a process that was killed, or a link that another user made.
        os.unlink(part)
    flags = portable.NO_LINK | portable.BINARY
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o666)
    with open(handle, "wb") as file:
        with suppress(FileNotFoundError):
            found = os.lstat(path).st_mode
            if stat.S_ISREG(found) and hasattr(os, "fchmod"):
                os.fchmod(handle, stat.S_IMODE(found))
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
