"""A least-recently-used cache of built objects, bounded in bytes.

When two threads request the same object, it is built once: the second thread waits for the first.  An object larger
than the whole bound is returned and not kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class HasBytes(Protocol):
    """An object with a size in bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""


T = TypeVar("T", bound=HasBytes)


class Cache(Generic[T]):
    """A least-recently-used cache of built objects, bounded by the sum of their `nbytes`.

    Parameters
    ----------
    limit : int
        The most bytes to keep.
    changed : callable, optional
        Called with the number of bytes that were just built or dropped; see `host_memory.Returns`.
    """

    def __init__(self, limit: int, changed: Callable[[int], None] | None = None) -> None:
        self.limit = limit
        self._changed = changed
        self.nbytes = 0
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()
        self._building: dict[Hashable, threading.Lock] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the object under `key`, which is built if the cache does not have it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            turn = self._building.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                # Another thread may have built it in the meantime.
                if key in self._kept:
                    return self._kept[key]
            # Outside the cache's lock, because a build takes up to seconds and other threads need other keys.
            try:
                built = build()
                with self._lock:
                    dropped = self._keep(key, built)
            finally:
                with self._lock:
                    self._building.pop(key, None)
            self._tell(built.nbytes + dropped)
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

    def _tell(self, nbytes: int) -> None:
        if self._changed is not None and nbytes:
            self._changed(nbytes)

    def _keep(self, key: Hashable, built: T) -> int:
        """Keep an object, and return the number of bytes that were dropped for it."""
        dropped = self._drop(key)
        # It would evict everything else, and then itself.
        if built.nbytes > self.limit:
            return dropped
        self._kept[key] = built
        self.nbytes += built.nbytes
        return dropped + self._trim(self.limit)

    def _drop(self, key: Hashable) -> int:
        before = self._kept.pop(key, None)
        nbytes = 0 if before is None else before.nbytes
        self.nbytes -= nbytes
        return nbytes

    def _trim(self, limit: int) -> int:
        before = self.nbytes
        while self.nbytes > limit and self._kept:
            self._drop(next(iter(self._kept)))
        return before - self.nbytes
