"""The execution of a collection on a cluster, measured: seconds, each worker's share, and the progress.

The caller decides what runs, how often, and where progress is shown.  Durations are seconds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from distributed import Client, get_task_stream, wait

from dask_ferro.runtime.local.progress import INTERVAL, Following, Progress


class WorkerShare(NamedTuple):
    """One worker's share: tasks run, and seconds spent in them."""

    address: str
    tasks: int
    busy: float


class MeasuredRun(NamedTuple):
    """A measured run: the result in the client, the seconds until it arrived, and each worker's share."""

    result: Any
    seconds: float
    workers: tuple[WorkerShare, ...]


Watch = Callable[[Progress], None]


def execute(client: Client, collection: object, *, watch: Watch | None = None) -> MeasuredRun:
    """Compute a collection and fetch its result.

    Parameters
    ----------
    client : distributed.Client
    collection : Dask collection
    watch : callable, optional
        ``watch(progress)``, called at intervals during the run.

    Raises
    ------
    Exception
        The error of the failed task, as raised in the worker.
    """
    # Opened before the submission, since the first tasks may be done when that returns.
    with get_task_stream(client) as stream:
        start = time.perf_counter()
        future = client.compute(collection)
        if watch is not None:
            _watch(client, future, watch)
        result = future.result()
        elapsed = time.perf_counter() - start
    return MeasuredRun(result, elapsed, shares(stream.data))


def shares(records: Iterable[dict[str, Any]]) -> tuple[WorkerShare, ...]:
    """Return each worker's share from the records of a task stream, by address."""
    tasks: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    for record in records:
        tasks[record["worker"]] += 1
        for span in record["startstops"]:
            if span["action"] == "compute":
                busy[record["worker"]] += span["stop"] - span["start"]
    return tuple(WorkerShare(w, tasks[w], float(busy[w])) for w in sorted(tasks))


def _watch(client: Client, future: Any, watch: Watch) -> None:
    following = Following(client, [future])
    try:
        while not future.done():
            with suppress(TimeoutError):
                wait([future], timeout=INTERVAL)
            if (seen := client.sync(following.look)) is not None:
                watch(seen)
    finally:
        client.sync(following.close)
