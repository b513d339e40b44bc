"""A device that holds arrays and computes on them.

`CupyDevice` is a GPU; `benchmarks/emulated` has one with bounded memory on array_api_strict, for machines without.
CuPy computes products with cuBLAS, and convolution and attention as unrolled windows and batched products, also with
cuBLAS, because CuPy no longer has cuDNN.  bfloat16, strings and sequences fall back to the host's engines.  Sizes are
bytes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from math import prod
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from dask_ferro.engines import Array, Namespace

# Names of the dtypes of the array table, as in `graph.ir.dtypes.ANY`.  They are numpy's here, since that module imports
# ONNX, which takes 0.25 s: a worker whose device is measured or declared has no model yet, and others have tasks.
DTYPES = frozenset(np.dtype(code).name for code in np.typecodes["AllInteger"] + "?efdFD")
# CuPy reads this variable at its first product of float32 matrices.
_TF32 = "CUPY_TF32"
# A download of at least 256 KiB goes to page-locked memory, which a GPU writes several times as fast; at most 2 GiB of
# it are in use, since it is taken from all processes.
_MIN_PINNED, _MAX_PINNED = 256 << 10, 2 << 30
# CuPy's pool rounds each allocation up to a multiple of these bytes.
_POOL_MULTIPLE = 512


class Memory(NamedTuple):
    """A device's memory.

    Attributes
    ----------
    total, used : int
        Bytes of the device, and the bytes that its driver has given to all processes.
    own : int
        Bytes that arrays of this process occupy.
    kept : int
        Bytes that this process's pool keeps for reuse; the driver counts them as used.
    """

    total: int
    used: int
    own: int
    kept: int = 0

    @property
    def free(self) -> int:
        """Bytes that this process may still allocate."""
        return self.total - self.used + self.kept

    @property
    def live(self) -> int:
        """Bytes that this process cannot allocate."""
        return max(self.used - self.kept, self.own)

    @property
    def unused(self) -> int:
        """Bytes that the driver can give to any process."""
        return self.total - self.used


class Device(Protocol):
    """A device that computes, and holds arrays of its own.

    Attributes
    ----------
    name : str
        Unique in the process, such as "cuda:0".
    namespace : module-like
        The array API on its arrays.
    array_type : type
        Type of its arrays.
    dtypes : frozenset of str
        Names of the dtypes that it supports; nodes with other dtypes run on the host.
    tf32 : bool
        Whether products of float32 matrices may round their factors.
    """

    name: str
    namespace: Namespace
    array_type: type
    dtypes: frozenset[str]
    tf32: bool

    def to_device(self, array: np.ndarray) -> Array:
        """Return a copy on the device; raises MemoryError if it does not fit."""

    def to_host(self, array: Array) -> np.ndarray:
        """Return a copy on the host, after all work that this thread has queued."""

    def allocation(self, array: Array) -> int:
        """Return the bytes that an array keeps allocated; for a view, the bytes of its base."""

    def memory(self) -> Memory:
        """Return the current memory."""

    def release(self) -> None:
        """Return blocks without arrays to the driver."""

    def stream(self) -> AbstractContextManager[None]:
        """Queue the work of the context on the calling thread's own stream."""

    def synchronize(self) -> None:
        """Wait for the work that the calling thread has queued."""


class CupyDevice(Device):
    """A GPU, through CuPy.

    Parameters
    ----------
    ordinal : int
        Index among the devices of ``CUDA_VISIBLE_DEVICES``.
    tf32 : bool
        Whether products of float32 matrices may round their factors to 10 bits of mantissa.  This is several times as
        fast on Ampere and later, with errors of 1e-3 instead of 1e-6.  CuPy reads the setting at its first product.
    """

    dtypes = DTYPES

    def __init__(self, ordinal: int = 0, *, tf32: bool = False) -> None:
        # CuPy reads the setting at its first product, for the whole process.
        os.environ[_TF32] = str(int(tf32))
        import array_api_compat.cupy as namespace
        import cupy

        self.name = f"cuda:{ordinal}"
        self.tf32 = tf32
        self.namespace: Namespace = namespace
        self.array_type: type = cupy.ndarray
        self._cupy = cupy
        self._device = cupy.cuda.Device(ordinal)
        self._thread = threading.local()
        self._lock = threading.Lock()
        # Bytes of page-locked memory in use, and bytes of collected arrays, whose finalizers must not wait for a lock.
        self._locked, self._unlocked = 0, deque[int]()

    def to_device(self, array: np.ndarray) -> Array:
        return self._cupy.asarray(array)

    def to_host(self, array: Array) -> np.ndarray:
        # Without a target CuPy allocates the result.
        found: np.ndarray = self._cupy.asnumpy(array, out=self.page_locked(array.shape, array.dtype))
        return found

    def page_locked(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray | None:
        """Return an array in page-locked memory of CuPy's pool; None if it is small, or too much is in use."""
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        # The pool keeps a buffer of each size: of powers of two there are few.
        size = 1 << max(nbytes - 1, 0).bit_length()
        with self._lock:
            while self._unlocked:
                self._locked -= self._unlocked.popleft()
            if nbytes < _MIN_PINNED or self._locked + size > _MAX_PINNED:
                return None
            self._locked += size
        import cupyx

        try:
            buffer = cupyx.empty_pinned(size, np.uint8)
        except self._cupy.cuda.runtime.CUDARuntimeError:
            self._unlocked.append(size)
            return None
        # All views of the array keep this one.
        weakref.finalize(buffer, self._unlocked.append, size).atexit = False
        found: np.ndarray = buffer[:nbytes].view(dtype).reshape(shape)
        return found

    def allocation(self, array: Array) -> int:
        # The array's own allocation is larger by the rounding at most; a view's base by more.
        size = int(array.data.mem.size)
        return size if size - array.nbytes >= _POOL_MULTIPLE else int(array.nbytes)

    def memory(self) -> Memory:
        with self._device:
            return cupy_memory(self._cupy)

    def release(self) -> None:
        with self._device:
            self._cupy.get_default_memory_pool().free_all_blocks()
            self._cupy.get_default_pinned_memory_pool().free_all_blocks()

    @contextmanager
    def stream(self) -> Iterator[None]:
        with self._device, self._own():
            yield

    def synchronize(self) -> None:
        self._own().synchronize()

    def _own(self) -> Any:
        """Return this thread's stream."""
        # Non-blocking, because the legacy default stream would serialize the work of all threads.
        if not hasattr(self._thread, "stream"):
            with self._device:
                self._thread.stream = self._cupy.cuda.Stream(non_blocking=True)
        return self._thread.stream


def cupy_memory(cupy: ModuleType) -> Memory:
    """Return the memory of CuPy's current device, as reported by its driver and CuPy's pool; RMM's pools are not
    included.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        If the driver does not report it.
    """
    free, total = cupy.cuda.runtime.memGetInfo()
    pool = cupy.get_default_memory_pool()
    return Memory(total, total - free, pool.used_bytes(), pool.free_bytes())


def cupy_devices() -> int:
    """Return the number of devices that CuPy finds; 0 without CuPy or a driver."""
    if find_spec("cupy") is None:
        return 0
    # Imported on use, because the import takes a second.
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0
