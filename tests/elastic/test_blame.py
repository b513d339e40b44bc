"""Tasks whose workers died: blamed for it, unless the batch system ended the job."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from distributed import KilledWorker, Worker

from dask_ferro.elastic.scheduler_rpc import ScalingRPC
from dask_ferro.scheduler.plugin import part_of
from dask_ferro.slurm.parsing import QueueRow
from tests.clusters import on_cluster
from tests.waiting import BOUND_S, until_async

DEATHS = 4  # Dask blames a task for three
on_scheduler = partial(on_cluster, 0, roster=True, protocol="tcp")
GO: dict[str, threading.Event] = {}


@pytest.mark.parametrize(
    ("takes_back", "fails"),
    [
        pytest.param(True, False, id="the batch system ended each job"),
        pytest.param(False, True, id="nobody knows why they died"),
    ],
)
@on_scheduler(config={"distributed.scheduler.allowed-failures": 3})
async def test_a_task_survives_jobs_that_were_ended_under_it(client, scheduler, takes_back, fails):
    """https://github.com/dask/distributed/issues/5234: at the fourth preemption it fails with KilledWorker."""
    GO["all"] = threading.Event()
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


def waits(event: str) -> bool:
    """Wait for the test."""
    return GO[event].wait(BOUND_S)


def is_on(scheduler, name):
    ts = scheduler.tasks.get("task")
    return ts is not None and ts.processing_on is not None and ts.processing_on.name == name


@on_scheduler()
async def test_a_worker_that_its_nanny_starts_again_died_of_something_else(client, scheduler):
    blame = part_of(scheduler, ScalingRPC).blame
    blame.died("job-0", ["task"])
    async with Worker(scheduler.address, nthreads=1, name="job-0"):
        assert await client.scheduler.ferro_unblame(names=["job-0"]) == 0
        assert blame._had == {}


@pytest.mark.parametrize("knows_first", [True, False])
@on_scheduler()
async def test_whoever_is_sooner_the_batch_system_or_the_connection(client, scheduler, knows_first):
    """A node that is gone breaks no connection: the worker counts as there for a while."""
    GO["first"] = threading.Event()
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


@on_scheduler()
async def test_of_many_dead_workers_the_newest_are_remembered(scheduler):
    blame = part_of(scheduler, ScalingRPC).blame
    for n in range(1100):
        blame.died(f"job-{n}", ["task"])
    assert next(iter(blame._had)) == "job-100"


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
    assert QueueRow("1", state, reason=reason).is_ended is is_ended
