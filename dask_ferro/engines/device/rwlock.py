"""A readers-writer lock: many threads share a device, or one uses it alone after its memory ran out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadersWriterLock:
    """A readers-writer lock that prefers writers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._waiting_writers = 0
        self._is_written = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock together with other readers."""
        with self._changed:
            # Behind waiting writers, which a stream of short readers would otherwise block forever.
            self._changed.wait_for(lambda: not self._is_written and not self._waiting_writers)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._changed:
            self._waiting_writers += 1
            try:
                self._changed.wait_for(lambda: not self._is_written and not self._readers)
            finally:
                # Also where a signal interrupts the wait: a writer that gave up must not block readers.
                self._waiting_writers -= 1
                self._changed.notify_all()
            self._is_written = True
        try:
            yield
        finally:
            with self._changed:
                self._is_written = False
                self._changed.notify_all()
