"""Lines of a log that a process may be killed over: JSON with a checksum, one line for each record.

    {"name": "default-0", ..., "check": "5f0c31b2a96de784"}

A line that was cut short or changed has no checksum that fits, and does not count.
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
    """Return a record as a line of JSON whose last field is a checksum of all before it."""
    body = json.dumps(record).encode()[:-1]
    return body + _CHECK + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def opened(text: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None where its checksum does not hold, or it holds no record."""
    body, mark, check = text.rstrip(b"\n").rpartition(_CHECK)
    if not mark or check != xxhash.xxh3_64_hexdigest(body).encode() + b'"}':
        return None
    try:
        record = json.loads(body + b"}")
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def append(path: str, text: bytes) -> None:
    """Append lines to a file by one call; behind a line that was cut short, they begin a new one.

    Raises
    ------
    OSError
        When not all of it went into the file.
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
    """Put a file in place by one rename, when all of it is on the disk; who may read it stays as it was."""
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name}.part")
    with suppress(FileNotFoundError):
        # Of a process that was killed, or a link that somebody else put there.
        os.unlink(part)
    flags = portable.NO_LINK | portable.NOT_INHERITED | portable.BINARY
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
