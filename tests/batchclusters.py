"""Clusters of batch jobs for tests, on SLURM and on simulated batch systems, with the log of their workers' tasks."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distributed import Client

from tests.waiting import BOUND_S, until


def settings(folder: Path) -> dict[str, Any]:
    """Return the common options of these clusters: jobs of one thread, on this machine only."""
    return {
        "cores": 1,
        "memory": "400MB",
        "processes": 1,
        "interface": "lo",
        "job_name": f"test-{uuid.uuid4().hex[:8]}",
        "scheduler_options": {"dashboard_address": "127.0.0.1:0", "interface": "lo"},
        "log_directory": str(folder / "logs"),
    }


class Site:
    """A cluster, its client, and the log of its workers; `told` is the batch system's listing of its jobs."""

    def __init__(self, kind: type[Any], folder: Path, told: Callable[[Any], Any], **options: Any) -> None:
        self.starts, self._told = folder / "starts", told
        scratch = {"local_directory": str(folder / "scratch")}
        self.cluster = kind(**(settings(folder) | scratch | options))
        self.client = Client(self.cluster)

    def close(self) -> None:
        self.client.close()
        self.cluster.close()

    @property
    def workers(self) -> dict[str, Any]:
        return dict(self.client.scheduler_info(n_workers=-1)["workers"])

    def connected(self, count: int, seconds: float = BOUND_S) -> None:
        until(
            lambda: len(self.workers) == count,
            f"{count} workers",
            seconds=seconds,
            seen=lambda: (list(self.workers), self._told(self.cluster)),
        )

    def started(self) -> Counter[str]:
        """Return how often each task was started."""
        return Counter(self.starts.read_text().split()) if self.starts.exists() else Counter()

    def submit(self, count: int, seconds: float, **kwargs: Any) -> list[Any]:
        return self.client.map(
            sleeper, range(count), seconds=seconds, log=str(self.starts), pure=False, **kwargs
        )


def sleeper(number: int, seconds: float, log: str) -> int:
    with open(log, "a") as file:
        file.write(f"{number}\n")
    time.sleep(seconds)
    return number


def closing(made: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes sites, and close these at the end."""
    opened: list[Any] = []

    def make(**options: Any) -> Any:
        opened.append(made(**options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def watchdogs(name: str) -> list[int]:
    """Return the watchdog processes of the jobs with this name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"dask-ferro-watchdog" in words and name.encode() in words:
            found.append(int(path.parent.name))
    return found
