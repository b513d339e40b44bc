"""Page-locked host memory that downloads are written to: a GPU writes it several times as fast as other memory.

Page-locking takes longer than a download and takes memory from all processes, so a buffer is used again when the array
on it is gone, and all buffers together stay below a limit; what is beyond it has no buffer.  Sizes are bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable

import numpy as np

# Of smaller arrays the call costs more than the copy; of larger ones a single buffer would be most of the limit.
_SMALLEST, _LARGEST = 256 << 10, 512 << 20


class PinnedBuffers:
    """Host arrays on page-locked buffers, which return here when the last view of an array is gone.

    Parameters
    ----------
    allocate : callable
        Returns the view of a page-locked buffer of some bytes, which is unlocked when it is dropped; raises
        MemoryError if the system locks no more.
    limit : int
        Bytes of all buffers, those in use and those kept for reuse.

    Examples
    --------
    >>> buffers = PinnedBuffers(lambda nbytes: memoryview(bytearray(nbytes)), limit=1 << 20)
    >>> array = buffers.empty((256, 512), np.float32)
    >>> array.nbytes, buffers.nbytes
    (524288, 524288)
    >>> buffers.empty((3,), np.float32) is None  # too small to gain
    True
    """

    def __init__(self, allocate: Callable[[int], memoryview], limit: int) -> None:
        self._allocate, self._limit = allocate, limit
        # Reentrant, because an array may be collected while this thread holds the lock.
        self._lock = threading.RLock()
        self._kept: defaultdict[int, list[memoryview]] = defaultdict(list)
        self.nbytes = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray | None:
        """Return an array with undefined values; None if it is too small, or no buffer may be made for it."""
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if not _SMALLEST <= nbytes <= _LARGEST:
            return None
        # Powers of two, so that arrays of similar sizes use each other's buffers.
        size = 1 << (nbytes - 1).bit_length()
        buffer = self._buffer(size)
        if buffer is None:
            return None
        root = np.frombuffer(buffer, np.uint8, nbytes)
        # Views of the array keep `root`, so the buffer is free when all of them are gone.
        weakref.finalize(root, self._returned, size, buffer).atexit = False
        return root.view(kind).reshape(shape)

    def _buffer(self, size: int) -> memoryview | None:
        with self._lock:
            if self._kept[size]:
                return self._kept[size].pop()
            if self.nbytes + size > self._limit:
                self._drop_kept()
            if self.nbytes + size > self._limit:
                return None
            self.nbytes += size
        try:
            return self._allocate(size)
        except MemoryError:
            with self._lock:
                self.nbytes -= size
            return None

    def _drop_kept(self) -> None:
        # An array may be collected meanwhile, whose buffer is kept again.
        kept, self._kept = self._kept, defaultdict(list)
        self.nbytes -= sum(size * len(buffers) for size, buffers in kept.items())

    def _returned(self, size: int, buffer: memoryview) -> None:
        with self._lock:
            self._kept[size].append(buffer)
