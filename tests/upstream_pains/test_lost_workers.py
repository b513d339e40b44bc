"""Threads about workers that are gone unasked: killed at their walltime, cancelled, preempted."""

from __future__ import annotations

import asyncio

from distributed.scheduler import KilledWorker

from tests.upstream_pains.jobs import behind, open_gate
from tests.upstream_pains.site import LOOKS, LOST_S, Site, on_a_site


async def die(s: Site, at: int = 0) -> None:
    """Let a job end in the midst of what it does, and both sides wait for as long as they do for lost workers."""
    job = s.cluster.workers[list(s.cluster.worker_spec)[at]]
    gone = {worker.address for worker in job.workers}
    await s.look()  # as each second
    await job.die()
    await s.until(
        lambda: gone.isdisjoint(s.cluster.scheduler_info["workers"]), "the cluster to know that they are gone"
    )
    await asyncio.sleep(2 * LOST_S)


@on_a_site(cores=2, processes=2)
async def test_a_job_of_several_workers_that_died_is_replaced(s: Site) -> None:
    """https://github.com/dask/distributed/issues/9102: dead workers of groups are never removed; nothing replaces them.

    Also https://github.com/dask/dask-jobqueue/issues/611 and https://github.com/dask/dask-jobqueue/issues/691, where
    the jobs ended with their walltime, and with their workers' --lifetime.
    """
    s.adapt(minimum=2, maximum=2)
    await s.look()
    await s.runs(2)
    await die(s)
    await s.look(LOOKS)
    if s.way == "stock":
        assert (len(s.queue.submitted), len(s.cluster.requested), len(s.scheduler.workers)) == (1, 2, 0)
    else:
        await s.runs(2)
        assert len(s.queue.submitted) == 2


@on_a_site()
async def test_a_worker_that_died_is_replaced(s: Site) -> None:
    """https://github.com/dask/distributed/issues/3154: adapt() could not recover from lost workers; stock was repaired.

    Also https://github.com/dask/distributed/issues/2968.
    """
    s.adapt(minimum=2, maximum=2)
    await s.look()
    await s.runs(2)
    await die(s)
    await s.look(2)
    await s.runs(2)
    assert len(s.queue.submitted) == 3


@on_a_site()
async def test_what_scale_ordered_is_kept(s: Site) -> None:
    """https://github.com/dask/distributed/pull/3118: a cluster that lost workers stays smaller than scale() said."""
    await s.started(2)
    if s.way == "stock":
        s.adaptive = None  # not read
    await die(s)
    await s.look(2)
    if s.way == "stock":
        assert (len(s.queue.submitted), s.asked, len(s.scheduler.workers)) == (2, 2, 1)
    else:
        await s.runs(2)
        assert len(s.queue.submitted) == 3


@on_a_site()
async def test_a_task_that_outlives_its_workers_is_not_blamed(s: Site) -> None:
    """https://github.com/dask/dask-jobqueue/issues/122: KilledWorker, as the walltime ended four workers of a task.

    A job of ours hears a signal before that, and asks to leave, as the test does here.  Also
    https://github.com/dask/dask-jobqueue/issues/270.
    """
    s.adapt(minimum=1, maximum=1)
    s.queue.is_open.set()
    (future,) = s.map(1, behind, "gate")
    for _ in range(4):
        await s.look()
        await s.runs(1)
        (worker,) = s.workers
        await s.until(lambda w=worker: bool(w.state.executing), "the task to run")
        if s.way == "ours":
            await s.client.scheduler.ferro_leave(addresses=[worker.address], seconds=0.1, must=True)
        await die(s)
        await s.look()
    if s.way == "stock":
        assert isinstance(await future.exception(), KilledWorker)
        return
    assert s.scheduler.tasks[future.key].suspicious == 0
    await s.look()
    await s.runs(1)
    open_gate()
    assert await future == "gate"
