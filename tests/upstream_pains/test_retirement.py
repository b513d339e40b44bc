"""Threads about workers that are to go: what they hold and run, who is chosen, and when they are gone."""

from __future__ import annotations

import asyncio
from typing import Any

import dask
from distributed import Worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import time
from distributed.scheduler import Scheduler, WorkerState
from distributed.worker_state_machine import GatherDepSuccessEvent

from dask_ferro.runtime.elastic.scheduler_rpc import Roster
from tests.upstream_pains.jobs import behind, made, open_gate, seceded, take
from tests.upstream_pains.scene import Scene, on_a_scene
from tests.upstream_pains.site import LOOKS, Site, on_a_site

# Two of these are more than a worker fetches at a time.
BLOCK = 40_000_000


async def retire(s: Scene, worker: Worker, **options: Any) -> bool:
    """Let a worker leave, data first; return whether it left."""
    if s.way == "stock":
        return bool(await s.client.scheduler.retire_workers(workers=[worker.address]))
    await s.client.register_plugin(Roster())
    answer = await s.client.scheduler.ferro_leave(addresses=[worker.address], **options)
    return bool(answer["left"])


@on_a_site()
async def test_an_ordered_scale_down_loses_no_result(s: Site) -> None:
    """https://github.com/dask/distributed/issues/4069: cluster.scale() closes workers with all that they hold.

    It asks the scheduler to retire them by names, where it wants addresses.  Also
    https://github.com/dask/distributed/issues/4532.
    """
    await s.started(4)
    await s.done(s.map(20, take, 0.01))
    await s.scale(1)
    await s.until(lambda: len(s.scheduler.workers) == 1, "three to leave")
    lost = sum(len(event["lost-computed-tasks"]) for event in s.removals())
    if s.way == "stock":
        assert lost >= 3
    else:
        assert lost == 0


@on_a_site()
async def test_an_ordered_scale_down_blames_no_task(s: Site) -> None:
    """https://github.com/dask/distributed/issues/3526: tasks on workers that scale() closes count as their killers."""
    await s.started(4)
    futures = s.map(8, behind, "gate")
    await s.until(lambda: sum(len(w.state.executing) for w in s.workers) == 4, "four tasks that run")
    order = asyncio.ensure_future(s.scale(1))
    await s.until(lambda: s.removals() or _is_leaving(s), "the first to leave")
    open_gate()
    await order
    await s.until(lambda: len(s.scheduler.workers) == 1, "three to leave")
    assert [event["expected"] for event in s.removals()] == [s.way == "ours"] * 3
    blamed = sum(ts.suspicious for ts in s.scheduler.tasks.values())
    if s.way == "stock":
        assert blamed >= 3
    else:
        assert blamed == 0
    await s.done(futures)


def _is_leaving(s: Scene) -> bool:
    return any(ws.status.name == "closing_gracefully" for ws in s.scheduler.workers.values())


@on_a_site(cores=2, processes=2)
async def test_no_busy_worker_goes_with_an_idle_one_of_its_job(s: Site) -> None:
    """https://github.com/dask/dask-jobqueue/issues/616: adapt() kills workers that run a task.

    Of a job with two workers one is idle: stock Dask retires that one, and cancels the job.
    """
    s.adapt(minimum=4, maximum=4)
    await s.look()
    await s.runs(4)
    await s.occupy(s.workers[0])
    await s.done(s.map(8, take, 0.01, on=s.workers[1:]))
    s.adapt(minimum=0, maximum=4, **s.of_ours(patience=0))
    await s.look(LOOKS + 1)
    killed = [event for event in s.removals() if event["processing-tasks"] or event["lost-computed-tasks"]]
    assert len(killed) == (1 if s.way == "stock" else 0)
    open_gate()


@on_a_site(cores=2, processes=2)
async def test_jobs_that_have_not_started_go_before_those_that_run(s: Site) -> None:
    """https://github.com/dask/distributed/pull/5578: scale() takes grouped workers that run for not launched yet."""
    await s.started(20)
    s.queue.is_open.clear()
    await s.scale(40)
    await s.scale(20)
    assert s.asked == 10
    if s.way == "stock":  # all ten by chance: 1 in 184,756
        assert len(s.queue.cancelled) < 10
    else:
        assert (len(s.queue.cancelled), len(s.scheduler.workers)) == (10, 20)


@on_a_site()
async def test_a_scale_takes_back_the_one_before(s: Site) -> None:
    """https://github.com/dask/dask-jobqueue/issues/112: jobs of an earlier scale() stayed; stock was repaired."""
    await s.scale(2)
    await s.scale(0)
    assert (s.asked, len(s.queue.cancelled)) == (0, 2)
    await s.scale(4)
    await s.scale(2)
    assert (s.asked, len(s.queue.cancelled)) == (2, 4)


@on_a_scene(workers=1)
async def test_a_worker_that_is_to_go_ends_what_it_runs_first(s: Scene) -> None:
    """https://github.com/dask/dask-jobqueue/issues/416: a worker's lifetime interrupts its tasks, which run again."""
    (a,) = s.workers
    s.map(1, behind, "gate")
    await s.until(lambda: bool(a.state.executing), "a task that runs")
    await s.join()
    leaves = asyncio.ensure_future(retire(s, a))
    await s.until(lambda: leaves.done() or _is_leaving(s), "the worker to begin to leave")
    if s.way == "stock":
        await leaves
    assert leaves.done() == (s.way == "stock")
    open_gate()
    assert await leaves
    await s.until(
        lambda: max(s.given.values()) == (2 if s.way == "stock" else 1), "the task where it was given"
    )
    assert [len(event["processing-tasks"]) for event in s.removals()] == [1 if s.way == "stock" else 0]


@on_a_scene()
async def test_no_task_is_given_to_a_worker_without_the_time_for_it(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/3141: a worker takes tasks to the end of its --lifetime.

    Tasks of a minute, and one of two workers ends in ten seconds.
    """
    a, b = s.workers
    if s.way == "ours":
        await s.client.register_plugin(Roster())
        await s.client.scheduler.ferro_ends(ends={a.name: time() + 10}, by="worker", fresh=3600)
    with dask.annotate(ferro={"seconds": 60}):
        s.map(4, behind, "gate")
    await s.until(lambda: bool(b.state.executing), "a task that runs")
    await s.until(lambda: len(s.given) == 4 or len(s.state(b).processing) == 4, "four tasks with workers")
    assert [len(s.state(w).processing) for w in (a, b)] == ([2, 2] if s.way == "stock" else [0, 4])


@on_a_scene()
async def test_what_costs_most_to_compute_again_is_moved_first(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/4202: a worker that is shut down moves its data in any order."""
    a, b = s.workers
    for name, seconds in (("cheap", 0.0), ("dear", 0.05), ("cheap", 0.0)):
        await s.done(s.map(4, made, seconds, BLOCK, name=name, on=[a], strictly=True))
    assert await retire(s, a, **s.of_ours(seconds=20, must=True))
    came = [
        key[0]
        for event in b.state.stimulus_log
        if isinstance(event, GatherDepSuccessEvent)
        for key in event.data
    ]
    assert len(came) == 12
    assert (came[:4] == ["dear"] * 4) == (s.way == "ours")


class Pins(SchedulerPlugin):
    """Needs one worker, as a shuffle does those that take part."""

    name = "pins"

    def __init__(self, address: str) -> None:
        self.address = address

    def valid_workers_downscaling(
        self, scheduler: Scheduler, workers: list[WorkerState]
    ) -> list[WorkerState]:
        """Leave out that one."""
        return [ws for ws in workers if ws.address != self.address]


@on_a_site()
async def test_workers_of_a_shuffle_are_not_taken_away(s: Site) -> None:
    """https://github.com/dask/distributed/issues/8579: each shrink started P2P shuffles anew; stock was repaired."""
    await s.started(2)
    s.scheduler.add_plugin(Pins(s.workers[0].address))
    s.adapt(minimum=0, maximum=2, **s.of_ours(patience=0))
    await s.look(LOOKS)
    assert list(s.scheduler.workers) == [s.workers[0].address]


@on_a_site()
async def test_a_task_that_left_its_thread_keeps_its_worker(s: Site) -> None:
    """https://github.com/dask/distributed/pull/7481: it was closed, though it drives others; stock was repaired."""
    await s.started(2)
    a = s.workers[0]
    await s.occupy(a, seceded, name="parent")
    await s.until(lambda: bool(s.state(a).long_running), "the task to secede")
    s.adapt(minimum=0, maximum=2, **s.of_ours(patience=0))
    await s.look(LOOKS)
    assert list(s.scheduler.workers) == [a.address]


@on_a_scene()
async def test_a_worker_that_cannot_leave_works_on(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/6223: it stayed in closing_gracefully for ever; stock was repaired."""
    a, b = s.workers
    await s.done(s.map(4, take, 0.01, on=[a]))
    b.status = type(b.status).paused
    await s.until(lambda: s.state(b).status == type(b.status).paused, "word of the pause")
    assert not await retire(s, a)
    await s.until(lambda: a.status.name == s.state(a).status.name == "running", "the worker to work on")
    await s.done(s.map(1, take, 0.01))
