"""A simulated batch system, first on the PATH, and clusters on it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dask_ferro as ff
from tests.batchclusters import Site, closing, watchdogs
from tests.sites.batch import Batch
from tests.waiting import until

# How `ff.BatchCluster` gets the second set of commands.
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


class Opened(Site):
    """A cluster on a simulated batch system."""

    def __init__(self, batch: Batch, kind: type[Any], tmp_path: Path, **options: Any) -> None:
        self.batch = batch
        super().__init__(kind, tmp_path, lambda cluster: batch.states(), **options)

    def close(self) -> None:
        """Close it, and see that neither a job nor a watchdog is left."""
        super().close()
        assert self.batch.alive() == []
        name = self.cluster.job_name
        until(lambda: not watchdogs(name), "the end of the watchdog", seen=lambda: watchdogs(name))

    def kept(self, held: list[Any]) -> None:
        """See that no result was lost, and no task ran twice."""
        assert self.client.gather(held) == list(range(len(held)))
        assert self.started() == Counter(map(str, range(len(held))))


@pytest.fixture
def pbs(batch: Batch, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Makes clusters on simulated PBS, and closes them."""
    yield from closing(partial(Opened, batch, ff.PBSCluster, tmp_path, walltime="00:30:00"))


@pytest.fixture
def described(batch: Batch, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Makes clusters on a batch system that is described by its commands, and closes them."""
    yield from closing(partial(Opened, batch, ff.BatchCluster, tmp_path, **COMMANDS))
