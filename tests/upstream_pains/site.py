"""A batch system in the test's own process: a cluster of dask-jobqueue whose jobs are workers in the test's loop.

dask-jobqueue's and distributed's own code runs, but for the commands that submit and cancel.  Jobs wait in the queue
until the test lets them start, and the controller looks when the test says so, not every second: what it does not do
in its looks, it never does.  "ours" is `ff.Elastic`, with our plugins on the scheduler, on the same cluster.
Durations are seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import dask
import dask_jobqueue.core
import pytest
from distributed import Status, Worker
from distributed.deploy.spec import ProcessInterface

import dask_ferro as ff
from dask_ferro.runtime.pools import providers
from tests.upstream_pains import jobs
from tests.upstream_pains.scene import CONFIG, Scene, Way, joined, played
from tests.waiting import BOUND_S

# Both look after lost workers only after so long: 15 s by default.
LOST_S = 0.1
# Of stock Dask's controller, one more than its hysteresis.
LOOKS = 4


class Queue:
    """What the batch system was asked for, and did."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.submitted: list[str] = []
        self.cancelled: list[str] = []  # before they had started
        self.is_open = asyncio.Event()
        self.jobs: dict[str, InProcessJob] = {}


class InProcessJob(dask_jobqueue.core.Job):  # type: ignore[misc]
    """A job whose processes are workers of this loop, for as long as it is not ended."""

    config_name = "slurm"
    submit_command = cancel_command = "true"

    def __init__(
        self,
        scheduler: str | None = None,
        name: str | None = None,
        *,
        queue: Queue,
        resources: Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(scheduler=scheduler, name=name, **options)
        self.job_header = ""
        self.queue = queue
        self.resources = dict(resources or {})
        self.workers: list[Worker] = []

    async def start(self) -> None:
        """Submit it; it runs as soon as the queue is open."""
        self.queue.submitted.append(str(self.name))
        self.queue.jobs[str(self.name)] = self
        await ProcessInterface.start(self)
        self._runs = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        await asyncio.wait_for(self.queue.is_open.wait(), BOUND_S)
        count = self.worker_processes
        for i in range(count):
            worker = await Worker(
                self.scheduler,
                nthreads=self.worker_process_threads,
                name=f"{self.name}-{i}" if count > 1 else str(self.name),
                resources=self.resources,
                validate=True,
            )
            self.workers.append(worker)
            self.queue.workers.append(worker)

    async def die(self) -> None:
        """End by itself, in the midst of what its workers do: out of time, or cancelled by another user."""
        self._runs.cancel()
        with suppress(asyncio.CancelledError):
            await self._runs
        going, self.workers = self.workers, []
        self.queue.workers[:] = [worker for worker in self.queue.workers if worker not in going]
        # One that was ordered to leave closes, and waits for its threads; a process would not.
        there = [worker for worker in going if worker.status not in (Status.closing, Status.closed)]
        await asyncio.gather(*(worker.close(nanny=False, executor_wait=False) for worker in there))

    async def close(self) -> None:
        """Cancel it."""
        if self.status == Status.running and not self._runs.done():
            self.queue.cancelled.append(str(self.name))
        await self.die()
        await ProcessInterface.close(self)


class Site(Scene):
    """A cluster on that batch system, and the controller that is asked to look."""

    def __init__(self, cluster: Any, queue: Queue, way: Way) -> None:
        super().__init__(cluster.scheduler, way, reports=True)
        self.cluster, self.queue = cluster, queue
        self.workers = queue.workers
        self.adaptive: Any = None

    def adapt(self, **options: Any) -> None:
        """Let the number of jobs follow the work, by looks of the test's."""
        if self.way == "ours":
            options = {"Adaptive": ff.Elastic} | options
        self.adaptive = self.cluster.adapt(**({"interval": "1h"} | options))
        if self.way == "ours":
            self.adaptive.parameters = replace(self.adaptive.parameters, cooldown=0.0, patience_most=0.0)

    async def look(self, times: int = 1) -> None:
        """Let the controller look, if there is one, and let what it decided be done."""
        for _ in range(times if self.adaptive is not None else 0):
            await self.adaptive.adapt()
            await self.cluster
            if self.way == "ours" and (leaving := list(self.adaptive._leaving.values())):
                await asyncio.wait(leaving, timeout=10)

    async def scale(self, workers: int) -> None:
        """Order so many, as `cluster.scale` does: `ff.SLURMCluster`'s is a controller with both bounds there."""
        if self.way == "stock":
            self.cluster.scale(workers)
            await self.cluster
        else:
            self.adapt(minimum=workers, maximum=workers, ordered=True)
            await self.look(2)

    async def started(self, workers: int) -> None:
        """Order so many, and let them start."""
        await self.scale(workers)
        await self.runs(workers)

    async def runs(self, workers: int) -> None:
        """Let jobs start, and wait until so many workers are connected, as the cluster knows too."""
        self.queue.is_open.set()
        await self.until(
            lambda: (
                len(self.workers)
                == len(self.scheduler.workers)
                == len(self.cluster.scheduler_info["workers"])
                == workers
            ),
            f"{workers} workers",
        )

    async def ready(self, count: int) -> None:
        """Wait until the scheduler knows of so many tasks."""
        await self.until(lambda: len(self.scheduler.tasks) >= count, f"{count} tasks")

    def knows(self, name: str, seconds: float) -> None:
        """Let the scheduler believe that tasks of a prefix take so long, before a controller has asked about them."""
        self.scheduler.task_prefixes[name].duration_average = seconds

    @property
    def asked(self) -> int:
        """Jobs that are asked for."""
        return len(self.cluster.worker_spec)


@asynccontextmanager
async def _opened(way: Way, options: Mapping[str, Any]) -> AsyncIterator[Site]:
    jobs.shut_all()
    settings = CONFIG | {"distributed.deploy.lost-worker-timeout": LOST_S}
    with dask.config.set(settings), pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "_LOST", LOST_S)
        async with AsyncExitStack() as stack:
            queue = Queue()
            cluster = await stack.enter_async_context(
                dask_jobqueue.core.JobQueueCluster(
                    **({"cores": 1, "processes": 1, "memory": "1GB"} | options),
                    job_cls=InProcessJob,
                    queue=queue,
                    asynchronous=True,
                    protocol="inproc://",
                    scheduler_options={"dashboard": False, "dashboard_address": ":0", "validate": True},
                )
            )
            site = Site(cluster, queue, way)
            await joined(stack, site, cluster)
            yield site


def on_a_site(**options: Any) -> Callable[[Callable[[Any], Awaitable[None]]], Callable[[Way], None]]:
    """Make a test of a play on jobs like this.

    Parameters
    ----------
    **options
        Those of dask-jobqueue's clusters; `resources` of each worker.
    """
    return played(lambda way: _opened(way, options))
