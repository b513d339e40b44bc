"""A recording of the scheduling core's events, written by a thread of its own: the scheduler only hands records over.

Lines are made and written in batches, beside the event loop.  A recording ends, with a last line that says why, when it
has as many bytes as it may have, or the thread falls behind; an error of the disk ends it at once.  Either is told in
one warning, and what was written until then can be replayed.  Nothing of it ever fails the scheduler.
"""

from __future__ import annotations

import gzip
import logging
from collections import deque
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from threading import Event, Thread
from typing import BinaryIO, cast

from dask_ferro.policy.recording.recorder import FORM, Lines, Record
from dask_ferro.policy.recording.values import Json, text

logger = logging.getLogger(__name__)

# Seconds from one batch to the next, and records that are made lines of before other threads have their turn.
_INTERVAL, _BATCH = 0.2, 64
# Records that wait for the thread, at most: 100 MB.  A scheduler makes some 10,000 in a second.
_PENDING = 100_000
# Seconds for which the end waits for the disk.
_PATIENCE = 5.0


class EventLog:
    """A sink of a `Recorder` that writes lines.

    Parameters
    ----------
    open_ : callable () -> binary file
        Called in the thread.
    most : int
        Bytes of the recording.
    name : str
        Of it, for warnings.
    """

    def __init__(self, open_: Callable[[], BinaryIO], most: int, name: str) -> None:
        self.is_over = False
        self._open, self._most, self._name = open_, most, name
        self._lines = Lines()
        # The loop appends and the thread takes from the other end, which a deque allows without a lock.
        self._pending: deque[Record] = deque()
        self._head: dict[str, Json] = {}
        self._size = 0
        self._behind = False
        self._closing = Event()
        self._thread = Thread(target=self._write, name="ferro-event-log", daemon=True)

    # -- on the event loop -----------------------------------------------------------------------------------

    def begin(self, head: dict[str, Json]) -> None:
        """Take the head, and start writing."""
        self._head = head  # it has copies alone, so that its text can be made beside the loop
        self._thread.start()

    def put(self, record: Record) -> bool:
        """Take a record; return whether more are wanted."""
        if self.is_over:
            return False
        if len(self._pending) >= _PENDING:
            self._behind = True
            self.stop()
            return False
        self._pending.append(record)
        return True

    def stop(self) -> None:
        """Let the thread write what there is, and end."""
        self._closing.set()

    def close(self) -> None:
        """Write what there is; return when it is written, or the disk has not answered for 5 s.  It may block."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)

    # -- in the thread ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            with self._open() as file:
                self._to(file, text(self._head))
                while not (self._is_done(file) or self._closing.wait(_INTERVAL)):
                    file.flush()
                if not self._is_done(file) and self._behind:
                    self._end(file, f"{_PENDING:,} events waited to be written")
        # The disk's errors, and those of a value that no line has.
        except (OSError, TypeError, ValueError, RecursionError) as error:
            logger.warning("dask_ferro records no more events in %s: %s", self._name, error)
        finally:
            self.is_over = True
            self._pending.clear()

    def _is_done(self, file: BinaryIO) -> bool:
        """Write what waits; return whether the recording is over."""
        while self._pending and not self.is_over:
            batch = [self._pending.popleft() for _ in range(min(len(self._pending), _BATCH))]
            for record in batch:
                line = self._lines.line(record)
                if self._size + len(line) >= self._most:
                    self._end(file, f"it has the {self._most:,} bytes that it may have")
                    return True
                self._to(file, line)
        return self.is_over

    def _end(self, file: BinaryIO, why: str) -> None:
        self._to(file, text({"end": why}))
        self.is_over = True
        logger.warning("dask_ferro records no more events in %s: %s", self._name, why)

    def _to(self, file: BinaryIO, line: str) -> None:
        file.write(line.encode() + b"\n")
        self._size += len(line) + 1


def in_file(path: str, most: int) -> EventLog:
    """Return a log in a file; a recording that is there already is replaced, and no other file."""
    return EventLog(lambda: _opened(Path(path).expanduser()), most, path)


def _opened(path: Path) -> BinaryIO:
    if path.exists():
        with path.open("rb") as file:
            begins = file.read(len(FORM) + 3)
        if begins and begins != f'{{"{FORM}"'.encode():
            raise FileExistsError("the file is there, and is no recording of events")
        # Not truncated: another process that still writes into it keeps its own file, and the two are not mixed.
        path.unlink()
    return path.open("xb", buffering=1 << 16)


class EventsInMemory(EventLog):
    """A log that is kept compressed, for who asks for it at the end."""

    def __init__(self, most: int, name: str) -> None:
        self._kept = BytesIO()
        packed = cast(BinaryIO, gzip.GzipFile(fileobj=self._kept, mode="wb", compresslevel=1))
        super().__init__(lambda: packed, most, name)

    def taken(self) -> bytes:
        """Return the lines, compressed by gzip.  It blocks as `close` does."""
        self.close()
        return self._kept.getvalue()
