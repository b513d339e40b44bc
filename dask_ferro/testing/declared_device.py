"""A declared device, for machines that have none: a worker says that it is a GPU, and tasks behave as if it were.

    Worker(..., plugins=[DeclaredDevice(faster=20.0, total=4 * BLOCK)])

Kernels (`compute`) sleep for the seconds of a CPU, or a twentieth of it; their results (`MemoryBlock`) stand for bytes
in the device's memory, take time on their way out of it and into it, and are refused where they do not fit, as by an
allocator.  The worker plugin asks it for what it would measure of a GPU (`runtime.worker.plugin.Measured`), so that
whatever decides is the same. Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dask.sizeof import sizeof
from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from dask_ferro.policy.estimates import OUT_OF_DEVICE, Speed
from dask_ferro.runtime import upstream_worker
from dask_ferro.runtime.worker.calibration import GpuMemory
from dask_ferro.runtime.worker.plugin import DEVICE
from dask_ferro.testing.emulated_device import OutOfMemory

# What the worker that the others are compared to does: a core, as numpy uses it.
CORE = Speed(1e11, 1e10)
# Of a copy whose seconds are told: so many that its latency is nothing beside them.
_LINK_BYTES = 64 * 2**20


@dataclass(eq=False)
class DeclaredDevice(WorkerPlugin):
    """A worker's declared device.

    Parameters
    ----------
    device : {"cpu", "gpu"}
    faster : float
        How many times as fast as `CORE` it is.
    total : int
        Bytes of its memory.
    bandwidth : float
        Bytes a second out of its memory, and into it.
    spills : bool
        Whether it moves results to the host to make room, as dask-cuda's workers do, and refuses no kernel.
    cached : int
        Bytes of weights and inputs that lie there and go where a kernel wants the room.
    """

    name = DEVICE

    device: str = "gpu"
    faster: float = 20.0
    total: int = 16 * 2**30
    bandwidth: float = OUT_OF_DEVICE.bandwidth
    spills: bool = False
    cached: int = 0

    def __post_init__(self) -> None:
        self.model = f"stand-in, {self.faster:g} times a core"
        self.speed = Speed(CORE.flops * self.faster, CORE.bandwidth * self.faster)

    def setup(self, worker: Worker) -> None:
        """Say what Dask says of a GPU as soon as the worker registers."""
        if self.device != "cpu":
            registered = {"memory-total": self.total, "name": self.model}
            upstream_worker.declare(worker, "gpu", lambda worker: registered)
            upstream_worker.publish(worker, "gpu", self._used)

    def _used(self, worker: Worker) -> dict[str, Any]:
        return {"utilization": 0, "memory-used": self.memory(worker)["used"]}

    def links(self) -> list[tuple[str, int, float]]:
        """Return what a copy to the host and one from there take, as `policy.estimates.Links` has it."""
        return [("device", _LINK_BYTES, self.copying(_LINK_BYTES))] * 2

    def memory(self, worker: Worker) -> GpuMemory:
        """Return the memory as `runtime.worker.calibration.memory` tells a GPU's."""
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
        """Allocate bytes for the result of a kernel whose inputs have come.

        Raises
        ------
        OutOfMemory
            Where results, inputs and these bytes are more than there is.
        """
        here = list(worker.data.values())
        # What was fetched for this task alone is in no store yet, and takes room all the same.
        known = {id(value) for value in here}
        live = _blocks(here) + _blocks(value for value in inputs if id(value) not in known)
        if live + nbytes > self.total and not self.spills:
            raise OutOfMemory(f"{nbytes} bytes do not fit: {live} of {self.total} are taken")

    def copying(self, nbytes: int) -> float:
        """Return the seconds of a copy out of the memory, or into it."""
        return OUT_OF_DEVICE.latency + nbytes / self.bandwidth


class MemoryBlock:
    """So many bytes in a device's memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What says that it lies there."""
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
    """Do what takes a core so many seconds, and return so many bytes where it was done.

    Raises
    ------
    OutOfMemory
        Where that is a device without the room.
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
    """Take the time of a copy where this process is one worker with a declared device; clients have none."""
    workers = [worker for worker in upstream_worker.workers_here() if of(worker) is not None]
    # Of several workers in one process nothing tells whose copy it is.
    device = of(workers[0]) if len(workers) == 1 else None
    if device is not None and device.device != "cpu":
        time.sleep(device.copying(nbytes))


def _blocks(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, MemoryBlock))
