"""Threads about tasks that need a resource, or certain workers."""

from __future__ import annotations

from tests.upstream_pains.jobs import open_gate, take
from tests.upstream_pains.scene import Scene, on_a_scene

SHORT = 0.01
GPU = {"GPU": 1.0}


@on_a_scene(workers=1, resources=GPU)
async def test_a_worker_with_the_resource_that_joins_late_takes_what_waits(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/1851: all tasks wait for the first worker that had it.

    Also https://github.com/dask/dask/issues/3264.
    """
    (a,) = s.workers
    await s.learn(SHORT, "job", "gate")
    await s.occupy(a, resources=GPU)
    futures = s.map(12, take, SHORT, resources=GPU)
    await s.until(lambda: len(s.state(a).processing) == 13, "12 tasks that wait")
    await s.join(resources=GPU)
    finished = await s.finished(futures)
    assert finished == (0 if s.way == "stock" else 12)


@on_a_scene(resources=GPU)
async def test_moves_keep_the_books_of_resources_exact(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/4446: what is left of a resource becomes wrong.

    Stock Dask's moves neither release it at the victim nor acquire it at the thief.
    """
    a, b = s.workers
    await s.learn(0.05, "job", "gate")
    await s.occupy(a, resources=GPU)
    futures = s.map(12, take, SHORT, on=[a], resources=GPU)
    await s.until(lambda: max(s.given.values()) > 1, "a move")
    open_gate()
    await s.done(futures)
    await s.until(lambda: not s.state(a).processing and not s.state(b).processing, "the end of all tasks")
    moves = sum(times - 1 for times in s.given.values())
    used = [s.state(worker).used_resources["GPU"] for worker in (a, b)]
    assert used == ([moves, -moves] if s.way == "stock" else [0, 0])


@on_a_scene(workers=1, resources={"CPU": 1.0, "GPU": 1.0})
async def test_a_thief_needs_what_the_task_needs_and_no_more(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/5565: it needed all that the victim has; stock Dask was repaired."""
    (a,) = s.workers
    await s.learn(0.05, "job", "gate")
    await s.occupy(a)
    futures = s.map(12, take, SHORT, resources={"CPU": 1.0}, on=[a])
    await s.until(lambda: len(s.state(a).processing) == 13, "12 tasks that wait")
    await s.join(resources={"CPU": 1.0})
    await s.join(resources={"GPU": 1.0})
    finished = await s.finished(futures)
    assert s.ran() == [0, finished, 0]
    assert finished >= 1


@on_a_scene(workers=3)
async def test_restricted_tasks_move_among_their_workers_and_no_others(s: Scene) -> None:
    """https://github.com/dask/distributed/pull/9214: they may be stolen within the restriction, never out of it.

    Also https://github.com/dask/distributed/issues/9129, which asks what holds.
    """
    a, b, _ = s.workers
    await s.learn(0.05, "job", "gate")
    await s.occupy(a)
    await s.occupy(b, gate="other")
    futures = s.map(12, take, SHORT, on=[a, b], strictly=True)
    await s.until(lambda: len(s.state(a).processing) + len(s.state(b).processing) == 14, "12 tasks that wait")
    assert min(len(s.state(w).processing) for w in (a, b)) > 1
    open_gate()
    finished = await s.finished(futures)
    assert s.ran() == [finished, 0, 0]
    if s.way == "ours":
        assert finished == 12
