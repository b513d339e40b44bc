"""Arrays in memory for workers of this host: a copy in memory without a name, which their processes map.

Dask sends rows in memory through two sockets, to the scheduler and to a worker.  Where the scheduler is in this process
and all workers are on this host, a task has the place of its rows instead.  The scheduler keeps the rows as long as a
task may need them, and the system frees them when no process has them, also where one was killed.
"""

from __future__ import annotations

import os
import time
from ipaddress import ip_address
from mmap import PROT_READ, mmap
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np

from dask_ferro.lower.upstream import forget_messages

# Other systems than Linux have no such memory.
HAS_MEMORY = hasattr(os, "memfd_create")
# Each takes two of the files that a process may have open, often 1,024.
_MAX_ARRAYS = 100
# A graph that was sent is read within milliseconds; one that cannot be sent would keep its memory for ever.
_SENT_S = 60.0


class Memory:
    """Memory of a process, as this process maps it."""

    def __init__(self, place: tuple[int, int], handle: int, nbytes: int) -> None:
        self.place, self.nbytes = place, nbytes
        self.mapped = mmap(handle, nbytes, prot=PROT_READ)
        self.address = np.frombuffer(self.mapped, np.uint8).ctypes.data


class Loan:
    """What the arrays have in common that a graph of the client has, and not the scheduler."""


# The memory of this process by its handle, and what was sent and not yet read by the scheduler, with the time.
_memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()
_unread: dict[int, tuple[Memory, float]] = {}


class SharedArray(np.ndarray):
    """An array in shared memory, whose pickle is its place there."""

    memory: Memory | None = None
    loan: Loan | None = None

    def __array_finalize__(self, whole: Any) -> None:
        """Keep the memory of the array that this one is a part of."""
        self.memory, self.loan = getattr(whole, "memory", None), getattr(whole, "loan", None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        memory = self.memory
        start = -1 if memory is None else self.ctypes.data - memory.address
        if memory is None or not (0 <= start < memory.nbytes and self.flags.c_contiguous):
            return np.asarray(self).__reduce_ex__(protocol)
        if self.loan is not None:
            _unread[memory.place[1]] = memory, time.monotonic()
        return _read, (memory.place, memory.nbytes, start, self.dtype, self.shape)


def _read(
    place: tuple[int, int], nbytes: int, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Any:
    pid, handle = place
    if pid == os.getpid():
        memory = _memories[handle]
        _unread.pop(handle, None)
    else:
        opened = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDONLY)
        try:
            memory = Memory(place, opened, nbytes)
        finally:
            os.close(opened)
    return _array(memory, start, dtype, shape)


def _array(memory: Memory, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> SharedArray:
    array = SharedArray(shape, dtype, memory.mapped, start)
    array.memory = memory
    return array


def is_on_this_host(client: Any) -> bool:
    """Whether all workers that a client ever has are on this host, as its scheduler is seen from no other."""
    from distributed import Scheduler
    from distributed.comm.addressing import get_address_host

    scheduler = getattr(client.cluster, "scheduler", None)
    if not isinstance(scheduler, Scheduler):
        return False
    try:
        return ip_address(get_address_host(scheduler.address)).is_loopback
    except ValueError:
        # A cluster that is closed has no address.
        return False


def share_array(value: np.ndarray, client: Any) -> np.ndarray | None:
    """Return a copy of an array that the workers of a client map; None where some may be on other hosts."""
    is_fit = HAS_MEMORY and len(_memories) < _MAX_ARRAYS and not value.dtype.hasobject
    if not is_fit or client is None or not is_on_this_host(client):
        return None
    now, scheduler = time.monotonic(), client.cluster.scheduler
    for handle in [handle for handle, (_, since) in _unread.items() if now - since > _SENT_S]:
        del _unread[handle]
    forget_messages(scheduler)
    try:
        memory = _copy_content(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    except OSError:
        # There is no room for it, or too many files are open.
        return None
    array = _array(memory, 0, value.dtype, value.shape)
    array.loan = Loan()
    # Dask keeps the last thousand messages to a worker, and the arrays of their tasks with them.
    finalize(array.loan, forget_messages, scheduler).atexit = False
    return array


def _copy_content(content: memoryview) -> Memory:
    handle = os.memfd_create("dask-ferro")
    try:
        # Written and not mapped: the system neither fills pages with zeros first nor looks them up one by one.
        at = 0
        while at < len(content):
            at += os.pwrite(handle, content[at:], at)
        memory = Memory((os.getpid(), handle), handle, len(content))
    except OSError:
        os.close(handle)
        raise
    finalize(memory, os.close, handle)
    _memories[handle] = memory
    return memory
