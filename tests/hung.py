"""A cluster of worker processes, and one of them that hangs: stopped by a signal, and let go on at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from distributed import Client, LocalCluster

from tests.waiting import BOUND_S


@contextmanager
def processes(count: int = 2) -> Iterator[Client]:
    """A client of a new cluster of so many worker processes of a thread each."""
    with (
        LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, timeout=BOUND_S) as client,
    ):
        yield client


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process within the block: it answers nothing, and its connections stay."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
