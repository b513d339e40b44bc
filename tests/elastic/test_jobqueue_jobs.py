"""`ff.Elastic` on a cluster of dask-jobqueue, whose jobs are workers in the test's loop.

dask-jobqueue's and distributed's own code runs, but for the commands that submit and cancel.  Jobs wait in the queue
until the test opens it, and the controller looks when the test says so.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import dask
import pytest
from dask_jobqueue.core import Job, JobQueueCluster
from distributed import Client, Event, Status, Worker
from distributed.deploy.spec import ProcessInterface

import dask_ferro as ff
from dask_ferro.elastic import providers
from tests import clusters
from tests.waiting import BOUND_S, until_async

# Seconds until a worker that is lost is given up, by Dask and by us: 15 by default.
LOST_S = 0.1


class InProcessJob(Job):
    """A job whose processes are workers of this loop, until it ends."""

    config_name = "slurm"
    submit_command = cancel_command = "true"

    def __init__(self, scheduler=None, name=None, *, queue, **options):
        super().__init__(scheduler=scheduler, name=name, **options)
        self.job_header = ""
        self.queue, self.workers = queue, []

    async def start(self):
        self.queue.submitted.append(self)
        await ProcessInterface.start(self)
        self.runs = asyncio.ensure_future(self.run())

    async def run(self):
        await asyncio.wait_for(self.queue.is_open.wait(), BOUND_S)
        for i in range(self.worker_processes):
            self.workers.append(await Worker(self.scheduler, nthreads=1, name=f"{self.name}-{i}"))

    async def die(self):
        """End in the midst of what its workers do."""
        self.runs.cancel()
        with suppress(asyncio.CancelledError):
            await self.runs
        there = [worker for worker in self.workers if worker.status not in (Status.closing, Status.closed)]
        await asyncio.gather(*(worker.close(nanny=False, executor_wait=False) for worker in there))

    async def close(self):
        if self.status == Status.running and not self.runs.done():
            self.queue.cancelled.append(self)
        await self.die()
        await ProcessInterface.close(self)


class Queue:
    """A batch system, with the jobs that were submitted, and those that were cancelled before their start."""

    def __init__(self):
        self.submitted, self.cancelled, self.is_open = [], [], asyncio.Event()


class Site:
    """A cluster of jobs with two workers each, its queue and a client."""

    def __init__(self, cluster, client, queue):
        self.cluster, self.client, self.queue = cluster, client, queue
        self.scheduler = cluster.scheduler

    async def adapt(self, looks=1, **options):
        """Let a controller look so often, and do what it decides."""
        self.adaptive = self.cluster.adapt(Adaptive=ff.Elastic, **{"interval": "1h", **options})
        # Idle jobs go at the next look.
        self.adaptive.parameters = replace(self.adaptive.parameters, patience_most=0.0)
        for _ in range(looks):
            await self.look()

    async def look(self):
        await self.adaptive.adapt()
        await self.cluster
        if leaving := list(self.adaptive._ongoing.leaving.values()):
            await asyncio.wait(leaving, timeout=10)

    async def started(self, workers):
        """Ask for workers, let their jobs start, and let the controller see them."""
        await self.adapt(minimum=workers, maximum=workers)
        self.queue.is_open.set()
        await self.run(workers)
        await self.look()

    async def run(self, workers):
        def connected():
            return len(self.scheduler.workers), len(self.cluster.scheduler_info["workers"])

        await until_async(lambda: connected() == (workers, workers), f"{workers} workers", seen=connected)


@asynccontextmanager
async def site():
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": LOST_S}),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(providers, "_CLOSE_TIMEOUT", LOST_S)
        queue = Queue()
        async with (
            JobQueueCluster(
                cores=2, processes=2, memory="1GB", job_cls=InProcessJob, queue=queue, asynchronous=True,
                protocol="inproc://", scheduler_options={"dashboard": False, "dashboard_address": ":0"},
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):  # fmt: skip
            await ff.install(client)
            yield {"s": Site(cluster, client, queue)}


on_a_site = clusters.plays(site, "s")()


def gated(name):
    assert Event(name).wait(timeout=60)


@on_a_site
async def test_jobs_of_several_processes_are_not_cancelled_before_they_start(s):
    """One task is worth one worker of the two that a job has."""
    task = s.client.submit(gated, "gate")
    await until_async(lambda: s.scheduler.tasks, "the task")
    await s.adapt(minimum=0, maximum=20, looks=8)
    assert (len(s.queue.submitted), s.queue.cancelled) == (1, [])
    await s.client.cancel(task)


@on_a_site
async def test_jobs_that_have_not_started_go_before_those_that_run(s):
    await s.started(4)
    s.queue.is_open.clear()
    await s.adapt(minimum=8, maximum=8, strict_maximum=True)
    assert len(s.queue.submitted) == 4
    await s.adapt(minimum=4, maximum=4, strict_maximum=True, looks=2)
    assert (len(s.queue.cancelled), len(s.scheduler.workers)) == (2, 4)


@on_a_site
async def test_no_busy_worker_goes_with_an_idle_one_of_its_job(s):
    await s.started(4)
    busy, *_ = s.scheduler.workers
    task = s.client.submit(gated, "gate", workers=[busy])
    await until_async(lambda: s.scheduler.workers[busy].processing, "the task to run")
    await s.adapt(minimum=0, maximum=4, idle_timeout=0, looks=5)
    await s.run(2)
    assert busy in s.scheduler.workers
    await Event("gate", s.client).set()
    await asyncio.wait_for(task, 60)
    assert s.scheduler.tasks[task.key].suspicious == 0


@on_a_site
async def test_a_job_of_several_workers_that_died_is_replaced(s):
    await s.started(2)
    (job,) = s.queue.submitted
    await job.die()
    await until_async(
        lambda: not s.cluster.scheduler_info["workers"], "the cluster to know that they are gone"
    )

    async def replaced():
        await s.look()
        return len(s.queue.submitted) > 1

    # As many looks as it takes: the first one may be that which sees that they are gone.
    await until_async(replaced, "a job in the place of one that is lost", every=LOST_S)
    await s.run(2)
    assert len(s.queue.submitted) == 2


@on_a_site
async def test_an_error_of_the_scheduler_does_not_end_adapting(s):
    await s.adapt(minimum=2, maximum=6, interval=0.02, looks=0)
    answers, failed = s.scheduler.handlers, []
    await until_async(lambda: "ferro_roster" in answers and s.queue.submitted, "the first job")
    real = answers["ferro_roster"]

    async def fails(**kwargs):
        failed.append(1)
        raise OSError("the scheduler is busy")

    answers["ferro_roster"] = fails
    await until_async(lambda: len(failed) >= 2, "two looks that fail")
    answers["ferro_roster"] = real
    tasks = s.client.map(gated, ["gate"] * 100, pure=False)
    await until_async(lambda: len(s.queue.submitted) == 3, "more jobs")
    await s.client.cancel(tasks)
