"""Files that stay readable when their writer is killed: a line of JSON with a checksum for each record, or one rename.

    {"name": "default-0", ..., "check": "5f0c31b2a96de784"}

A line that was cut short or changed fails its checksum and is ignored.
"""

from __future__ import annotations

import json
import os
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from operator import index
from typing import Any

import xxhash

# In front of the checksum, which is the last field.
_CHECK = b', "check": "'


def format_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON; its last field is a checksum of the fields before it."""
    # Whole numbers may be numpy's.
    body = json.dumps(record, default=index).encode()[:-1]
    return body + _CHECK + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if the checksum is wrong or the line is no JSON object."""
    body, mark, check = text.rstrip(b"\n").rpartition(_CHECK)
    if not mark or check != xxhash.xxh3_64_hexdigest(body).encode() + b'"}':
        return None
    try:
        record = json.loads(body + b"}")
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def put(path: str, content: Any) -> None:
    """Replace a file by one rename once its content is on disk; an existing file keeps its permissions."""
    folder, name = os.path.split(path)
    # A name of its own: a task that outlived its run may write the same file.
    part = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(part, "xb") as file:
            with suppress(FileNotFoundError):
                found = os.lstat(path).st_mode
                if stat.S_ISREG(found) and hasattr(os, "fchmod"):
                    os.fchmod(file.fileno(), stat.S_IMODE(found))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise
