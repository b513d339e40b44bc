"""Functions that run in the processes of a cluster and return facts about them.

This module is sent as source text and compiled where it runs (`asking.Shipped`), so that it works in a process without
dask_ferro, and with another version of Python.  It imports only the standard library, and Dask where that is loaded; it
has no dataclasses, and no syntax newer than Python 3.9.  All results are dictionaries of plain types.  File systems are
read by a thread, for a limited time, so that one that hangs does not hold up the process.  Durations are seconds, sizes
bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata, util
from operator import itemgetter
from typing import Any

# Environment variables that set the threads of linear algebra.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# The names of the plugins, and of the part of stealing and placement, as `runtime.scheduler_plugin`,
# `runtime.worker.plugin` and `runtime.plugin.scheduler` define them; a test compares them.
SCHEDULER_PLUGIN, WORKER_PLUGIN, METRIC, SCHEDULING = "ferro", "ferro-worker", "ferro", "scheduling"
# What is returned: values of plain types by name.
Plain = dict[str, Any]
# Bytes at the beginning of a file that are compared, beside its size.
_HEAD = 2**20


def version_of(name: str) -> str | None:
    """Return the version of a package; "": it has none; None: it cannot be imported."""
    module = sys.modules.get(name)
    try:
        if module is None and util.find_spec(name) is None:
            return None
    # Whatever a finder raises, an import would raise it too.
    except Exception:  # noqa: BLE001
        return None
    # What is loaded counts: an upgrade since then is on disk only.  `vars`: dask_ferro reads its own on request.
    loaded = vars(module).get("__version__") if module is not None else None
    if isinstance(loaded, str):
        return loaded
    for distribution in (name.replace("_", "-"), name + "-gpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def process_facts(packages: Sequence[str], modules: Sequence[str]) -> Plain:
    """Return a process's host, versions, and which of `modules` it could import."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in packages},
        "modules": [name for name in modules if version_of(name) is not None],
    }


def scheduler_facts(packages: Sequence[str], modules: Sequence[str], dask_scheduler: Any) -> Plain:
    """Return the facts of the scheduler, and what it knows of its workers."""
    import dask

    began = time.time()
    plugin = getattr(dask_scheduler.plugins.get(SCHEDULER_PLUGIN), "parts", {}).get(SCHEDULING)
    settings = getattr(plugin, "settings", None)
    return {
        "process": process_facts(packages, modules),
        "plugin": plugin is not None,
        "stealing": str(getattr(settings, "stealing", "")),
        "placement": bool(getattr(settings, "placement", False)),
        "off": "" if plugin is not None else _why_off(),
        "steals": bool(dask.config.get("distributed.scheduler.work-stealing", True)),
        "validates": bool(dask.config.get("distributed.scheduler.validate", False)),
        "serves": "dashboard" in dask_scheduler.services,
        "workers": {address: _known(ws.identity()) for address, ws in dask_scheduler.workers.items()},
        "began": began,
        "ended": time.time(),
    }


def process_version(name: str) -> Plain:
    """Return the version of a package, as `version_of` does."""
    began = time.time()
    return {"version": version_of(name), "began": began, "ended": time.time()}


def worker_addresses(dask_scheduler: Any) -> Plain:
    """Return the addresses of the scheduler's workers."""
    return {"workers": list(dask_scheduler.workers), "began": time.time(), "ended": time.time()}


def _known(identity: Plain) -> Plain:
    """Return what the scheduler knows of a worker."""
    told = (identity.get("metrics") or {}).get(METRIC) or {}
    return {
        "name": str(identity["name"]),
        "status": str(identity.get("status", "")),
        "threads": int(identity["nthreads"]),
        "memory_limit": int(identity["memory_limit"] or 0),
        "device": str(told.get("device", "")),
    }


def _why_off() -> str:
    """Return why a scheduler with dask_ferro cannot have the plugin; "": it can, or has no dask_ferro."""
    if version_of("dask_ferro") is None:
        return ""
    try:
        from dask_ferro.runtime.upstream import missing

        return "; ".join(f"the installed Dask has no {name}" for name in missing())
    # Whatever another version, or a damaged installation, raises is the reason.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


async def worker_facts(
    packages: Sequence[str], modules: Sequence[str], probe: Sequence[Any], seconds: float, dask_worker: Any
) -> Plain:
    """Return the facts of a worker.

    Parameters
    ----------
    probe : (path, size, digest)
        A file that the client sees; empty: there is none.
    seconds : float
        For which its file systems are waited for.
    """
    began = time.time()
    local = str(dask_worker.local_directory)
    facts = {
        "process": process_facts(packages, modules),
        # Without dask_ferro, a stand-in has its name.
        "plugin": type(dask_worker.plugins.get(WORKER_PLUGIN)).__module__.startswith("dask_ferro"),
        "cores": _cores(),
        "omp": {name: os.environ.get(name) for name in THREADS},
        "gpus": len(_gpus()),
        "local_directory": local,
        "began": began,
    }
    facts["sees"] = await _within(seconds, partial(seen, *probe), "hangs") if probe else ""
    facts["disk"] = await _within(seconds, partial(file_system, local), "")
    # Last: a reader takes the time between the two as spent here.
    facts["ended"] = time.time()
    return facts


async def _within(seconds: float, call: Callable[[], str], otherwise: str) -> str:
    """Return the result of a call in a thread, or `otherwise` after some seconds."""
    loop = asyncio.get_running_loop()
    try:
        return str(await asyncio.wait_for(loop.run_in_executor(None, call), seconds))
    except asyncio.TimeoutError:  # noqa: UP041 - not the built-in one before Python 3.11
        return otherwise


def seen(path: str, size: int, digest: str) -> str:
    """Return "yes" if a file has a size and a digest, "other" if it is another one, "no" if it cannot be read."""
    try:
        found = fingerprint(path)
    except OSError:
        return "no"
    return "yes" if found == (size, digest) else "other"


def fingerprint(path: str) -> tuple[int, str]:
    """Return the size of a file, and a digest of its first MiB.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD)
        return os.fstat(file.fileno()).st_size, hashlib.sha256(head).hexdigest()


def file_system(path: str) -> str:
    """Return the type of the file system of a path, such as "ext4" or "nfs4"; "" if this system does not say."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            mounts = [line.split()[1:3] for line in file if len(line.split()) > 2]
    except OSError:
        return ""
    real = os.path.realpath(path)
    above = [(len(point), kind) for point, kind in mounts if _is_below(real, point.replace("\\040", " "))]
    # Sorted by the point's length; of several at one point, the last one is visible.
    return sorted(above, key=itemgetter(0))[-1][1] if above else ""


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _cores() -> list[int]:
    """Return the numbers of the cores that this process may use, no more of them than its share of time allows."""
    if hasattr(os, "sched_getaffinity"):
        cores: Iterable[int] = os.sched_getaffinity(0)
    else:
        cores = range(os.cpu_count() or 1)
    # Dask reads the limits of control groups, which do not show in the affinity.
    system = sys.modules.get("dask.system")
    return sorted(cores)[: max(int(getattr(system, "CPU_COUNT", 0)), 1) if system is not None else None]


def _gpus() -> list[str]:
    """Return the NVIDIA devices that this process may use, without loading a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [one for one in visible.split(",") if one.strip() not in ("", "-1", "NoDevFiles")]
    try:
        return [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    except OSError:
        return []
