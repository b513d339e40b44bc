"""A recording of the scheduling core's events, written by its own thread so that the scheduler only hands over records.

Lines are made and written in batches, outside the event loop.  A recording ends, with a last line that gives the
reason, when it reaches its maximum size or the thread falls behind; a disk error ends it at once.  Both are reported
in one warning, and the part written so far can be replayed.  A failed recording never fails the scheduler.
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

# Seconds between batches, and records converted to lines before other threads get the interpreter.
_INTERVAL, _BATCH = 0.2, 64
# The most records waiting for the thread: 100 MB.  A scheduler makes some 10,000 a second.
_PENDING = 100_000
# Seconds for which closing waits for the disk.
_PATIENCE = 5.0


class EventLog:
    """A sink of a `Recorder` that writes lines to a file.

    Parameters
    ----------
    open_ : callable () -> binary file
        Called in the thread.
    most : int
        Maximum size in bytes.
    name : str
        Name of the recording, for warnings.
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
        """Store the head, and start writing."""
        self._head = head  # it contains copies only, so that the thread may convert it
        self._thread.start()

    def put(self, record: Record) -> bool:
        """Queue a record; return whether more are wanted."""
        if self.is_over:
            return False
        if len(self._pending) >= _PENDING:
            self._behind = True
            self.stop()
            return False
        self._pending.append(record)
        return True

    def stop(self) -> None:
        """Let the thread write the queued records and end."""
        self._closing.set()

    def close(self) -> None:
        """Write the queued records; return when they are written, or after 5 s without progress.  It may block."""
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
        # Errors of the disk, and of values that cannot be recorded.
        except (OSError, TypeError, ValueError, RecursionError) as error:
            logger.warning("dask_ferro records no more events in %s: %s", self._name, error)
        finally:
            self.is_over = True
            self._pending.clear()

    def _is_done(self, file: BinaryIO) -> bool:
        """Write the queued records; return whether the recording is over."""
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
    """Return a log in a file; an existing recording is replaced, any other file is refused."""
    return EventLog(lambda: _opened(Path(path).expanduser()), most, path)


def _opened(path: Path) -> BinaryIO:
    if path.exists():
        with path.open("rb") as file:
            begins = file.read(len(FORM) + 3)
        if begins and begins != f'{{"{FORM}"'.encode():
            raise FileExistsError("the file exists, and is not a recording of events")
        # Unlinked rather than truncated: another process that still writes keeps its own file, and the two are not
        # mixed.
        path.unlink()
    return path.open("xb", buffering=1 << 16)


class EventsInMemory(EventLog):
    """A log kept in memory, compressed, for a client that fetches it at the end."""

    def __init__(self, most: int, name: str) -> None:
        self._kept = BytesIO()
        packed = cast(BinaryIO, gzip.GzipFile(fileobj=self._kept, mode="wb", compresslevel=1))
        super().__init__(lambda: packed, most, name)

    def taken(self) -> bytes:
        """Return the lines, compressed by gzip.  It blocks as `close` does."""
        self.close()
        return self._kept.getvalue()
