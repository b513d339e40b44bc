"""Threads about moves that cost more than they gain, and about gains that were not seen."""

from __future__ import annotations

from tests.upstream_pains.jobs import behind, open_gate, take
from tests.upstream_pains.scene import Scene, on_a_scene


@on_a_scene(workers=4)
async def test_nobody_steals_who_has_plenty(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/5243: work and its data move though all workers have plenty.

    The one with least has ten tasks before it.
    """
    await s.learn(0.02, "job", "gate")
    async with s.still():
        for worker, waiting in zip(s.workers, (40, 40, 40, 10), strict=True):
            await s.occupy(worker)
            s.map(waiting, behind, "gate", on=[worker])
        await s.until(
            lambda: sum(len(s.state(w).processing) for w in s.workers) == 134, "130 tasks that wait"
        )
    await s.looks()
    if s.way == "stock":
        assert s.requested >= 1
    else:
        assert s.requested == 0


@on_a_scene()
async def test_a_large_block_is_fetched_once_for_all_that_need_it(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/7003: its transfer is charged to each task, and charged again.

    200 MB count as 2 s for each of 100 tasks of 5 ms: stock Dask leaves one of two workers idle.
    """
    await s.learn(0.005, "job")
    blocks = await s.blocks(5, 40_000_000, on=s.workers[0])
    await s.done(s.map(100, take, 0.005, *blocks))
    if s.way == "stock":
        assert s.ran() == [100, 0]
    else:
        assert s.ran()[1] >= 10


@on_a_scene()
async def test_what_would_start_last_is_moved_first(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/7027: occupancy and stealing know nothing of priorities.

    Stock Dask takes the next one of a set: that all moved ones are the last by chance is 1 in 100,000.
    """
    a, b = s.workers
    await s.learn(0.05, "job", "gate")
    await s.occupy(a)
    futures = s.map(20, take, 0.02, on=[a])
    await s.until(lambda: s.requested > 0, "a request")
    open_gate()
    await s.done(futures)
    at_a, at_b = s.keys_run(a), s.keys_run(b)
    if s.way == "stock":
        assert min(at_b) < max(at_a)
    else:
        assert min(at_b) > max(at_a)


@on_a_scene()
async def test_tasks_of_unknown_duration_do_not_go_to_and_fro(s: Scene) -> None:
    """https://github.com/dask/distributed/pull/9000: ping-pong between two workers; stock Dask was repaired."""
    s.map(6, behind, "gate", on=[s.workers[0]])
    await s.until(lambda: len(s.given) == 6, "six tasks with workers")
    await s.looks()
    assert max(s.given.values()) <= 2


@on_a_scene(workers=4)
async def test_a_block_that_all_need_does_not_draw_all_to_its_holder(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/6573: all tasks run on one worker; stock Dask was repaired."""
    blocks = await s.blocks(1, 2**20, on=s.workers[0])
    await s.done(s.map(120, take, 0.002, *blocks))
    assert max(s.ran()) <= 60
