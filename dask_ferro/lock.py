"""A lock file for a path: held by one process at a time, on one host or several, and released when that process ends.

    <path>.ferro-lock    exists while the lock is held, as of a sink by a run: host, pid, start time

The lock is `flock`, which the kernel releases when the process ends for whatever reason.  Linux forwards it over NFS,
and Lustre does where it is mounted with `flock`.  A system or a file system without it is refused.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from dask_ferro import portable
from dask_ferro.errors import InputError

SUFFIX = ".ferro-lock"
# Error numbers of systems and file systems without `flock`.
_NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})

_handles: set[int] = set()


def _close_in_child() -> None:
    """Close the locks in a forked process, which would otherwise hold them after its parent has ended."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


portable.register_at_fork(after_in_child=_close_in_child)


class LockMessages(NamedTuple):
    """Words of the error messages: the locked thing, and its holder."""

    thing: str = "sink"
    who: str = "ff.predict_files"


SINK = LockMessages()


@dataclass
class HeldLock:
    """A held lock: the locked path, its lock file, and the file's descriptor, which holds the lock while it is open."""

    sink: str
    path: str
    handle: int
    words: LockMessages = SINK
    pid: int = field(default_factory=os.getpid)

    def check(self) -> None:
        """Raise `InputError` if the lock file was removed, so that another process may hold a new one."""
        # Somebody may have removed it by hand; the next process then locks a new file at the same path.
        if not _is_at(self.handle, self.path):
            raise InputError(
                f"{self.words.thing} {self.sink!r}: its lock file {self.path!r} was removed or replaced while it was"
                " written; nothing of another run was touched"
            )

    def release(self) -> None:
        """Release the lock, and remove its file.  Does nothing in a forked process."""
        if os.getpid() != self.pid:
            return
        # If the file system is gone, so is the lock.
        with suppress(OSError):
            if _is_at(self.handle, self.path):
                os.unlink(self.path)
        _close(self.handle)


@contextmanager
def hold_locks(sinks: Sequence[str], words: LockMessages = SINK) -> Iterator[list[HeldLock]]:
    """Hold the locks of some sinks, or other resolved paths, while the block runs.

    Raises
    ------
    InputError
        If another process holds one (the message has its host, process id and start time), or if the system, the
        file system or the folder cannot have such lock files.
    """
    with ExitStack() as stack:
        yield [_enter(stack, sink, words) for sink in sorted(sinks)]


def _enter(stack: ExitStack, sink: str, words: LockMessages) -> HeldLock:
    folder = os.path.dirname(sink)
    try:
        if not os.path.isdir(folder):
            os.mkdir(folder)
            stack.callback(_remove_empty, folder)
        hold = _acquire(sink, words)
        stack.callback(hold.release)
        # Only once the lock is held: until then the file names its last holder.
        text = json.dumps(record()).encode()
        os.write(hold.handle, text)
        os.ftruncate(hold.handle, len(text))
    except OSError as error:
        raise InputError(
            f"{words.thing} {sink!r} cannot be written: {error.strerror} ({error.filename or sink!r}); choose another"
            " path"
        ) from error
    return hold


def _remove_empty(folder: str) -> None:
    # The folder may contain an output by now, of this run or of another.
    with suppress(OSError):
        os.rmdir(folder)


def _acquire(sink: str, words: LockMessages) -> HeldLock:
    """Acquire the lock of a sink; its file does not name the holder yet."""
    path = sink + SUFFIX
    while True:
        # Never through a link: another user's link could lead to a file that would be overwritten.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | portable.NO_LINK, 0o644)
        _handles.add(handle)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EISDIR, "a lock has to be a file", path)
            portable.lock(handle)
            if _is_at(handle, path):
                return HeldLock(sink, path, handle, words)
        except BlockingIOError:
            _close(handle)
            raise held_error(sink, _read_record(path), words) from None
        except OSError as error:
            _close(handle)
            if error.errno not in _NO_FLOCK:
                raise
            raise InputError(
                f"{words.thing} {sink!r} cannot be written: {words.who} locks it by flock, which this system or"
                " its file system does not have; choose a path on another file system, or mount it with flock"
            ) from error
        # The last holder removed the file meanwhile, so the lock is on a file that has no path any more: try again.
        _close(handle)


def _close(handle: int) -> None:
    _handles.discard(handle)
    os.close(handle)


def record() -> dict[str, Any]:
    """Return what a lock of this process has of its holder."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
    }


def held_error(sink: str, found: dict[str, Any] | None, words: LockMessages = SINK) -> InputError:
    """Return the error for a lock that another process holds; `found` is the record in it."""
    return InputError(
        f"{words.thing} {sink!r} is being written by another {words.who}: {describe_holder(found)}; wait for its end,"
        " or end it, or choose another path"
    )


def describe_holder(found: dict[str, Any] | None) -> str:
    """Return the holder of a lock in words, of the record in it."""
    if found is None:
        return "a process that has not written its host and id yet"
    return f"process {found.get('pid')} on host {found.get('host')!r}, since {found.get('since')}"


def _read_record(path: str) -> dict[str, Any] | None:
    """Return the record of a lock file, or None if there is no file or it is empty."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read())
    # A file that is not JSON was not written by this module.
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_at(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
