"""System calls of Linux and macOS that Windows lacks, as functions that exist on every system.

A call that the system lacks raises `OSError` with ENOSYS and its name, so that the caller can do without it or report
it.  Nothing is emulated: a lock that outlives its process would be worse than none.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from threading import Lock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Flags of `os.open`: do not follow a link, no translation of line ends; 0 where a system has no flag.
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
BINARY: int = getattr(os, "O_BINARY", 0)

_move_lock = Lock()


def has_locks() -> bool:
    """Return whether this system has `flock`: locks that end with their process."""
    return fcntl is not None


def lock(handle: int, *, waits: bool = False) -> None:
    """Lock an open file until it is closed or this process ends.

    Raises
    ------
    BlockingIOError
        If another process has locked it and `waits` is false.
    OSError
        If the system, or the file system, has no such locks.
    """
    if fcntl is None:
        raise _missing_error("locks of files that end with their process (flock)")
    fcntl.flock(handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)


def user_id() -> int:
    """Return the user id of this process.

    Raises
    ------
    OSError
        If the system has no user ids.
    """
    if not hasattr(os, "getuid"):
        raise _missing_error("user ids (getuid)")
    return os.getuid()


def read_at(handle: int, nbytes: int, offset: int) -> bytes:
    """Return up to `nbytes` bytes of an open file from an offset; safe to call from any thread."""
    if hasattr(os, "pread"):
        return os.pread(handle, nbytes, offset)
    # All threads share one position in the file.
    with _move_lock:
        os.lseek(handle, offset, os.SEEK_SET)
        return os.read(handle, nbytes)


def register_at_fork(**calls: Callable[[], object]) -> None:
    """Register functions as `os.register_at_fork` does; does nothing on a system without fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**calls)


def _missing_error(what: str) -> OSError:
    return OSError(errno.ENOSYS, f"this system has no {what}; Linux and macOS have")
