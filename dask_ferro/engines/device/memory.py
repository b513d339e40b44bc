"""The GPU memory that is available to a process, from the driver, CuPy's pool, and RMM's pool where it is in use.

    free    the driver's free bytes + the bytes that CuPy's allocator keeps for reuse (in its pool or in RMM's)
    kept    bytes that all pools of this process keep for reuse
    own     bytes that are allocated in this process

The driver counts a whole pool as used, also its unused blocks.  RMM's pool often takes 0.9 of a device (dask-cuda's
``--rmm-pool-size``).  RMM reports the bytes allocated from its pool only where a resource above the pool counts them
(``--rmm-track-allocations``).  An uncounted pool counts as fully allocated, because waiting too long is better than
running out of memory.  If one of the two switches is missing, a warning is logged once per process.  Sizes are bytes.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from types import ModuleType
from typing import NamedTuple

logger = logging.getLogger(__name__)


class ProcessMemory(NamedTuple):
    """The memory of a process's GPU.

    Attributes
    ----------
    total, used : int
        Bytes of the device, and the bytes that the driver has given to all processes.
    free : int
        Bytes that CuPy may still allocate.
    own : int
        Bytes that are allocated in this process.
    kept : int
        Bytes that this process's pools (CuPy's and RMM's) keep for reuse.
    """

    total: int
    used: int
    free: int
    own: int
    kept: int

    @property
    def live(self) -> int:
        """Bytes that this process cannot allocate: the used bytes less those that its pools keep."""
        return max(self.used - self.kept, self.own)


class RmmPool(NamedTuple):
    """RMM's memory: the bytes of its pool (0 without one), and the allocated bytes (None if they are not counted)."""

    nbytes: int
    used: int | None

    @property
    def kept(self) -> int:
        """Bytes that the pool keeps for reuse, as far as known."""
        return 0 if self.used is None else max(self.nbytes - self.used, 0)


def account(cupy: ModuleType) -> ProcessMemory:
    """Return the memory of CuPy's current device.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        The driver does not report it.
    """
    free, total = cupy.cuda.runtime.memGetInfo()
    pool = cupy.get_default_memory_pool()
    own, kept = pool.used_bytes(), pool.free_bytes()
    rmm = _rmm()
    if rmm is None:
        return ProcessMemory(total, total - free, free + kept, own, kept)
    is_cupys = _module(cupy.cuda.get_allocator()) == "rmm"
    _check(rmm, is_cupys, total)
    reach = free + kept + (rmm.kept if is_cupys else 0)
    return ProcessMemory(total, total - free, reach, own + (rmm.used or 0), kept + rmm.kept)


def _rmm() -> RmmPool | None:
    """Return RMM's current memory; None where this process does not use RMM."""
    # Not imported here: where RMM is in use, it has been imported.
    if "rmm" not in sys.modules:
        return None
    used, resource = None, sys.modules["rmm"].mr.get_current_device_resource()
    while resource is not None:
        if used is None and hasattr(resource, "get_allocated_bytes"):
            used = int(resource.get_allocated_bytes())
        # A resource below the pool counts the pool itself, not the allocations from it.
        if hasattr(resource, "pool_size"):
            return RmmPool(int(resource.pool_size()), used)
        resource = getattr(resource, "upstream_mr", None)
    return RmmPool(0, used)


def _module(function: object) -> str:
    """Return the package of an allocator."""
    # The package alone, because RMM's allocator has moved between its modules.
    return str(getattr(function, "__module__", None) or "").partition(".")[0]


def _check(rmm: RmmPool, is_cupys: bool, total: int) -> None:
    if rmm.nbytes and not is_cupys:
        _warn(
            f"RMM's pool has {rmm.nbytes:,} of {total:,} bytes of the GPU, and CuPy does not allocate there, so bundles"
            " can use only the rest; start the worker with --set-rmm-allocator-for-libs cupy (LocalCUDACluster:"
            ' rmm_allocator_external_lib_list="cupy")'
        )
    if rmm.used is None and (rmm.nbytes or is_cupys):
        _warn(
            "RMM's memory is in use and its allocations are not counted, so its whole pool counts as allocated;"
            " start the worker with --rmm-track-allocations (LocalCUDACluster: rmm_track_allocations=True)"
        )


@cache
def _warn(text: str) -> None:
    logger.warning("dask_ferro: %s", text)
