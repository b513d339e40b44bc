"""The properties of a worker's device: class, model, memory and speed.

Speed is measured once per host and day, and kept in the user's temporary folder.

FLOP/s and bytes/s are those of one process with its configured threads for linear algebra.  Workers of one host start
together: the first one measures, the others wait for its figures.  If the folder cannot be written or trusted, a file
is damaged or the lock's holder hangs, the worker measures by itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from dask_ferro import config, portable
from dask_ferro.engines.device.device import cupy_devices
from dask_ferro.engines.device.memory import account
from dask_ferro.errors import ConfigError
from dask_ferro.options import DEVICES
from dask_ferro.policy.estimates import Speed

logger = logging.getLogger(__name__)

# Seconds of repetitions of one kernel.
_BUDGET = 0.05
# Seconds for which figures are valid; the machine may have been busy when they were measured.
_FRESH = 86_400.0
# Seconds of waiting for another process that measures: 20 times the usual duration.
_QUEUE = 5.0
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def declared(device: str | None) -> str | None:
    """Return a device class unchanged if it is valid or None.

    Raises
    ------
    ConfigError
        For another name.
    """
    if device is not None and device not in DEVICES:
        raise ConfigError(f"device: got {device!r}, wanted one of {', '.join(DEVICES)}")
    return device


def detected() -> str:
    """Return the device class of this process: as configured, or else "gpu" if CuPy finds one."""
    device = config.value("worker.device")
    if device != "auto":
        return device
    return "gpu" if cupy_devices() else "cpu"


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


def memory() -> GpuMemory | None:
    """Return the memory of this process' GPU; None if its driver does not report it."""
    cupy = _cupy()
    try:
        found = account(cupy)
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
    here = resident.current() if resident is not None else None
    return 0 if here is None else here.evictable


class Figures(NamedTuple):
    """One-time measurements of a device: its speed, and its name."""

    speed: Speed
    model: str = ""


def figures(device: str) -> Figures:
    """Return all measurements of this process' device; GPU memory used for them is released."""
    if device != "gpu":
        return Figures(speed(device))
    try:
        return Figures(speed(device), model())
    finally:
        _cupy().get_default_memory_pool().free_all_blocks()


def model() -> str:
    """Return the name of this process' GPU."""
    return str(_cupy().cuda.runtime.getDeviceProperties(0)["name"].decode())


def _cupy() -> Any:
    # Imported here, since it takes a second, and few workers have a device.
    import cupy

    return cupy


def speed(device: str) -> Speed:
    """Return the speed of this host's device: measured, or read from another worker's measurement."""
    try:
        file = _folder() / f"{_machine(device)}.json"
        with _alone(file.with_suffix(".lock")):
            found = _remembered(file)
            if found is None:
                found = measured(device)
                _remember(file, found)
            return found
    except OSError as error:
        logger.info("dask_ferro: speeds are not kept on this host: %s", error)
        return measured(device)


def measured(device: str) -> Speed:
    """Measure the best of some matrix products and copies; 0.15 s, 64 MiB."""
    if device == "gpu":
        xp = _cupy()
        side, length, wait = 4096, 64 * 2**20, xp.cuda.Device().synchronize
    else:
        xp, side, length, wait = np, 512, 8 * 2**20, _nothing
    left = xp.ones((side, side), dtype=xp.float32)
    out = xp.empty_like(left)
    product = _best(lambda: xp.matmul(left, left, out=out), wait)
    source = xp.ones(length, dtype=xp.float32)
    target = xp.empty_like(source)
    copy = _best(lambda: xp.copyto(target, source), wait)
    return Speed(2 * side**3 / product, 2 * source.nbytes / copy)


def _nothing() -> None:
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


# ---- once for a host ---------------------------------------------------------------------------------------


def _machine(device: str) -> str:
    """Return a name for all that a speed depends on."""
    name = model() if device == "gpu" else ""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = [os.environ.get(variable) for variable in _THREADS]
    facts = [platform.node(), platform.machine(), cores, threads, device, name, np.__version__]
    return hashlib.sha256(json.dumps([version("dask-ferro"), *facts]).encode()).hexdigest()[:16]


def _folder() -> Path:
    """Return the user's own folder; OSError if another user made it or may write there, or on Windows."""
    user = portable.user_id()
    folder = Path(tempfile.gettempdir()) / f"dask-ferro-{user}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    shared = stat.S_IWGRP | stat.S_IWOTH
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & shared:
        raise PermissionError(f"{folder} is not this user's own folder (owner {user}, mode 0700)")
    return folder


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a file's lock; continue without it if its holder takes too long."""
    with open(lock, "a") as file:
        end, is_locked = time.monotonic() + _QUEUE, False
        while not is_locked and time.monotonic() < end:
            try:
                portable.lock(file.fileno())
                is_locked = True
            except BlockingIOError:
                time.sleep(0.01)
        # Closing the file, or the end of the process, releases the lock.
        yield


def _remembered(file: Path) -> Speed | None:
    """Return the speed stored in a file; None if it is missing, outdated or damaged."""
    try:
        if time.time() - file.stat().st_mtime > _FRESH:
            return None
        found = json.loads(file.read_text())
        figures = Speed(float(found["flops"]), float(found["bandwidth"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return figures if all(math.isfinite(f) and f > 0 for f in figures) else None


def _remember(file: Path, figures: Speed) -> None:
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(figures._asdict()))
    os.replace(partial, file)
