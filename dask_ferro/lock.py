"""One process holds a path: a lock that ends with its holder, on one host and between hosts.

    <path>.ferro-lock    there while it is held (a sink by a run, a journal by a cluster): host, pid, since when

The lock is `flock`, which the kernel releases when the holder ends, however it ends; Linux passes it on over NFS, and
Lustre where it is mounted with `flock`.  Where a file system keeps it to one host or has none, the file's time of
change is the second means: the holder sets it again and again, and whoever finds a file of another host watches it for
`ferro.stream.lease` before taking it over.  Only changes are looked at, so the hosts' clocks do not matter.

What a holder that was stopped for longer than that does when it goes on is not the lock's matter: it writes under the
name of its own run only (`parts`), and asks `Hold.check` before each step that others would see.
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
# Signs of life in a lease: a file server that is slow for 11/12 of it costs a run nothing.
_SIGNS = 12
# Looks at another host's file in a lease.
_LOOKS = 20
# What file systems without `flock` say.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})

logger = logging.getLogger(__name__)
_handles: set[int] = set()


def _close_in_child() -> None:
    """Close the locks in a forked process, which would hold them beyond the end of its parent."""
    for handle in _handles:
        os.close(handle)
    _handles.clear()


portable.at_fork(after_in_child=_close_in_child)


class Words(NamedTuple):
    """What is locked, what its holder does with it, and who that is."""

    thing: str = "sink"
    done: str = "written"
    who: str = "ff.run"


_SINK = Words()


@dataclass
class Hold:
    """The lock of one path, held.

    Attributes
    ----------
    sink, path : str
        What is locked, and the lock file.
    handle : int
        Of the lock file, which holds the lock while it is open.
    token : str
        Names this holder in the file.
    """

    sink: str
    path: str
    handle: int
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    words: Words = _SINK
    pid: int = field(default_factory=os.getpid)

    def check(self) -> None:
        """Raise `ConfigError` when the lock was taken over, as this process seemed to be dead."""
        found = _said(self.path)
        if found is None or found.get("token") != self.token:
            raise ConfigError(
                f"{self.words.thing} {self.sink!r} was taken over by {_who(found)}: this process gave no sign of life"
                f" for {config.value('stream.lease'):g} s (ferro.stream.lease); nothing of that run was touched"
            )

    def claim(self) -> None:
        """Write who holds the lock into its file."""
        said = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "pid": os.getpid(),
            "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            "token": self.token,
        }
        text = json.dumps(said).encode()
        os.write(self.handle, text)
        os.ftruncate(self.handle, len(text))

    def beat(self) -> None:
        """Give a sign of life."""
        os.utime(self.handle)

    def release(self) -> None:
        """Remove the file, if it is still this holder's, and open the lock.  In a forked process, nothing."""
        if os.getpid() != self.pid:
            return
        # A file system that is gone has no lock either.
        with suppress(OSError):
            if (_said(self.path) or {"token": self.token})["token"] == self.token:
                os.unlink(self.path)
        _close(self.handle)


@contextmanager
def held(sinks: Sequence[str], words: Words = _SINK) -> Iterator[list[Hold]]:
    """Hold the locks of some sinks, or other paths, given by real paths, while the block runs.

    Raises
    ------
    ConfigError
        When another process holds one, with its host, its process and since when; or when a lock cannot be made there,
        as on Windows.
    """
    if not portable.has_locks():
        raise ConfigError(
            f"{words.thing} {', '.join(map(repr, sinks))} cannot be {words.done}: {words.who} locks it by flock, which"
            " Linux and macOS have and this system has not"
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
    # There may be an output in it by now, of this run or of another one.
    with suppress(OSError):
        os.rmdir(folder)


def _acquired(sink: str, words: Words) -> Hold:
    """Return the lock of a sink, before its file says whose it is."""
    path = sink + SUFFIX
    while True:
        # A link may be somebody else's, to a file that would be overwritten.
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
        # Its last holder removed the file meanwhile: the lock is on one that nobody else will find.
        _close(handle)


def _flock(handle: int, sink: str, path: str, words: Words) -> bool:
    """Lock a file; return whether the file system can, and refuse when another process has."""
    try:
        portable.lock(handle)
    except BlockingIOError:
        raise _refused(sink, _said(path), words) from None
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def _watch(sink: str, path: str, found: dict[str, Any], words: Words) -> None:
    """Refuse when the holder of another host gives a sign of life within a lease; else take its file away."""
    lease = config.value("stream.lease")
    logger.warning(
        "%s %r has a lock of %s; %s waits %g s for a sign of life from there (ferro.stream.lease)",
        words.thing, sink, _who(found), words.who, lease,
    )  # fmt: skip
    seen = _changed_at(path)
    for _ in range(_LOOKS):
        time.sleep(lease / _LOOKS)
        if (now := _changed_at(path)) is not None and now != seen:
            raise _refused(sink, _said(path), words)
    said = _said(path)
    if said is not None and said.get("token") == found.get("token"):
        with suppress(FileNotFoundError):
            # The next one to open it makes a file of its own.
            os.unlink(path)


def _refused(sink: str, found: dict[str, Any] | None, words: Words) -> ConfigError:
    return ConfigError(
        f"{words.thing} {sink!r} is being {words.done} by another {words.who}: {_who(found)}; wait for its end, or end"
        " it, or choose another path"
    )


def _who(found: dict[str, Any] | None) -> str:
    if found is None:
        return "a process that has not said its name yet"
    return f"process {found.get('pid')} on host {found.get('host')!r}, since {found.get('since')}"


def _said(path: str) -> dict[str, Any] | None:
    """Return what a lock file says, or None where there is none or it is empty."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read())
    # What is no JSON is no file of ours.
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _changed_at(path: str) -> int | None:
    try:
        # Opening it asks the file server anew: NFS answers `stat` from a cache of up to a minute.
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
    """Return what names this boot of this kernel: a lock of the same one is released with its holder."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _beat(holds: Sequence[Hold], ended: threading.Event) -> None:
    while not ended.wait(config.value("stream.lease") / _SIGNS):
        for hold in holds:
            # The next sign may get through; `check` tells whether the lock was lost.
            with suppress(OSError):
                hold.beat()


def _close(handle: int) -> None:
    _handles.discard(handle)
    os.close(handle)
