"""What a worker process was running when an engine ended it, told by the next process of its host.

An engine that aborts or divides by zero takes the process with it, and Dask runs the task again, on one worker after
the other, until it raises `KilledWorker`, which names no model.  So each worker process keeps a note in a file, in
memory that outlives it: for each thread the task's key, its model and its nodes, written before a bundle runs (about a
microsecond).  Python's fault handler writes the signal into a second file as the process dies; one that was killed for
another reason (memory, preemption, a person) leaves none, and its task runs again as ever.

A process that is handed a task finds such notes, at its first bundle and then once in a while, and refuses the task
that ended its predecessor, by model, nodes and signal.  A refusal takes the note away: submitted anew, the task is
tried.  A process lives while it holds the lock of its notes.
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

# A slot a thread, and bytes of each: a key, a path and some names of nodes.
_SLOTS = 64
_SLOT_BYTES = 2048
_SEPARATOR = b"\x1f"
# Notes are looked for at most so often, and forgotten after a while: by then Dask has given the task up.
_LOOK_S = 0.5
_KEPT_S = 600.0
_FAULT = re.compile(r"Fatal Python error: (.+)\n")
_NOTHING = contextlib.nullcontext()
_THREAD = re.compile(r"Current thread 0x([0-9a-f]+)")


class CrashNote(NamedTuple):
    """What a thread of a dead process was running, and how the process ended."""

    key: str
    model: str
    nodes: str
    ended: str
    files: tuple[Path, Path]

    def error(self) -> UnsupportedOp:
        """Return what to raise in place of running it again."""
        return UnsupportedOp(
            f"model {self.model!r}: an engine ended the worker process ({self.ended}) that ran {self.nodes}",
            [
                f"task {self.key}: it is not tried again on this host, where other tasks of the process were lost too;"
                ' look for extreme values or sizes in its input, cut the model there (granularity="op") to find the'
                " node, or export it without that operator"
            ],
        )


class _Kept:
    """A context at whose end a note is gone; a generator's takes as long as all the rest of a note."""

    __slots__ = ("_memory", "_start")

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._start = start

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._memory[self._start] = 0


class Notes:
    """The notes of this process, in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".notes", dir=folder)
        portable.lock(handle, waits=True)
        os.ftruncate(handle, _SLOTS * _SLOT_BYTES)
        self._memory = mmap.mmap(handle, _SLOTS * _SLOT_BYTES)
        self._held = handle  # closing it would let go of the lock
        self._fault = open(Path(name).with_suffix(".fault"), "wb")  # noqa: SIM115 - as long as the process
        if not faulthandler.is_enabled():
            faulthandler.enable(self._fault)  # of all threads: it says which one it was
        self._folder = folder
        self._name = Path(name)
        self._slots: dict[int, int] = {}
        self._lock = threading.Lock()
        self._looked_at = 0.0
        self._found: dict[str, CrashNote] = {}

    def running(self, key: str, model: str, nodes: str) -> _Kept:
        """Write a note, to be kept until the context ends; `UnsupportedOp` where it ended a process before."""
        self._refuse(key)
        thread = threading.get_ident()
        start = self._slots.get(thread)
        if start is None:
            start = self._slot(thread)
        parts = (b"%x" % thread, key.encode()[:600], model.encode()[:600], nodes.encode()[:600])
        text = _SEPARATOR.join(parts) + b"\0"
        self._memory[start : start + len(text)] = text
        return _Kept(self._memory, start)

    def _slot(self, thread: int) -> int:
        """Where the note of a thread starts."""
        with self._lock:
            return self._slots.setdefault(thread, len(self._slots) % _SLOTS * _SLOT_BYTES)

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
    """Yield the notes of processes that an engine ended; what others left is removed."""
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
    except OSError:  # held, or removed by another process in between
        return True


def _read(files: tuple[Path, Path]) -> CrashNote | None:
    """The note of the thread in which the process died; None where no engine ended it, or long ago."""
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
    mine = mine or noted  # it was a thread of the engine's own
    if len(mine) != 1:
        return None
    return CrashNote(mine[0][1], mine[0][2], mine[0][3], told[1], files)


def _remove(files: tuple[Path, Path]) -> None:
    for path in files:
        with contextlib.suppress(OSError):
            path.unlink()


def folder() -> Path:
    """Return where the processes of this user on this host keep their notes; OSError on Windows."""
    return Path(tempfile.gettempdir()) / f"dask-ferro-notes-{portable.user_id()}"


@cache
def _notes(pid: int) -> Notes | None:
    try:
        return Notes(folder())
    except OSError:  # nowhere to write to, or no locks: nothing is told, and everything runs
        return None


def noted(worker: Any, model: str, nodes: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    """Return a context that keeps a note while a bundle runs, on a worker that a nanny watches; of others none is kept.

    Parameters
    ----------
    worker : distributed.Worker or None
        Without a nanny nobody starts the process again, and a process that is the caller's own tells of its end.
    model : str
        Its path, for people.
    nodes : callable
        Returns what to say of the nodes, for people; not called where no note is kept.
    """
    notes = None if worker is None or worker.nanny is None else _notes(os.getpid())
    if notes is None:
        return _NOTHING
    return notes.running(str(worker.get_current_task()), model, nodes())


def explained(error: Exception, model: str) -> Exception:
    """Return what to raise for an error of a computation: of `KilledWorker`, by what a process of this host noted."""
    if type(error).__name__ != "KilledWorker":
        return error
    task = str(getattr(error, "task", ""))
    for note in left_behind(folder()) if portable.has_locks() else ():
        if note.key == task:
            return note.error()
    error.add_note(
        f"the task computes model {model!r}; its workers' logs say how they ended (out of memory, or an engine that"
        ' aborted), and smaller chunks or granularity="op" tell where'
    )
    return error
