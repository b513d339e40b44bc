"""The properties of a worker's device: class, model, memory and speed.

FLOP/s and bytes/s are those of one process with its configured threads for linear algebra.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import numpy as np

from dask_ferro import config
from dask_ferro.engines.device.device import cupy_devices, cupy_memory
from dask_ferro.policy.estimates import Speed

# Seconds of repetitions of one kernel: ten times as many give the same figures, and take time from a worker's tasks.
_BUDGET = 0.005


class GpuMemory(TypedDict):
    """The memory of a process' GPU in bytes.

    `device` is the name in the environment, the same for all processes of a host that share one.  `used` and `total`
    refer to the whole device; `own` is allocated in this process; `live` is `used` without free blocks in this
    process's pools, and so is unavailable to any allocation; `evictable` is freed on demand, since it can be uploaded
    again.
    """

    device: str
    used: int
    total: int
    own: int
    live: int
    evictable: int


def detect_device() -> str:
    """Return the device class of this process: as configured, or else "gpu" if CuPy finds one."""
    device = config.value("worker.device")
    if device != "auto":
        return device
    return "gpu" if cupy_devices() else "cpu"


def memory() -> GpuMemory | None:
    """Return the memory of this process' GPU; None if its driver does not report it."""
    cupy = _cupy()
    try:
        found = cupy_memory(cupy)
    except cupy.cuda.runtime.CUDARuntimeError:
        return None
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
    return {
        "device": device,
        "used": found.used,
        "total": found.total,
        "own": found.own,
        "live": found.live,
        "evictable": _evictable(),
    }


def _evictable() -> int:
    """Return the bytes of caches on the device; 0 if the module that keeps them is not loaded."""
    resident = sys.modules.get("dask_ferro.engines.device.residency")
    here = resident.ProcessDevice.residency if resident is not None else None
    return 0 if here is None else here.evictable


class Figures(NamedTuple):
    """One-time measurements of a device: its speed, and its name."""

    speed: Speed
    model: str = ""


def figures(device: str) -> Figures:
    """Return all measurements of this process' device; GPU memory used for them is released."""
    if device != "gpu":
        return Figures(measure_speed(device))
    try:
        return Figures(measure_speed(device), model())
    finally:
        _cupy().get_default_memory_pool().free_all_blocks()


def model() -> str:
    """Return the name of this process' GPU."""
    return str(_cupy().cuda.runtime.getDeviceProperties(0)["name"].decode())


def _cupy() -> Any:
    # Imported here, since it takes a second, and few workers have a device.
    import cupy

    return cupy


def measure_speed(device: str) -> Speed:
    """Measure the best of some matrix products and copies; 20 ms, 64 MiB."""
    if device == "gpu":
        xp = _cupy()
        side, length, wait = 4096, 64 * 2**20, xp.cuda.Device().synchronize
    else:
        xp, side, length, wait = np, 512, 8 * 2**20, _do_nothing
    left = xp.ones((side, side), dtype=xp.float32)
    out = xp.empty_like(left)
    product = _best(lambda: xp.matmul(left, left, out=out), wait)
    source = xp.ones(length, dtype=xp.float32)
    target = xp.empty_like(source)
    copy = _best(lambda: xp.copyto(target, source), wait)
    return Speed(2 * side**3 / product, 2 * source.nbytes / copy)


def _do_nothing() -> None:
    """Do nothing: on a CPU, there is nothing to synchronise with."""


def _best(step: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return the fewest seconds of a step over repeated runs; the first run warms up."""
    best, runs, end = math.inf, 0, time.perf_counter() + _BUDGET
    while runs < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        wait()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best
