"""A simulated batch system, first on the PATH, and clusters on it."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import dask_ferro as ff
from tests.sites.batch import Batch
from tests.waiting import until

# How `ff.BatchCluster` is told of the second set of commands.
COMMANDS: dict[str, Any] = {
    "submit": "submit -J {name} -D {tag}",
    "submitted": r"Job <(?P<job_id>\d+)>",
    "list": "jobs",
    "listed": r"^(?P<job_id>\d+) +(?P<state>\w+) +(?P<tag>\S+)",
    "cancel": "stop {ids}",
    "directives": ["#X -n {cores} -W {minutes}"],
    "grace": 8.0,
}


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Batch]:
    """A batch system of four cores; nothing of it is left."""
    monkeypatch.chdir(tmp_path)  # jobs write to the folder that they were submitted from
    server = Batch()
    monkeypatch.setenv("PATH", f"{server.bin}:{os.environ['PATH']}")
    try:
        yield server
    finally:
        server.close()


class Opened:
    """A cluster, its client, and what its workers did."""

    def __init__(self, batch: Batch, kind: type[Any], tmp_path: Path, options: dict[str, Any]) -> None:
        settings: dict[str, Any] = {
            "cores": 1,
            "memory": "400MB",
            "processes": 1,
            "interface": "lo",
            "job_name": f"test-{uuid.uuid4().hex[:8]}",
            "scheduler_options": {"dashboard_address": "127.0.0.1:0", "interface": "lo"},
            "log_directory": str(tmp_path / "logs"),
            "local_directory": str(tmp_path / "scratch"),
        }
        self.batch, self.starts = batch, tmp_path / "starts"
        self.cluster = kind(**(settings | options))
        self.client = Client(self.cluster)

    def close(self) -> None:
        """Close it, and see that neither a job nor a watchdog is left."""
        self.client.close()
        self.cluster.close()
        assert self.batch.alive() == []
        name = self.cluster.job_name
        until(lambda: not watchdogs(name), "the end of the watchdog", seen=lambda: watchdogs(name))

    @property
    def workers(self) -> dict[str, Any]:
        return dict(self.client.scheduler_info(n_workers=-1)["workers"])

    def connected(self, count: int) -> None:
        until(
            lambda: len(self.workers) == count,
            f"{count} workers",
            seen=lambda: (list(self.workers), self.batch.states()),
        )

    def submit(self, count: int, seconds: float) -> list[Any]:
        return self.client.map(sleeper, range(count), seconds=seconds, log=str(self.starts), pure=False)

    def kept(self, held: list[Any]) -> None:
        """See that no result was lost, and no task ran twice."""
        assert self.client.gather(held) == list(range(len(held)))
        assert Counter(self.starts.read_text().split()) == Counter(map(str, range(len(held))))


def sleeper(number: int, seconds: float, log: str) -> int:
    with open(log, "a") as file:
        file.write(f"{number}\n")
    time.sleep(seconds)
    return number


def watchdogs(name: str) -> list[int]:
    """Processes that would cancel the jobs of that name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"dask-ferro-watchdog" in words and name.encode() in words:
            found.append(int(path.parent.name))
    return found


def _opening(
    batch: Batch, tmp_path: Path, kind: type[Any], given: dict[str, Any]
) -> Iterator[Callable[..., Opened]]:
    opened: list[Opened] = []

    def open_cluster(**options: Any) -> Opened:
        opened.append(Opened(batch, kind, tmp_path, given | options))
        return opened[-1]

    yield open_cluster
    for one in opened:
        one.close()


@pytest.fixture
def pbs(batch: Batch, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Makes clusters on simulated PBS, and closes them."""
    yield from _opening(batch, tmp_path, ff.PBSCluster, {"walltime": "00:30:00"})


@pytest.fixture
def described(batch: Batch, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Makes clusters on a batch system that is described by its commands, and closes them."""
    yield from _opening(batch, tmp_path, ff.BatchCluster, COMMANDS)
