"""Run a collection on a cluster and tell what happened: seconds, which worker ran what, and how far it is.

Effects only: the caller decides what runs, how often, and who is shown what.  Durations are seconds.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from distributed import Client, get_task_stream, wait

# Often enough to look alive, and 1 % of a scheduler's time for a graph of 10,000 tasks.
_LOOK_EVERY_S = 0.25
_UNFINISHED = ("waiting", "no-worker", "queued", "processing")


class WorkerShare(NamedTuple):
    """What one worker did: tasks run, and seconds spent in them."""

    address: str
    tasks: int
    busy: float


class Measured(NamedTuple):
    """A run: its result in the client, the seconds until it was there, and each worker's share."""

    result: Any
    seconds: float
    workers: tuple[WorkerShare, ...]


Watch = Callable[[int, int], None]


def execute(client: Client, collection: Any, *, watch: Watch | None = None) -> Measured:
    """Compute a collection and bring its result here.

    Parameters
    ----------
    client : distributed.Client
    collection : Dask collection
    watch : callable, optional
        ``watch(done, total)``, tasks, called now and then while it runs.

    Raises
    ------
    Exception
        The error of the task that failed, as it was raised in the worker.
    """
    with get_task_stream(client) as stream:
        start = time.perf_counter()
        future = client.compute(collection)
        if watch is not None:
            _watch(client, future, watch)
        result = future.result()
        elapsed = time.perf_counter() - start
    return Measured(result, elapsed, shares(stream.data))


def shares(records: Iterable[dict[str, Any]]) -> tuple[WorkerShare, ...]:
    """Return each worker's share of the records of a task stream, by address."""
    tasks: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    for record in records:
        tasks[record["worker"]] += 1
        for span in record["startstops"]:
            if span["action"] == "compute":
                busy[record["worker"]] += span["stop"] - span["start"]
    return tuple(WorkerShare(w, tasks[w], float(busy[w])) for w in sorted(tasks))


def _watch(client: Client, future: Any, watch: Watch) -> None:
    total = 0
    while not future.done():
        try:
            wait([future], timeout=_LOOK_EVERY_S)
        except TimeoutError:
            left = client.run_on_scheduler(_unfinished, key=future.key)
            total = max(total, left)
            watch(total - left, total)
    if total:
        watch(total, total)


def _unfinished(key: Any, dask_scheduler: Any) -> int:
    """How many tasks that `key` depends on, itself included, are not done; runs in the scheduler."""
    if key not in dask_scheduler.tasks:
        return 0
    seen = {dask_scheduler.tasks[key]}
    stack = list(seen)
    while stack:
        new = stack.pop().dependencies - seen
        seen |= new
        stack.extend(new)
    return sum(task.state in _UNFINISHED for task in seen)
