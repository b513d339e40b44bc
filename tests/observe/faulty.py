"""Clusters of real processes with faults made on purpose: preloads that run in a scheduler or a worker as it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed import Client, Nanny, Scheduler, SpecCluster

from tests.waiting import BOUND_S, ended, until

# Makes packages impossible to import, as where they are not installed.
_ABSENT = """
import sys
NAMES = {names!r}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Absent())
for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
    del sys.modules[name]
"""


def preload(folder: Path, text: str = "", absent: tuple[str, ...] = ()) -> str:
    """Write a preload that runs `text` and makes packages impossible to import; return its path."""
    path = folder / f"fault_{len(list(folder.iterdir()))}.py"
    path.write_text(text + (_ABSENT.format(names=absent) if absent else ""), encoding="utf-8")
    return str(path)


def release(folder: Path, package: str, version: str) -> str:
    """Return lines of a preload after which a package is installed in another release, by its metadata."""
    (folder / f"{package}-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n"
    (folder / f"{package}-{version}.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    return f"import sys\nsys.path.insert(0, {str(folder)!r})\n"


@contextmanager
def faulty_workers(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Client, dict[str, str]]]:
    """Start a worker process for each name, with its own options; yield a client, and the addresses by name."""
    common = {"nthreads": 1, "memory_limit": "1GiB", "host": "127.0.0.1"}
    specs = {name: {"cls": Nanny, "options": {**common, **own}} for name, own in workers.items()}
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": ":0", "port": 0, "host": "127.0.0.1"}}
    with SpecCluster(specs, scheduler=scheduler) as cluster, Client(cluster, timeout=BOUND_S) as client:
        client.wait_for_workers(len(specs), timeout=BOUND_S)
        rows = client.run_on_scheduler(_names)
        yield client, rows


def _names(dask_scheduler: Scheduler) -> dict[str, str]:
    return {str(ws.name): address for address, ws in dask_scheduler.workers.items()}


@contextmanager
def faulty_scheduler(folder: Path, fault: str, *more: str) -> Iterator[tuple[str, int]]:
    """Start a scheduler process with a preload; yield its address and its process id."""
    file = folder / "scheduler.json"
    words = [
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--dashboard-address",
        ":0",
        "--scheduler-file",
        str(file),
        "--preload",
        fault,
        *more,
    ]
    process = subprocess.Popen([sys.executable, "-m", "distributed.cli.dask_scheduler", *words])
    try:
        until(lambda: file.exists() and file.read_text(), "the scheduler's file")
        yield json.loads(file.read_text())["address"], process.pid
    finally:
        process.terminate()
        ended(process, "the end of the scheduler")
