"""Tasks whose workers died: blamed for it, unless the batch system ended the job."""

from __future__ import annotations

import asyncio
import threading

import dask
import pytest
from distributed import Client, KilledWorker, Scheduler, Worker

from dask_ferro.runtime.elastic.scheduler_rpc import Roster
from dask_ferro.runtime.slurm.parsing import Row
from tests.waiting import BOUND_S, until_async

DEATHS = 4  # Dask blames a task for three
GO: dict[str, threading.Event] = {}


@pytest.mark.parametrize(
    ("takes_back", "fails"),
    [
        pytest.param(True, False, id="the batch system ended each job"),
        pytest.param(False, True, id="nobody knows why they died"),
    ],
)
def test_a_task_survives_jobs_that_were_ended_under_it(takes_back, fails):
    """https://github.com/dask/distributed/issues/5234: at the fourth preemption it fails with KilledWorker."""

    GO["all"] = threading.Event()

    async def run():
        async with (
            Scheduler(port=0, dashboard_address=":0") as scheduler,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            await client.register_plugin(Roster())
            task = client.submit(waits, "all", key="task")
            for n in range(DEATHS):
                worker = await Worker(scheduler.address, nthreads=1, name=f"job-{n}")
                await until_async(lambda n=n: is_on(scheduler, f"job-{n}"), "the task to be sent")
                await scheduler.remove_worker(worker.address, stimulus_id="died", expected=False, close=False)
                if takes_back:
                    assert await client.scheduler.ferro_unblame(names=[f"job-{n}", "another"]) == 1
                    assert await client.scheduler.ferro_unblame(names=[f"job-{n}"]) == 0  # once
                await worker.close(timeout=0, executor_wait=False)
            GO["all"].set()
            async with Worker(scheduler.address, nthreads=1):
                if fails:
                    with pytest.raises(KilledWorker):
                        await task
                else:
                    assert await task

    with dask.config.set({"distributed.scheduler.allowed-failures": 3}):
        asyncio.run(run())


def waits(event: str) -> bool:
    """Wait for the test."""
    return GO[event].wait(BOUND_S)


def is_on(scheduler, name):
    ts = scheduler.tasks.get("task")
    return ts is not None and ts.processing_on is not None and ts.processing_on.name == name


def test_a_worker_that_its_nanny_starts_again_died_of_something_else():
    async def run():
        async with (
            Scheduler(port=0, dashboard_address=":0") as scheduler,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            plugin = Roster()
            await client.register_plugin(plugin)
            blame = scheduler.plugins[Roster.name].blame
            blame.died("job-0", ["task"])
            async with Worker(scheduler.address, nthreads=1, name="job-0"):
                assert await client.scheduler.ferro_unblame(names=["job-0"]) == 0
                assert blame._had == {}

    asyncio.run(run())


@pytest.mark.parametrize("knows_first", [True, False])
def test_whoever_is_sooner_the_batch_system_or_the_connection(knows_first):
    """A node that is gone breaks no connection: the worker counts as there for a while."""
    GO["first"] = threading.Event()

    async def run():
        async with (
            Scheduler(port=0, dashboard_address=":0") as scheduler,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            await client.register_plugin(Roster())
            worker = await Worker(scheduler.address, nthreads=1, name="job-0")
            task = client.submit(waits, "first", key="task")
            await until_async(lambda: is_on(scheduler, "job-0"), "the task to be sent")
            if knows_first:
                assert await client.scheduler.ferro_unblame(names=["job-0"]) == 0
            await scheduler.remove_worker(worker.address, stimulus_id="died", expected=False, close=False)
            if not knows_first:
                assert scheduler.tasks["task"].suspicious == 1
                assert await client.scheduler.ferro_unblame(names=["job-0"]) == 1
            assert scheduler.tasks["task"].suspicious == 0
            GO["first"].set()
            await worker.close(timeout=0, executor_wait=False)
            await task.cancel()

    asyncio.run(run())


def test_of_many_dead_workers_the_newest_are_remembered():
    async def run():
        async with Scheduler(port=0, dashboard_address=":0") as scheduler:
            plugin = Roster()
            await plugin.start(scheduler)
            for n in range(1100):
                plugin.blame.died(f"job-{n}", ["task"])
            assert next(iter(plugin.blame._had)) == "job-100"
            await plugin.remove()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("state", "reason", "is_ended"),
    [
        ("PREEMPTED", "", True),
        ("TIMEOUT", "TimeLimit", True),
        ("COMPLETING", "TimeLimit", True),
        ("CANCELLED", "", True),
        ("NODE_FAIL", "", True),
        ("BOOT_FAIL", "", True),
        ("OUT_OF_MEMORY", "", False),
        ("FAILED", "NonZeroExitCode", False),
        ("COMPLETED", "", False),
        ("COMPLETING", "", False),
        ("RUNNING", "TimeLimit", False),
        ("PENDING", "Resources", False),
    ],
)
def test_which_ends_are_none_of_a_task_s_doing(state, reason, is_ended):
    assert Row("1", state, reason=reason).is_ended is is_ended
