"""A real browser, a real cluster with work on it, and where screenshots go."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import dask_ferro as ff
from tests import needs
from tests.clusters import running

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="pages are opened by Playwright, which is not installed"
)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Headless Chromium, the system's.

    Not for the session: while Playwright is on, this thread seems to run an event loop, and Dask's clients and
    `asyncio.run` of other tests take that for theirs.
    """
    needs.require("chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=needs.chromium(), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that FERRO_SCREENSHOTS names, or a temporary one."""
    folder = Path(os.environ.get("FERRO_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Place:
    """A cluster of two processes, and work that begins on one of them."""

    def __init__(self, cluster: Any, client: Client) -> None:
        self.cluster = cluster
        self.client = client
        self.root = cluster.dashboard_link.rsplit("/", 1)[0]
        self.futures: list[Any] = []

    def work(self, tasks: int = 40) -> None:
        """Submit chains of short tasks whose first would rather be on one worker."""
        first = min(self.client.scheduler_info()["workers"])
        seconds = random.Random(3)
        for _ in range(tasks):
            loaded = self.client.submit(
                _load, seconds.uniform(0.01, 0.08), workers=[first], allow_other_workers=True, pure=False
            )
            self.futures.append(self.client.submit(_refine, loaded, seconds.uniform(0.01, 0.05), pure=False))
        self.futures.append(self.client.submit(_total, self.futures[-tasks:], pure=False))


def _load(seconds: float) -> bytes:
    time.sleep(seconds)
    return bytes(20_000)


def _refine(value: bytes, seconds: float) -> bytes:
    time.sleep(seconds)
    return value


def _total(values: list[bytes]) -> int:
    return sum(map(len, values))


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The cluster, with the plugin from its first moment."""
    with running(2, threads=2, kind=ff.LocalCluster, dashboard_address="127.0.0.1:0") as client:
        yield Place(client.cluster, client)
