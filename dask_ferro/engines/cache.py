"""A least-recently-used cache of built objects, bounded in bytes or in number.

When two threads request the same object, it is built once: the second thread waits for the first.  An object larger
than the whole bound is returned and not kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Generic, TypeVar

T = TypeVar("T")


class Cache(Generic[T]):
    """A least-recently-used cache of built objects, bounded by the sum of their sizes.

    Parameters
    ----------
    limit : int
        Maximum number of bytes to keep, or of objects.
    changed : callable, optional
        Called with the number of bytes that were just built or dropped; see `session.Returns`.
    size : callable or None
        Returns the size of an object, by default its `nbytes`; None: each counts as one.
    """

    def __init__(
        self,
        limit: int,
        changed: Callable[[int], None] | None = None,
        size: Callable[[T], int] | None = attrgetter("nbytes"),
    ) -> None:
        self.limit = limit
        self._changed = changed
        self._measured = size
        self.nbytes = 0
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()
        self._building: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, build: Callable[[], T], is_current: Callable[[T], bool] | None = None) -> T:
        """Return the object under `key`; it is built if the cache does not have it, or it is no longer current."""
        if (kept := self._found(key, is_current)) is not None:
            return kept
        with self._lock:
            turn = self._building.setdefault(key, threading.Lock())
        with turn:
            # Another thread may have built it in the meantime.
            if (kept := self._found(key, is_current)) is not None:
                return kept
            # Outside the cache's lock, because a build takes up to seconds and other threads need other keys.
            try:
                built = build()
                with self._lock:
                    dropped = self._keep(key, built)
            finally:
                with self._lock:
                    self._building.pop(key, None)
            self._tell(self._size(built) + dropped)
            return built

    def drop(self, key: Hashable) -> None:
        """Drop the object under `key`, if there is one."""
        with self._lock:
            dropped = self._drop(key)
        self._tell(dropped)

    def trim(self, limit: int) -> None:
        """Drop the least recently used objects until at most `limit` bytes are kept."""
        with self._lock:
            dropped = self._trim(limit)
        self._tell(dropped)

    def _found(self, key: Hashable, is_current: Callable[[T], bool] | None) -> T | None:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        # Without the lock, because it may look at files.
        if kept is None or is_current is None or is_current(kept):
            return kept
        self.drop(key)
        return None

    def _size(self, built: T) -> int:
        return 1 if self._measured is None else self._measured(built)

    def _tell(self, nbytes: int) -> None:
        if self._changed is not None and nbytes:
            self._changed(nbytes)

    def _keep(self, key: Hashable, built: T) -> int:
        """Keep an object, and return the number of bytes that were dropped for it."""
        dropped, size = self._drop(key), self._size(built)
        # It would evict everything else, and then itself.
        if size > self.limit:
            return dropped
        self._kept[key] = built
        self.nbytes += size
        return dropped + self._trim(self.limit)

    def _drop(self, key: Hashable) -> int:
        before = self._kept.pop(key, None)
        nbytes = 0 if before is None else self._size(before)
        self.nbytes -= nbytes
        return nbytes

    def _trim(self, limit: int) -> int:
        before = self.nbytes
        while self.nbytes > limit and self._kept:
            self._drop(next(iter(self._kept)))
        return before - self.nbytes
