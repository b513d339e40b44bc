"""The execution of a collection on a cluster, measured: seconds, each worker's share, and the progress.

The caller decides what runs, how often, and where progress is shown.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from distributed import Client, get_task_stream

from dask_ferro.runtime.local.progress import Progress, followed


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
        # Beside the run, which its end does not have to wait for.
        loop: Any = client.loop
        watching = asyncio.run_coroutine_threadsafe(_watch(client, future, watch), loop.asyncio_loop)
        try:
            result = future.result()
            elapsed = time.perf_counter() - start
            watching.result()
        finally:
            watching.cancel()
    return MeasuredRun(result, elapsed, shares(stream.data))


async def _watch(client: Client, future: Any, watch: Watch | None) -> None:
    if watch is not None:
        async for seen in followed(client, [future]):
            watch(seen)


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
