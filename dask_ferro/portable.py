"""System calls of Linux and macOS that Windows lacks, behind names that every system has.

What a system lacks raises `OSError` with ENOSYS and its name, so that a caller goes on without it, or says so.  Nothing
here is a copy of such a call by other means: a lock that outlives its process would be worse than none.
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

# Flags of `os.open`: not through a link, not in programs that are started, bytes as they are.  0: it is so anyway.
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
NOT_INHERITED: int = getattr(os, "O_CLOEXEC", 0)
BINARY: int = getattr(os, "O_BINARY", 0)

_moved = Lock()


def has_locks() -> bool:
    """Whether a process can lock a file until it ends."""
    return fcntl is not None


def lock(handle: int, *, shared: bool = False, waits: bool = False) -> None:
    """Lock an open file until it is closed, or this process ends.

    Raises
    ------
    BlockingIOError
        Another process has locked it, and `waits` is false.
    OSError
        Neither the system nor, on some, the file system has such locks.
    """
    if fcntl is None:
        raise _lacking("locks of files that end with their process (flock)")
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    fcntl.flock(handle, how if waits else how | fcntl.LOCK_NB)


def user_id() -> int:
    """Return the number of this process's user.

    Raises
    ------
    OSError
        The system has no such numbers.
    """
    if not hasattr(os, "getuid"):
        raise _lacking("user numbers (getuid)")
    return os.getuid()


def read_at(handle: int, nbytes: int, offset: int) -> bytes:
    """Return at most so many bytes of an open file from an offset on, from any thread."""
    if hasattr(os, "pread"):
        return os.pread(handle, nbytes, offset)
    # The file has one position for all threads.
    with _moved:
        os.lseek(handle, offset, os.SEEK_SET)
        return os.read(handle, nbytes)


def at_fork(
    *,
    before: Callable[[], object] | None = None,
    after_in_parent: Callable[[], object] | None = None,
    after_in_child: Callable[[], object] | None = None,
) -> None:
    """Have the given functions called at each fork; never, where processes do not fork."""
    if not hasattr(os, "register_at_fork"):
        return
    calls = {"before": before, "after_in_parent": after_in_parent, "after_in_child": after_in_child}
    os.register_at_fork(**{when: call for when, call in calls.items() if call is not None})


def _lacking(what: str) -> OSError:
    return OSError(errno.ENOSYS, f"this system has no {what}; Linux and macOS have")
