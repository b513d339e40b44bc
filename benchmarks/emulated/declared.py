"""A declared device, for machines without a GPU: a worker reports a GPU, and its tasks take the time of one.

    Worker(..., plugins=[DeclaredDevice(faster=20.0, total=4 * BLOCK)])

Kernels (`compute`) sleep for the seconds of a CPU divided by `faster`.  Their results (`MemoryBlock`) stand for bytes
in the device's memory: copying them in or out takes time, and allocating more than there is raises, as an allocator
does.  The worker plugin asks the device for what it would measure of a GPU (`scheduler.worker_plugin.Measured`), so
scheduling runs the production code.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dask.sizeof import sizeof
from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from dask_ferro.policy.estimates import Link, Speed
from dask_ferro.scheduler.calibration import GpuMemory
from dask_ferro.scheduler.worker_plugin import DEVICE
from emulated.device import OutOfMemory

# The speed of the reference worker: one core running numpy.
CORE = Speed(1e11, 1e10)
# Of a copy to the host or from it.
_COPY = Link(0.0002, 6e9)


@dataclass(eq=False)
class DeclaredDevice(WorkerPlugin):
    """A worker's declared device.

    Parameters
    ----------
    device : {"cpu", "gpu"}
    faster : float
        Its speed as a multiple of `CORE`.
    total : int
        Bytes of its memory.
    bandwidth : float
        Bytes per second of copies out of its memory and into it.
    spills : bool
        Whether it moves results to the host to make room, as dask-cuda's workers do, instead of refusing a kernel.
    cached : int
        Bytes of cached weights and inputs, which are evicted when a kernel needs the memory.
    """

    name = DEVICE

    device: str = "gpu"
    faster: float = 20.0
    total: int = 16 * 2**30
    bandwidth: float = _COPY.bandwidth
    spills: bool = False
    cached: int = 0

    def __post_init__(self) -> None:
        self.model = f"stand-in, {self.faster:g} times a core"
        self.speed = Speed(CORE.flops * self.faster, CORE.bandwidth * self.faster)

    def setup(self, worker: Worker) -> None:
        """Register the metrics that Dask reports of a GPU."""
        if self.device != "cpu":
            registered = {"memory-total": self.total, "name": self.model}
            worker.startup_information["gpu"] = lambda worker: registered
            worker.metrics["gpu"] = self._used

    def _used(self, worker: Worker) -> dict[str, Any]:
        return {"utilization": 0, "memory-used": self.memory(worker)["used"]}

    def memory(self, worker: Worker) -> GpuMemory:
        """Return the device's memory in the form of `scheduler.calibration.memory`."""
        live = min(_blocks(worker.data.values()) + self.cached, self.total)
        return {
            "device": worker.address,
            "used": live,
            "total": self.total,
            "own": live,
            "live": live,
            "evictable": self.cached,
        }

    def take(self, worker: Worker, nbytes: int, inputs: Iterable[Any] = ()) -> None:
        """Allocate bytes for the result of a kernel whose inputs are present.

        Raises
        ------
        OutOfMemory
            If results, inputs and these bytes exceed the device's memory.
        """
        here = list(worker.data.values())
        # Inputs that were fetched for this task only are not in the worker's data, but take memory too.
        known = {id(value) for value in here}
        live = _blocks(here) + _blocks(value for value in inputs if id(value) not in known)
        if live + nbytes > self.total and not self.spills:
            raise OutOfMemory(f"{nbytes} bytes do not fit: {live} of {self.total} are taken")


class MemoryBlock:
    """A block of bytes in a device's memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The marker of data in device memory."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (0, True), "version": 3}

    def __reduce__(self) -> tuple[Any, ...]:
        _copy(self.nbytes)
        return _arrived, (self.nbytes,)


@sizeof.register(MemoryBlock)
def _size(block: MemoryBlock) -> int:
    return block.nbytes


def _arrived(nbytes: int) -> MemoryBlock:
    _copy(nbytes)
    return MemoryBlock(nbytes)


def compute(seconds: float, nbytes: int, *inputs: Any) -> Any:
    """Sleep as long as the worker would take for `seconds` of a core, and return `nbytes` in its memory.

    Raises
    ------
    OutOfMemory
        If the worker has a device and its memory is too small.
    """
    worker = get_worker()
    device = of(worker)
    if device is None or device.device == "cpu":
        time.sleep(seconds / (1.0 if device is None else device.faster))
        return bytes(nbytes)
    device.take(worker, nbytes, inputs)
    time.sleep(seconds / device.faster)
    return MemoryBlock(nbytes)


def of(worker: Any) -> DeclaredDevice | None:
    """Return a worker's declared device, or None."""
    found = worker.plugins.get(DEVICE)
    return found if isinstance(found, DeclaredDevice) else None


def _copy(nbytes: int) -> None:
    """Sleep for the time of a copy if this process is a worker with a declared device; do nothing in a client."""
    # Dask keeps the workers of a process in a weak set, which may shrink during a loop.
    workers = [worker for worker in list(Worker._instances) if of(worker) is not None]
    # With several workers in one process, the copy cannot be assigned to one of them.
    device = of(workers[0]) if len(workers) == 1 else None
    if device is not None and device.device != "cpu":
        time.sleep(_COPY.latency + nbytes / device.bandwidth)


def _blocks(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, MemoryBlock))
