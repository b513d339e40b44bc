"""Functions that run in the processes of a cluster and return facts about them.

This module is sent as source text and compiled where it runs (`processes.Shipped`), so that it works in a process
without dask_ferro, and with another version of Python.  It imports only the standard library, and Dask where that is
loaded; it has no dataclasses, and no syntax newer than Python 3.9.  All results are dictionaries of plain types: the
fields of `facts.ProcessFacts`.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Sequence
from importlib import metadata, util
from typing import Any

# The names of the plugins, and of the part of stealing and placement, as `scheduler.plugin`,
# `scheduler.worker_plugin` and `scheduler.scheduling` define them; a test compares them.
SCHEDULER_PLUGIN, SCHEDULING, WORKER_PLUGIN = "ferro", "scheduling", "ferro-worker"
# What is returned: values of plain types by name.
PlainValues = dict[str, Any]


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


def process_facts(packages: Sequence[str]) -> PlainValues:
    """Return a process's host and versions."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in packages},
    }


def scheduler_facts(packages: Sequence[str], dask_scheduler: Any) -> PlainValues:
    """Return the facts of the scheduler, and the addresses of its workers."""
    parts = getattr(dask_scheduler.plugins.get(SCHEDULER_PLUGIN), "parts", ())
    return {
        **process_facts(packages),
        "plugin": SCHEDULING in parts,
        "workers": list(dask_scheduler.workers),
    }


def worker_facts(packages: Sequence[str], dask_worker: Any) -> PlainValues:
    """Return the facts of a worker."""
    plugin = dask_worker.plugins.get(WORKER_PLUGIN)
    return {
        **process_facts(packages),
        # Without dask_ferro, a stand-in has its name.
        "plugin": type(plugin).__module__.startswith("dask_ferro"),
        "status": dask_worker.status.name,
        "threads": dask_worker.state.nthreads,
        "memory_limit": int(dask_worker.memory_manager.memory_limit or 0),
        "gpus": len(_gpus()),
    }


def _gpus() -> list[str]:
    """Return the NVIDIA devices that this process may use, without loading a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [one for one in visible.split(",") if one.strip() not in ("", "-1", "NoDevFiles")]
    try:
        return [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    except OSError:
        return []
