"""A scheduler and workers in the test's own process and loop, with stock Dask's stealing or with ours.

What ran where, and what moved, is read from the workers' own logs: it means the same whichever scheduler decided.
Stock Dask looks every 20 ms here, not every second: what it does not do then, it never does.
Durations are seconds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import dask
from dask.utils import key_split
from distributed import Client, Future, Scheduler, Worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.scheduler import WorkerState
from distributed.worker_state_machine import ComputeTaskEvent, ExecuteSuccessEvent, StealRequestEvent

import dask_ferro as ff
from dask_ferro.runtime.worker.plugin import METRIC
from tests.upstream_pains import jobs
from tests.waiting import BOUND_S, until_async

Way = Literal["stock", "ours"]

# Thirty of stock Dask's looks, and one of our slow ticks.
A_WHILE_S = 0.6
_LOOKS = 30
_PATIENCE_S = 20.0

CONFIG = {
    "distributed.scheduler.work-stealing": True,
    "distributed.scheduler.work-stealing-interval": "20ms",
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.worker.profile.enabled": False,
    "distributed.admin.low-level-log-length": 100_000,
}


class Scene:
    """A running cluster, and what its workers did since the last `learn`."""

    client: Client

    def __init__(self, scheduler: Scheduler, way: Way, reports: bool) -> None:
        self.scheduler = scheduler
        self.way = way
        self.reports = reports
        self.workers: list[Worker] = []
        self._count = 0
        self._wanted: list[Future] = []  # a task whose future is gone is not run

    # -- what there is -------------------------------------------------------------------------------------

    async def join(
        self,
        threads: int = 1,
        resources: Mapping[str, float] | None = None,
        plugins: Sequence[WorkerPlugin] = (),
    ) -> Worker:
        """Start one more worker."""
        worker = await Worker(
            self.scheduler.address,
            nthreads=threads,
            resources=dict(resources or {}),
            validate=True,
            name=str(len(self.workers)),
            plugins=plugins,
        )
        if not self.reports:
            worker.periodic_callbacks["heartbeat"].stop()
        self.workers.append(worker)
        return worker

    async def blocks(self, count: int, nbytes: int, on: Worker) -> list[Future]:
        """Put blocks of data on a worker."""
        made = [jobs.Block(nbytes) for _ in range(count)]
        futures: list[Future] = await self.client.scatter(made, workers=[on.address], hash=False)
        return futures

    def map(
        self,
        count: int,
        job: Callable[..., Any],
        *args: Any,
        name: str = "job",
        on: Sequence[Worker] = (),
        strictly: bool = False,
        each: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[Future]:
        """Submit so many tasks of a prefix at once, the most urgent first; pinned, softly by default.

        `args` are the same for all; of `each`, every task has its own as its last one.
        """
        if on:
            options |= {"workers": [w.address for w in on], "allow_other_workers": not strictly}
        keys = [(name, self._count + i) for i in range(count)]
        self._count += count
        own = [] if each is None else [each]
        futures: list[Future] = self.client.map(job, *([a] * count for a in args), *own, key=keys, **options)
        self._wanted += futures
        return futures

    async def learn(self, seconds: float, *names: str) -> None:
        """Let the scheduler measure prefixes, to so many seconds each.  Then the logs start anew."""
        for name in names:
            await self.map(1, jobs.take, seconds, name=name, on=self.workers[:1])[0]
            self.scheduler.task_prefixes[name].duration_average = seconds  # whatever else the machine did
        for worker in self.workers:
            worker.state.stimulus_log.clear()

    async def occupy(
        self,
        on: Worker,
        job: Callable[..., Any] = jobs.behind,
        *,
        name: str = "gate",
        gate: str = "gate",
        **options: Any,
    ) -> None:
        """Run a task on a worker until a gate opens."""
        (future,) = self.map(1, job, gate, name=name, on=[on], **options)
        await self.until(
            lambda: any(ts.key == future.key for ts in on.state.all_running_tasks), f"{future.key} to run"
        )

    def of_ours(self, **options: Any) -> dict[str, Any]:
        """Return options that only ours has; none for stock Dask."""
        return options if self.way == "ours" else {}

    def state(self, worker: Worker) -> WorkerState:
        """Return what the scheduler believes of a worker."""
        return self.scheduler.workers[worker.address]

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Switch stealing off while a state is put together."""
        if self.way == "ours":
            await ff.install(self.client, stealing="none")
            yield
            await ff.install(self.client)
        else:
            looks = self.scheduler.periodic_callbacks["stealing"]
            looks.stop()
            yield
            looks.start()

    # -- what happened -------------------------------------------------------------------------------------

    def ran(self, name: str = "job") -> list[int]:
        """Tasks of a prefix that each worker has run to their ends, in the workers' order."""
        return [len(self.keys_run(worker, name)) for worker in self.workers]

    def keys_run(self, worker: Worker, name: str = "job") -> list[int]:
        """Numbers of the tasks of a prefix that a worker has run to their ends, in ascending order."""
        return sorted(key[1] for key in _keys(worker, ExecuteSuccessEvent) if key_split(key) == name)

    @property
    def requested(self) -> int:
        """Requests to victims so far."""
        return sum(len(_keys(worker, StealRequestEvent)) for worker in self.workers)

    def removals(self) -> list[dict[str, Any]]:
        """Return what the scheduler noted of each worker that it removed, the first one first."""
        events = [event for _, event in self.scheduler.get_events("all")]
        return [event for event in events if event["action"] == "remove-worker"]

    @property
    def given(self) -> Counter[Any]:
        """How many times each task was given to a worker: two are one move."""
        return Counter(key for worker in self.workers for key in _keys(worker, ComputeTaskEvent))

    # -- time ----------------------------------------------------------------------------------------------

    async def until(self, is_true: Callable[[], bool], what: str) -> None:
        """Wait for something that is sure to come."""
        await until_async(is_true, what, seconds=_PATIENCE_S, every=0.002, seen=self._waiting)

    def _waiting(self) -> list[int]:
        """Tasks that each worker has, as far as the scheduler knows, in the workers' order."""
        states = (self.scheduler.workers.get(w.address) for w in self.workers)
        return [0 if state is None else len(state.processing) for state in states]

    async def told(self) -> None:
        """Wait until our scheduler plugin has every worker's facts; stock Dask has none."""
        if self.way == "ours":
            ledger = self.scheduler.extensions["stealing"].ledger
            states = self.scheduler.workers.values()
            await self.until(
                lambda: all(METRIC in (ws.metrics or {}) for ws in states) and ledger.counts_bytes,
                "word of every worker",
            )

    async def done(self, futures: Iterable[Future], errors: str = "raise") -> None:
        """Wait for results; "skip": or errors."""
        async with asyncio.timeout(_PATIENCE_S):
            await self.client.gather(list(futures), errors=errors)

    async def finished(self, futures: Sequence[Future]) -> int:
        """Return how many of the tasks end within a while."""
        for _ in range(int(A_WHILE_S / 0.02)):
            if all(future.done() for future in futures):
                break
            await asyncio.sleep(0.02)
        return sum(future.done() for future in futures)

    async def rest(self) -> None:
        """Open the gates and wait until nothing runs: a worker that is closed meanwhile says so, at length."""
        jobs.open_all()
        await self.client.cancel(self._wanted)
        await self.until(
            lambda: not any(w.state.all_running_tasks for w in self.workers), "the end of all that runs"
        )
        if self.way == "ours":
            await ff.uninstall(self.client)

    async def close_workers(self) -> None:
        """Stop all workers."""
        await asyncio.gather(*(worker.close(nanny=False) for worker in self.workers))

    async def looks(self) -> None:
        """Let who steals look thirty times, and see what came of each: what is not done then never is."""
        stealing = self.scheduler.extensions["stealing"]
        for _ in range(_LOOKS):
            self.scheduler.periodic_callbacks["stealing"].callback()
            await self.until(
                lambda: not stealing.in_flight and self._has_arrived(), "the answers, and the tasks that move"
            )

    def _has_arrived(self) -> bool:
        """Whether the workers have heard of all tasks that the scheduler gave them."""
        return all(
            ts.key in worker.state.tasks for worker in self.workers for ts in self.state(worker).processing
        )


def _keys(worker: Worker, kind: type) -> list[Any]:
    return [event.key for event in worker.state.stimulus_log if isinstance(event, kind)]


@asynccontextmanager
async def _opened(
    way: Way, workers: int, resources: Mapping[str, float] | None, reports: bool
) -> AsyncIterator[Scene]:
    """Start a cluster, with our plugin where asked for, and take everything down again."""
    jobs.shut_all()
    with dask.config.set(CONFIG):
        async with AsyncExitStack() as stack:
            scheduler = Scheduler(
                protocol="inproc://", dashboard=False, dashboard_address=":0", validate=True
            )
            await stack.enter_async_context(scheduler)
            scene = Scene(scheduler, way, reports)
            stack.push_async_callback(scene.close_workers)
            for _ in range(workers):
                await scene.join(resources=resources)
            await joined(stack, scene, scheduler.address)
            yield scene


async def joined(stack: AsyncExitStack, scene: Scene, where: Any) -> None:
    """Give a scene its client, and our plugin where asked for, until the stack is closed."""
    scene.client = await stack.enter_async_context(Client(where, asynchronous=True))
    stack.push_async_callback(scene.rest)
    if scene.way == "ours":
        await ff.install(scene.client)


def played(
    opened: Callable[[Way], AbstractAsyncContextManager[Any]],
) -> Callable[[Callable[[Any], Awaitable[None]]], Callable[[Way], None]]:
    """Make a test of a play, to be run on a fresh cluster for each way."""

    def as_test(play: Callable[[Any], Awaitable[None]]) -> Callable[[Way], None]:
        async def run(way: Way) -> None:
            async with asyncio.timeout(BOUND_S), opened(way) as scene:
                await play(scene)

        def test(way: Way) -> None:
            asyncio.run(run(way))

        test.__name__, test.__doc__ = play.__name__, play.__doc__
        return test

    return as_test


def on_a_scene(
    workers: int = 2, resources: Mapping[str, float] | None = None, reports: bool = False
) -> Callable[[Callable[[Any], Awaitable[None]]], Callable[[Way], None]]:
    """Make a test of a play on one-thread workers.

    Parameters
    ----------
    reports : bool
        Whether workers tell the scheduler meanwhile for how long their tasks have run.  They do every 0.5 s
        in a cluster of ten, and every 6 s in one of a thousand.
    """
    return played(lambda way: _opened(way, workers, resources, reports))
