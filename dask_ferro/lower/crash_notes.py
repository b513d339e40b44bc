"""Crash notes: records of the task in which an engine crashed a worker process, read by other processes of the host.

An engine that aborts or divides by zero ends the process, and Dask runs the task again on one worker after another
until it raises `KilledWorker`, which names no model.  So each worker process keeps a note in a memory-mapped file that
outlives it: for each thread the task's key, its model and its nodes, written before a bundle runs (about a
microsecond).  Python's fault handler writes the signal to a second file as the process ends; a process that is killed
for another reason (out of memory, preemption, by a user) records no signal, and its task runs again as usual.

A process reads such notes at its first bundle and then at most every `_LOOK_S` seconds, and refuses a task that ended
another process, with an error that names model, nodes and signal.  The refusal removes the note, so that the task runs
if it is submitted again.  A process that holds the lock of its notes is alive.  Where a fault handler was on before
(PYTHONFAULTHANDLER), it goes on writing where it wrote, and a crash is not explained.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dask_ferro import portable
from dask_ferro.errors import UnsupportedOp

# Slots, one for each thread, and the bytes of a slot: a key, a path and some names of nodes.
_SLOTS = 64
_SLOT_BYTES = 2048
_SEPARATOR = b"\x1f"
# Seconds between two searches for notes, and until a note expires: by then Dask has given the task up.
_LOOK_S = 0.5
_KEPT_S = 600.0
_FAULT = re.compile(r"Fatal Python error: (.+)\n")
_NOTHING = contextlib.nullcontext()
_THREAD = re.compile(r"Current thread 0x([0-9a-f]+)")


class CrashNote(NamedTuple):
    """The task that a thread of a crashed process ran, and the signal that ended the process."""

    key: str
    model: str
    nodes: str
    ended: str
    files: tuple[Path, Path]

    def error(self) -> UnsupportedOp:
        """Return the error to raise in place of running the task again."""
        return UnsupportedOp(
            f"model {self.model!r}: an engine ended the worker process ({self.ended}) that ran {self.nodes}",
            [
                f"task {self.key}: it is not run again on this host, where other tasks of the process were lost too;"
                ' check its input for extreme values or sizes, cut the model finer (granularity="op") to find the'
                " node, or export the model without that operator"
            ],
        )


class _Kept:
    """A context manager that clears a note on exit; one made by a generator would double the cost of a note."""

    __slots__ = ("_memory", "_start")

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._start = start

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._memory[self._start] = 0


class Notes:
    """The crash notes of this process, in a file in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".notes", dir=folder)
        portable.lock(handle, waits=True)
        os.ftruncate(handle, _SLOTS * _SLOT_BYTES)
        self._memory = mmap.mmap(handle, _SLOTS * _SLOT_BYTES)
        # Closing the file would release its lock.
        self._held = handle
        self._fault = open(Path(name).with_suffix(".fault"), "wb")  # noqa: SIM115 - open until the process ends
        if not faulthandler.is_enabled():
            # The handler writes which thread crashed; its note is found by that thread's number.
            faulthandler.enable(self._fault)
        self._folder = folder
        self._name = Path(name)
        self._slots: dict[int, int] = {}
        self._lock = threading.Lock()
        self._looked_at = 0.0
        self._found: dict[str, CrashNote] = {}

    def running(self, key: str, model: str, nodes: str) -> _Kept | contextlib.AbstractContextManager[None]:
        """Write a note and return the context that clears it; raise `UnsupportedOp` if the task crashed a process.

        There is no note while as many other threads as there are slots have one.
        """
        self._refuse(key)
        thread = threading.get_ident()
        start = self._slots.get(thread)
        if start is None:
            start = self._slot(thread)
        if start is None:
            return _NOTHING
        parts = (b"%x" % thread, key.encode()[:600], model.encode()[:600], nodes.encode()[:600])
        text = _SEPARATOR.join(parts) + b"\0"
        self._memory[start : start + len(text)] = text
        return _Kept(self._memory, start)

    def _slot(self, thread: int) -> int | None:
        """Return the offset of a thread's note, in a slot that no live thread has; None without one."""
        with self._lock:
            # Threads come and go: Dask starts one for each task that secedes.  The call lists a foreign one, too.
            threading.current_thread()
            live = {other.ident for other in threading.enumerate()}
            slots = {owner: start for owner, start in self._slots.items() if owner in live}
            free = set(range(0, _SLOTS * _SLOT_BYTES, _SLOT_BYTES)).difference(slots.values())
            if free:
                slots[thread] = min(free)
            self._slots = slots
            return slots.get(thread)

    def _refuse(self, key: str) -> None:
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            self._found = {note.key: note for note in left_behind(self._folder, but=self._name)}
        note = self._found.pop(key, None)
        if note is not None:
            for other in left_behind(self._folder, but=self._name):
                if other.key == key:
                    _remove(other.files)
            raise note.error()


def left_behind(folder: Path, *, but: Path | None = None) -> Iterator[CrashNote]:
    """Yield the notes of processes that an engine ended; remove the files of other ended processes."""
    if not folder.is_dir():
        return
    for path in sorted(folder.glob("*.notes")):
        files = (path, path.with_suffix(".fault"))
        if path == but or _is_held(path):
            continue
        note = _read(files)
        if note is None:
            _remove(files)
        else:
            yield note


def _is_held(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            portable.lock(file.fileno(), shared=True)
        return False
    except OSError:
        # The file is locked by its process, which is alive, or another process has removed it.
        return True


def _read(files: tuple[Path, Path]) -> CrashNote | None:
    """Return the note of the thread that crashed; None if no engine ended the process, or the note has expired."""
    try:
        memory, fault = files[0].read_bytes(), files[1].read_text(errors="replace")
        age = time.time() - files[1].stat().st_mtime
    except OSError:
        return None
    told = _FAULT.search(fault)
    if told is None or age > _KEPT_S:
        return None
    slots = (memory[i * _SLOT_BYTES : (i + 1) * _SLOT_BYTES].split(b"\0", 1)[0] for i in range(_SLOTS))
    parts = [slot.decode(errors="replace").split(_SEPARATOR.decode()) for slot in slots if slot]
    noted = [p for p in parts if len(p) == 4]
    thread = _THREAD.search(fault)
    mine = [p for p in noted if thread is not None and int(p[0], 16) == int(thread[1], 16)]
    # If the fault handler names no thread with a note, a thread of the engine itself crashed.
    mine = mine or noted
    if len(mine) != 1:
        return None
    return CrashNote(mine[0][1], mine[0][2], mine[0][3], told[1], files)


def _remove(files: tuple[Path, Path]) -> None:
    for path in files:
        with contextlib.suppress(OSError):
            path.unlink()


def folder() -> Path:
    """Return the folder of the notes of this user's processes on this host; raise OSError on Windows."""
    return Path(tempfile.gettempdir()) / f"dask-ferro-notes-{portable.user_id()}"


@cache
def _notes(pid: int) -> Notes | None:
    try:
        return Notes(folder())
    except OSError:
        # No writable folder, or no file locks: tasks run, and a crash is not explained.
        return None


def noted(worker: Any, model: str, nodes: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    """Return a context that keeps a note while a bundle runs, on a worker with a nanny; an empty context elsewhere.

    Parameters
    ----------
    worker : distributed.Worker or None
        Without a nanny no process is started again, and a crash in the caller's own process is visible to the caller.
    model : str
        Its path, for the error message.
    nodes : callable
        Returns a description of the nodes for the error message; not called where no note is kept.
    """
    notes = None if worker is None or worker.nanny is None else _notes(os.getpid())
    if notes is None:
        return _NOTHING
    return notes.running(str(worker.get_current_task()), model, nodes())


def explained(error: Exception, model: str) -> Exception:
    """Return the error to raise for a failed computation: for `KilledWorker`, one made from this host's crash notes."""
    if type(error).__name__ != "KilledWorker":
        return error
    task = str(getattr(error, "task", ""))
    for note in left_behind(folder()) if portable.has_locks() else ():
        if note.key == task:
            return note.error()
    error.add_note(
        f"the task computes model {model!r}; its workers' logs show why they ended (out of memory, or an engine that"
        ' aborted); smaller chunks or granularity="op" narrow down where; ff.check(client) names workers that lack a'
        " package"
    )
    return error
