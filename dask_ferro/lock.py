"""A lock file for a path: held by one process at a time, on one host or several, and released when that process ends.

    <path>.ferro-lock    exists while the lock is held (a sink by a run, a journal by a cluster): host, pid, start time

The lock is `flock`, which the kernel releases when the process ends for whatever reason.  Linux forwards it over NFS,
and Lustre does where it is mounted with `flock`.  For file systems without it, or where it covers one host only, the
modification time of the file is a lease: the holder renews it, and a process that finds the file of another host
watches it for `ferro.stream.lease` before taking over.  Only changes count, so the hosts' clocks need not agree.

A holder that was suspended for longer than the lease has lost the lock when it resumes.  It then does no harm: it
writes only to files named after its own run (`parts`), and calls `Hold.check` before each step that others would see.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from dask_ferro import config, portable
from dask_ferro.errors import ConfigError

SUFFIX = ".ferro-lock"
# Renewals per lease: a file server that stalls for 11/12 of a lease does not cost a run its lock.
SIGNS = 12
# How often another host's lock file is checked during a lease.
LOOKS = 20
# Error numbers of file systems without `flock`.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})

logger = logging.getLogger(__name__)
_handles: set[int] = set()


def _close_in_child() -> None:
    """Close the locks in a forked process, which would otherwise hold them after its parent has ended."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


portable.at_fork(after_in_child=_close_in_child)


class Words(NamedTuple):
    """Words of the error messages: the locked thing, what its holder does with it, and the holder."""

    thing: str = "sink"
    done: str = "written"
    who: str = "ff.run"


SINK = Words()


@dataclass
class Hold:
    """A held lock.

    Attributes
    ----------
    sink, path : str
        The locked path, and its lock file.
    handle : int
        File descriptor of the lock file; the lock is held while it is open.
    token : str
        Identifies this holder in the file.
    """

    sink: str
    path: str
    handle: int
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    words: Words = SINK
    pid: int = field(default_factory=os.getpid)

    def check(self) -> None:
        """Raise `ConfigError` if another process took the lock over because this one seemed dead."""
        found = _said(self.path)
        if found is None or found.get("token") != self.token:
            raise lost(self.sink, found, self.words)

    def claim(self) -> None:
        """Write the holder's host, process id and start time into the lock file."""
        text = json.dumps(record(self.token)).encode()
        os.write(self.handle, text)
        os.ftruncate(self.handle, len(text))

    def beat(self) -> None:
        """Renew the lease."""
        os.utime(self.handle)

    def release(self) -> None:
        """Release the lock, and remove its file if it is still this holder's.  Does nothing in a forked process."""
        if os.getpid() != self.pid:
            return
        # If the file system is gone, so is the lock.
        with suppress(OSError):
            if (_said(self.path) or {"token": self.token})["token"] == self.token:
                os.unlink(self.path)
        _close(self.handle)


@contextmanager
def held(sinks: Sequence[str], words: Words = SINK) -> Iterator[list[Hold]]:
    """Hold the locks of some sinks, or other resolved paths, while the block runs.

    Raises
    ------
    ConfigError
        If another process holds one (the message has its host, process id and start time), or if the system or the
        folder cannot have lock files, as on Windows.
    """
    if not portable.has_locks():
        raise ConfigError(
            f"{words.thing} {', '.join(map(repr, sinks))} cannot be {words.done}: {words.who} locks it by flock, which"
            " this system does not have; use Linux or macOS"
        )
    with ExitStack() as stack:
        holds = [_entered(stack, sink, words) for sink in sorted(sinks)]
        ended = threading.Event()
        beating = threading.Thread(target=_beat, args=(holds, ended), name="ferro-stream-lock", daemon=True)
        beating.start()
        try:
            yield holds
        finally:
            ended.set()
            beating.join()


def _entered(stack: ExitStack, sink: str, words: Words) -> Hold:
    folder = os.path.dirname(sink)
    try:
        if not os.path.isdir(folder):
            os.mkdir(folder)
            stack.callback(_remove_empty, folder)
        hold = _acquired(sink, words)
        stack.callback(hold.release)
        hold.claim()
    except OSError as error:
        raise ConfigError(
            f"{words.thing} {sink!r} cannot be written: {error.strerror} ({error.filename or sink!r}); choose another"
            " path"
        ) from error
    return hold


def _remove_empty(folder: str) -> None:
    # The folder may contain an output by now, of this run or of another.
    with suppress(OSError):
        os.rmdir(folder)


def _acquired(sink: str, words: Words) -> Hold:
    """Acquire the lock of a sink; its file does not name the holder yet (`Hold.claim`)."""
    path = sink + SUFFIX
    while True:
        # Never through a link: another user's link could lead to a file that would be overwritten.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | portable.NO_LINK | portable.NOT_INHERITED, 0o644)
        _handles.add(handle)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "a lock has to be a file", path)
            shared = _flock(handle, sink, path, words)
            found = _said(path)
            if found is not None and not (shared and found.get("machine") == _machine()):
                _watch(sink, path, found, words)
            if _is_at(handle, path):
                return Hold(sink, path, handle, words=words)
        except BaseException:
            _close(handle)
            raise
        # The last holder removed the file meanwhile, so the lock is on a file that has no path any more: try again.
        _close(handle)


def _flock(handle: int, sink: str, path: str, words: Words) -> bool:
    """Lock a file; return whether the file system has locks, and raise if another process holds it."""
    try:
        portable.lock(handle)
    except BlockingIOError:
        raise refused(sink, _said(path), words) from None
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _watch(sink: str, path: str, found: dict[str, Any], words: Words) -> None:
    """Raise if the holder on another host renews its lease in time; otherwise remove its lock file."""
    lease = config.value("stream.lease")
    logger.warning(
        "%s %r has a lock of %s; %s waits %g s for a sign of life from there (ferro.stream.lease)",
        words.thing, sink, who(found), words.who, lease,
    )  # fmt: skip
    seen = _changed_at(path)
    for _ in range(LOOKS):
        time.sleep(lease / LOOKS)
        if (now := _changed_at(path)) is not None and now != seen:
            raise refused(sink, _said(path), words)
    said = _said(path)
    if said is not None and said.get("token") == found.get("token"):
        with suppress(FileNotFoundError):
            # The next process that opens the path creates a new file.
            os.unlink(path)


def record(token: str) -> dict[str, Any]:
    """Return what this process writes into a lock that it holds by a token."""
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "token": token,
    }


def lost(sink: str, found: dict[str, Any] | None, words: Words = SINK) -> ConfigError:
    """Return the error for a lock that another process took over; `found` is the record in it."""
    return ConfigError(
        f"{words.thing} {sink!r} was taken over by {who(found)}: this process gave no sign of life"
        f" for {config.value('stream.lease'):g} s (ferro.stream.lease); nothing of that run was touched"
    )


def refused(sink: str, found: dict[str, Any] | None, words: Words = SINK) -> ConfigError:
    """Return the error for a lock that another process holds; `found` is the record in it."""
    return ConfigError(
        f"{words.thing} {sink!r} is being {words.done} by another {words.who}: {who(found)}; wait for its end, or end"
        " it, or choose another path"
    )


def who(found: dict[str, Any] | None) -> str:
    """Return the holder of a lock in words, of the record in it."""
    if found is None:
        return "a process that has not written its host and id yet"
    return f"process {found.get('pid')} on host {found.get('host')!r}, since {found.get('since')}"


def _said(path: str) -> dict[str, Any] | None:
    """Return the record of a lock file, or None if there is no file or it is empty."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read())
    # A file that is not JSON was not written by `claim`.
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _changed_at(path: str) -> int | None:
    try:
        # `open` asks the file server: NFS answers a plain `stat` from a cache that is up to a minute old.
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _is_at(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _machine() -> str:
    """Return the boot id of this machine: `flock` releases a lock of the same boot when its holder ends."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _beat(holds: Sequence[Hold], ended: threading.Event) -> None:
    while not ended.wait(config.value("stream.lease") / SIGNS):
        for hold in holds:
            # The next renewal may succeed; `check` finds out whether the lock was lost.
            with suppress(OSError):
                hold.beat()


def _close(handle: int) -> None:
    _handles.discard(handle)
    os.close(handle)
