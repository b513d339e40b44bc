"""What a process has built and may need again, bounded in bytes, least recently used first out.

Two threads that want the same thing build it once: the second waits for the first.  A thing larger than the
whole bound is handed out and not kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """Anything that knows how many bytes it holds."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""


T = TypeVar("T", bound=Sized)


class Cache(Generic[T]):
    """A least-recently-used cache of built things, bounded by the sum of their `nbytes`.

    Parameters
    ----------
    limit : int
        Bytes kept at most.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._kept: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()
        self._building: dict[Hashable, threading.Lock] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return what is kept under `key`, building it first if it is not there."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            turn = self._building.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                if key in self._kept:  # another thread built it while this one waited
                    return self._kept[key]
            try:
                built = build()
                with self._lock:
                    self._keep(key, built)
            finally:
                with self._lock:
                    self._building.pop(key, None)
            return built

    def drop(self, key: Hashable) -> None:
        """Forget what is kept under `key`, if anything is."""
        with self._lock:
            dropped = self._kept.pop(key, None)
            self.nbytes -= 0 if dropped is None else dropped.nbytes

    def trim(self, limit: int) -> None:
        """Forget the least recently used until no more than `limit` bytes are kept."""
        with self._lock:
            self._trim(limit)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self.nbytes = 0

    def _keep(self, key: Hashable, built: T) -> None:
        before = self._kept.pop(key, None)
        if before is not None:
            self.nbytes -= before.nbytes
        if built.nbytes > self.limit:
            return
        self._kept[key] = built
        self.nbytes += built.nbytes
        self._trim(self.limit)

    def _trim(self, limit: int) -> None:
        while self.nbytes > limit and self._kept:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes
