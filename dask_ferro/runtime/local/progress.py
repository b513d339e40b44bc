"""The progress of a computation: finished bundles and ops, ops a second, and the remaining seconds.

A part of the scheduler plugin counts finished tasks, including those done before it was put on; it is taken off when
all are done, or when its client leaves.  The remaining seconds are those of unfinished tasks, by the
mean of their prefix, divided by the seconds of tasks finished per second lately: this accounts for threads that come,
go or idle.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

from dask.typing import Key
from distributed import Client, Future, Scheduler
from distributed.comm.core import CommClosedError
from distributed.metrics import monotonic
from distributed.scheduler import TaskPrefix, TaskState

from dask_ferro.runtime.scheduler_plugin import Part, part_of, put_on, take_off

# Frequent enough to look alive; one request costs client and scheduler 0.6 ms together.
INTERVAL = 0.25
# Rates are averages over the last seconds: long enough to be steady, short enough to show workers come and go.
_WINDOW = 10.0


class Progress(NamedTuple):
    """The progress of a computation.

    Attributes
    ----------
    status : str
        "waiting" (the scheduler does not have all tasks yet), "running" or "finished".
    elapsed : float
        Seconds since the scheduler was first asked.
    tasks, bundles, ops : (int, int)
        Finished and total counts.  A task that is not a bundle has no ops.
    failed : int
        Tasks that failed, were cancelled, or depend on such; they do not count as finished.
    ops_per_s, tasks_per_s : float
        Rates of the last seconds while it runs; over the whole run once it is finished.
    remaining : float or None
        Projected seconds; None: unknown so far.
    """

    status: str
    elapsed: float
    tasks: tuple[int, int]
    bundles: tuple[int, int]
    ops: tuple[int, int]
    failed: int = 0
    ops_per_s: float = 0.0
    tasks_per_s: float = 0.0
    remaining: float | None = None


# ---- on the scheduler --------------------------------------------------------------------------------------


class Counting(Part):
    """A part of the scheduler plugin that counts the finished tasks among those that some keys of a client need."""

    def __init__(self, client: str, keys: Iterable[Key]) -> None:
        self.name = f"progress-{uuid4().hex}"
        self._client = client
        self._keys = set(keys)
        self._has_begun = False
        # Prefix and ops of each unfinished key.
        self._left: dict[Key, tuple[TaskPrefix, int]] = {}
        self._prefixes: Counter[TaskPrefix] = Counter()  # of those keys
        self._done = [0, 0, 0]  # tasks, bundles, ops
        self._all = [0, 0, 0]
        self._failed = 0
        self._seconds = 0.0  # of finished tasks

    def start(self, scheduler: Scheduler) -> None:
        """Begin to measure the elapsed time."""
        self._scheduler = scheduler
        self._began = monotonic()

    def task_left(
        self, ts: TaskState, finish: str, seconds: float | None, message: Mapping[str, Any]
    ) -> None:
        """Record that a task is finished, or never will be."""
        if self._count_end(ts, finish):
            self._seconds += seconds or 0.0

    def task_changed(self, ts: TaskState, start: str, finish: str) -> None:
        """Record that a task needs no worker, or gets none any more."""
        self._count_end(ts, finish)

    def _count_end(self, ts: TaskState, finish: str) -> bool:
        """Count a task that ends; return whether it is one of those, and finished."""
        if finish not in ("memory", "erred", "forgotten") or ts.key not in self._left:
            return False
        prefix, ops = self._left.pop(ts.key)
        self._prefixes[prefix] -= 1
        if finish != "memory":
            self._failed += 1
            return False
        _count(self._done, ops)
        return True

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Leave with the client."""
        if client == self._client:
            scheduler.loop.add_callback(take_off, self.name, dask_scheduler=scheduler)

    def look(self, cancelled: Iterable[Key] = ()) -> dict[str, Any]:
        """Return the current counts, in types that msgpack supports.

        Parameters
        ----------
        cancelled : iterable of key
            Keys that the client does not want any more, and that may never arrive.
        """
        if not self._has_begun:
            self._give_up(self._keys.intersection(cancelled) - self._scheduler.tasks.keys())
        if not self._has_begun and all(key in self._scheduler.tasks for key in self._keys):
            self._begin()
        is_over = self._has_begun and not self._left
        return {
            "status": "finished" if is_over else "running" if self._has_begun else "waiting",
            "elapsed": monotonic() - self._began,
            "done": list(self._done),
            "all": list(self._all),
            "failed": self._failed,
            "seconds": self._seconds,
            "left_seconds": self._left_seconds(),
        }

    def _give_up(self, keys: set[Key]) -> None:
        self._keys -= keys
        self._all[0] += len(keys)
        self._failed += len(keys)

    def _begin(self) -> None:
        self._has_begun = True
        targets = [self._scheduler.tasks[key] for key in self._keys]
        left = set(_needed(targets, lambda ts: ts.state not in ("memory", "erred")))
        for ts in _needed(targets, lambda ts: True):
            ops = ops_of(ts.run_spec)
            _count(self._all, ops)
            if ts in left:
                self._left[ts.key] = ts.prefix, ops
                self._prefixes[ts.prefix] += 1
            elif ts.state == "erred":
                self._failed += 1
            else:
                _count(self._done, ops)

    def _left_seconds(self) -> float | None:
        """Return the seconds of unfinished tasks; prefixes without measurements count with the mean of the others."""
        each = [(left, prefix.duration_average) for prefix, left in self._prefixes.items()]
        # Dask uses -1 for prefixes without measurements.
        known = [seconds for _, seconds in each if seconds >= 0]
        if not known:
            return None
        mean = sum(known) / len(known)
        return float(sum(left * (seconds if seconds >= 0 else mean) for left, seconds in each))


def _count(counts: list[int], ops: int) -> None:
    counts[0] += 1
    counts[1] += ops > 0
    counts[2] += ops


def _needed(targets: Iterable[TaskState], goes_on: Callable[[TaskState], bool]) -> Iterator[TaskState]:
    """Yield tasks and their dependencies, each once, without following those where `goes_on` is false."""
    seen = set(targets)
    stack = list(seen)
    while stack:
        ts = stack.pop()
        if goes_on(ts):
            yield ts
            new = ts.dependencies - seen
            seen |= new
            stack.extend(new)


def ops_of(spec: Any) -> int:
    """Return the ops that a task runs, including those of bundles fused into it; 0: it is not a bundle."""
    # If the module is not loaded, there are no bundles.
    bundles = sys.modules.get("dask_ferro.lower.worker.task")
    if bundles is None or not hasattr(spec, "func"):
        return 0
    if spec.func is bundles.run_bundle:
        return sum(count for _, count in spec.args[1].engines)
    return sum(map(ops_of, spec.args[0].values())) if spec.has_subgraph() else 0


async def _look(name: str, cancelled: Iterable[Key], dask_scheduler: Scheduler) -> dict[str, Any] | None:
    """Return the counts; take the part off that has counted all."""
    counting = part_of(dask_scheduler, Counting, name)
    if counting is None:
        return None
    counts = counting.look(cancelled)
    if counts["status"] == "finished":
        await take_off(name, dask_scheduler=dask_scheduler)
    return counts


# ---- in the client -----------------------------------------------------------------------------------------


class Pace:
    """Rates and remaining seconds, computed from successive counts."""

    def __init__(self) -> None:
        self._first: _ProgressSample | None = None
        self._lately: deque[_ProgressSample] = deque()

    def __call__(self, told: Mapping[str, Any]) -> Progress:
        """Return the progress for the newest counts."""
        (tasks, bundles, ops), totals = told["done"], told["all"]
        if told["status"] == "waiting":
            return Progress("waiting", told["elapsed"], (0, 0), (0, 0), (0, 0))
        now = _ProgressSample(told["elapsed"], tasks, ops, told["seconds"])
        is_over = told["status"] == "finished"
        since = self._since(now, is_over)
        return Progress(
            told["status"],
            now.elapsed,
            (tasks, totals[0]),
            (bundles, totals[1]),
            (ops, totals[2]),
            told["failed"],
            _rate(now.ops - since.ops, now.elapsed - since.elapsed),
            _rate(now.tasks - since.tasks, now.elapsed - since.elapsed),
            0.0 if is_over else _remaining(now, since, told["left_seconds"]),
        )

    def _since(self, now: _ProgressSample, is_over: bool) -> _ProgressSample:
        """Return the counts to compare with: from some seconds ago, or the first if nothing finished since."""
        self._first = first = self._first or now
        self._lately.append(now)
        while self._lately[0].elapsed < now.elapsed - _WINDOW:
            self._lately.popleft()
        oldest = self._lately[0]
        return first if is_over or oldest.tasks == now.tasks else oldest


class _ProgressSample(NamedTuple):
    elapsed: float
    tasks: int
    ops: int
    seconds: float


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _remaining(now: _ProgressSample, since: _ProgressSample, left: float | None) -> float | None:
    """Return the seconds of unfinished tasks, divided by the seconds of tasks finished per second."""
    threads = _rate(now.seconds - since.seconds, now.elapsed - since.elapsed)
    return None if left is None or threads <= 0 else left / threads


class Following:
    """Reads the progress of some keys from a client's scheduler.

    Parameters
    ----------
    client : distributed.Client
    futures : iterable of Future
        Held as long as this object, since keys that are not wanted are forgotten and never finish.
    interval : float
        Seconds between two requests.
    """

    def __init__(self, client: Client, futures: Iterable[Future], interval: float = INTERVAL) -> None:
        self._client = client
        self._futures = list(futures)
        self._interval = interval
        self._pace = Pace()
        self._name: str | None = None
        self._is_over = False

    async def read(self) -> Progress | None:
        """Wait for the interval and return the progress; None: the scheduler is gone, all is done, or it was closed."""
        if self._name is not None:
            await asyncio.sleep(self._interval)
        return await self.look()

    async def look(self) -> Progress | None:
        """Return the current progress; None as in `read`."""
        if self._is_over:
            return None
        try:
            if self._name is None:
                counting = Counting(self._client.id, [future.key for future in self._futures])
                await self._ask(put_on, part=counting)
                self._name = counting.name
            cancelled = [future.key for future in self._futures if future.cancelled()]
            counts = await self._ask(_look, name=self._name, cancelled=cancelled)
        except (CommClosedError, OSError):
            return None
        # `close` may have been called during the request.
        if self._is_over or counts is None:
            return None
        self._is_over = counts["status"] == "finished"
        return self._pace(counts)

    async def close(self) -> None:
        """Stop counting.  Idempotent."""
        self._is_over = True
        if self._name is not None:
            with suppress(CommClosedError, OSError):
                await self._ask(take_off, name=self._name)

    async def _ask(self, function: Callable[..., object], **arguments: object) -> Any:
        try:
            return await self._client.run_on_scheduler(function, **arguments)
        # A closed connection pool raises this too.
        except RuntimeError:
            if self._client.status in ("closing", "closed"):
                raise CommClosedError("the client is closed") from None
            raise
