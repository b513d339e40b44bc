"""Threads about workers that join, or come back, and get nothing.

Twelve tasks of 10 ms are 0.12 s of work: stock Dask balances nothing below 0.2 s.
"""

from __future__ import annotations

from distributed import Status

from tests.upstream_pains.jobs import behind, take
from tests.upstream_pains.scene import Scene, on_a_scene

SHORT = 0.01


@on_a_scene(workers=1)
async def test_workers_that_join_late_take_what_waits(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/5599: tasks stay on the workers that were there first."""
    first = s.workers[0]
    await s.learn(SHORT, "job", "gate")
    await s.occupy(first)
    futures = s.map(12, take, SHORT, on=[first])
    await s.until(lambda: len(s.state(first).processing) == 13, "12 tasks that wait")
    for _ in range(2):
        await s.join()
    finished = await s.finished(futures)
    assert finished == (0 if s.way == "stock" else 12)
    assert s.ran()[0] == 0


@on_a_scene(workers=3, reports=True)
async def test_one_long_task_that_waits_on_each_goes_to_newcomers(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/5599: two long tasks on each old worker, none on the new ones.

    None has ended yet, so their duration is not known.  Stock Dask of today moves them; a guard for ours.
    """
    for worker in s.workers:
        s.map(2, behind, "gate", on=[worker])
    await s.until(lambda: sum(len(w.state.executing) for w in s.workers) == 3, "three tasks that run")
    for _ in range(3):
        await s.join()
    await s.until(
        lambda: [len(w.state.executing) for w in s.workers] == [1] * 6, "a task that runs on each worker"
    )


@on_a_scene(workers=4)
async def test_dependents_of_data_on_one_worker_run_on_all(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/4471: after a scale-up, short tasks stay where their inputs are."""
    first = s.workers[0]
    await s.learn(SHORT, "job", "gate")
    blocks = await s.blocks(6, 1000, on=first)
    await s.occupy(first)
    finished = await s.finished(s.map(12, take, SHORT, *blocks))
    assert finished == (0 if s.way == "stock" else 12)
    assert s.ran()[0] == 0


@on_a_scene()
async def test_a_worker_that_was_paused_takes_what_waits(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/7742: what was assigned during a pause is never balanced."""
    a, b = s.workers
    await s.learn(SHORT, "job", "gate")
    b.status = Status.paused
    await s.until(lambda: s.state(b).status == Status.paused, "word of the pause")
    await s.occupy(a)
    futures = s.map(12, take, SHORT, on=[a, b])
    await s.until(lambda: len(s.state(a).processing) == 13, "12 tasks that wait")
    b.status = Status.running
    finished = await s.finished(futures)
    assert finished == (0 if s.way == "stock" else 12)


@on_a_scene(reports=True)
async def test_tasks_behind_a_straggler_of_their_own_kind_go_elsewhere(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/6600: durations of one group that differ make a long tail.

    Stock Dask moves none until it knows how long the straggler has run, and some then.
    """
    a, _ = s.workers
    await s.learn(SHORT, "job")
    await s.occupy(a, name="job")
    finished = await s.finished(s.map(12, take, SHORT, on=[a]))
    if s.way == "stock":
        assert finished < 12
    else:
        assert finished == 12


@on_a_scene(workers=1)
async def test_the_first_worker_gives_up_its_queue_before_its_first_task_ends(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/5564: it keeps all of unknown duration; stock Dask was repaired."""
    (a,) = s.workers
    await s.occupy(a, name="job")
    futures = s.map(6, take, SHORT, on=[a])
    await s.until(lambda: len(s.state(a).processing) == 7, "six tasks that wait")
    await s.join()
    assert await s.finished(futures) >= 1
    assert s.ran()[0] == 0


@on_a_scene(workers=1)
async def test_tasks_whose_preferred_workers_are_gone_run_on_a_newcomer(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/7346: what is restricted to workers that are gone waits for ever.

    The thread is about tasks that may run nowhere else; with stock Dask those with `allow_other_workers` wait too.
    """
    (old,) = s.workers
    await old.close(nanny=False)
    s.workers.clear()
    await s.until(lambda: not s.scheduler.workers, "the worker to leave")
    futures = s.map(1, take, SHORT, on=[old])
    tasks = s.scheduler.tasks
    await s.until(
        lambda: [ts.state for ts in tasks.values()] == ["no-worker"], "a task that waits for a worker"
    )
    await s.join()
    finished = await s.finished(futures)
    assert finished == (0 if s.way == "stock" else 1)
