"""The GPUs that a process has and their memory, from the driver and CuPy's pool.  Sizes are bytes.

The driver counts a whole pool as used, also its unused blocks; of a pool of RMM's that is all that is known.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple


class ProcessMemory(NamedTuple):
    """The memory of a process's GPU.

    Attributes
    ----------
    total, used : int
        Bytes of the device, and the bytes that the driver has given to all processes.
    own : int
        Bytes that arrays of this process occupy.
    kept : int
        Bytes that this process's pool keeps for reuse.
    """

    total: int
    used: int
    own: int
    kept: int

    @property
    def free(self) -> int:
        """Bytes that this process may still allocate."""
        return self.total - self.used + self.kept

    @property
    def live(self) -> int:
        """Bytes that this process cannot allocate."""
        return max(self.used - self.kept, self.own)


def account(cupy: ModuleType) -> ProcessMemory:
    """Return the memory of CuPy's current device.

    Raises
    ------
    cupy.cuda.runtime.CUDARuntimeError
        The driver does not report it.
    """
    free, total = cupy.cuda.runtime.memGetInfo()
    pool = cupy.get_default_memory_pool()
    return ProcessMemory(total, total - free, pool.used_bytes(), pool.free_bytes())


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
