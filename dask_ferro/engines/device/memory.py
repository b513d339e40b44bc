"""The memory of a GPU that a process can have: the driver's free bytes, CuPy's pool, and RMM's where it is in use.

    free    driver's free + what CuPy's allocator keeps for reuse (its own pool, or RMM's where it allocates there)
    kept    bytes that all pools of this process keep for reuse
    own     bytes that this process has given out

The driver sees a pool as taken, whether its blocks are in use or not.  RMM's is often 0.9 of a device (dask-cuda's
``--rmm-pool-size``).  It tells what is given out of it only where a resource above it counts that
(``--rmm-track-allocations``): an uncounted pool is taken as a whole, since a wait too long is better than a run out of
memory.  Either switch that is missing is a warning, once a process.  Sizes are bytes.
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
        Bytes of the device, and those that the driver has given to any process.
    free : int
        Bytes that CuPy may still allocate.
    own : int
        Bytes that this process has given out.
    kept : int
        Bytes that this process's pools keep for reuse, CuPy's and others.
    """

    total: int
    used: int
    free: int
    own: int
    kept: int

    @property
    def live(self) -> int:
        """Bytes that no allocation of this process can have: all that is used, less what its pools keep."""
        return max(self.used - self.kept, self.own)


class RmmPool(NamedTuple):
    """RMM's memory: the bytes of its pool, 0 without one; and those given out, None where nothing counts them."""

    nbytes: int
    used: int | None

    @property
    def kept(self) -> int:
        """Bytes that it keeps for reuse, as far as is known."""
        return 0 if self.used is None else max(self.nbytes - self.used, 0)


def account(cupy: ModuleType) -> ProcessMemory:
    """Return the memory of CuPy's current device.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        Where the driver does not tell.
    """
    free, total = cupy.cuda.runtime.memGetInfo()
    pool = cupy.get_default_memory_pool()
    own, kept = pool.used_bytes(), pool.free_bytes()
    # The driver counts all of a pool as used.
    rmm = _rmm()
    if rmm is None:
        return ProcessMemory(total, total - free, free + kept, own, kept)
    is_cupys = _module(cupy.cuda.get_allocator()) == "rmm"
    _check(rmm, is_cupys, total)
    reach = free + kept + (rmm.kept if is_cupys else 0)
    return ProcessMemory(total, total - free, reach, own + (rmm.used or 0), kept + rmm.kept)


def _rmm() -> RmmPool | None:
    """Return RMM's current memory; None where this process does not use it."""
    # Not imported here: where it is in use, it was imported before.
    if "rmm" not in sys.modules:
        return None
    used, resource = None, sys.modules["rmm"].mr.get_current_device_resource()
    while resource is not None:
        if used is None and hasattr(resource, "get_allocated_bytes"):
            used = int(resource.get_allocated_bytes())
        # A resource below the pool counts the pool itself, and not what is given out of it.
        if hasattr(resource, "pool_size"):
            return RmmPool(int(resource.pool_size()), used)
        resource = getattr(resource, "upstream_mr", None)
    return RmmPool(0, used)


def _module(function: object) -> str:
    """Return the package of an allocator."""
    # The package alone: RMM's allocator moved between its modules.
    return str(getattr(function, "__module__", None) or "").partition(".")[0]


def _check(rmm: RmmPool, is_cupys: bool, total: int) -> None:
    if rmm.nbytes and not is_cupys:
        _warn(
            f"RMM's pool has {rmm.nbytes:,} of {total:,} bytes of the GPU, and CuPy does not allocate there, so that"
            " bundles have the rest alone; start the worker with --set-rmm-allocator-for-libs cupy (LocalCUDACluster:"
            ' rmm_allocator_external_lib_list="cupy")'
        )
    if rmm.used is None and (rmm.nbytes or is_cupys):
        _warn(
            "RMM's memory is in use and nothing counts what is given out of it, so that all of its pool is taken to be"
            " in use; start the worker with --rmm-track-allocations (LocalCUDACluster: rmm_track_allocations=True)"
        )


@cache
def _warn(text: str) -> None:
    logger.warning("dask_ferro: %s", text)
