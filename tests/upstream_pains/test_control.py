"""Threads about what stealing costs the scheduler, how it is switched, and whom it forgets."""

from __future__ import annotations

import sys
from typing import Any

import dask

import dask_ferro as ff
from tests.upstream_pains.jobs import behind, open_gate, seceded, take
from tests.upstream_pains.scene import Scene, on_a_scene


def _calls_of_a_look(s: Scene) -> int:
    """Count the calls of Python functions in one look at the cluster."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    look = s.scheduler.periodic_callbacks["stealing"].callback
    sys.setprofile(count)
    try:
        look()
    finally:
        sys.setprofile(None)
    return calls


async def _calls_with(s: Scene, waiting: int) -> int:
    """Let so many tasks wait for the first worker, which alone may run them; count the calls of a look at them."""
    a = s.workers[0]
    s.map(waiting + 1 - len(s.state(a).processing), behind, "gate", on=[a], strictly=True)
    await s.until(lambda: len(s.state(a).processing) == waiting + 1, f"{waiting} tasks that wait")
    return _calls_of_a_look(s)


@on_a_scene()
async def test_a_look_costs_the_same_with_many_tasks(s: Scene) -> None:
    """https://github.com/dask/distributed/pull/3069: stealing takes 10 to 15 % of the scheduler's time.

    One worker is idle, and none of the other's tasks may go there.  Calls are counted, nothing is timed.
    """
    await s.learn(0.05, "job", "gate")
    await s.occupy(s.workers[0])
    few, many = await _calls_with(s, 200), await _calls_with(s, 1000)
    if s.way == "stock":
        assert many > 4 * few
    else:
        assert many < 1.2 * few


@on_a_scene()
async def test_stealing_is_switched_while_the_cluster_runs(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/3565: stock Dask reads its switch once, when a scheduler starts."""
    a, _ = s.workers
    await s.learn(0.05, "job", "gate")
    await s.occupy(a)
    if s.way == "ours":
        await ff.install(s.client, stealing="none")
    with dask.config.set({"distributed.scheduler.work-stealing": False}):
        futures = s.map(12, take, 0.05, on=[a])
        await s.until(lambda: len(s.state(a).processing) > 4, "tasks that wait")
        await s.looks()
    if s.way == "stock":
        assert s.requested > 0
        return
    assert s.requested == 0
    await ff.uninstall(s.client)
    assert await s.finished(futures) > 0  # stock Dask took some
    taken = s.requested
    assert taken > 0
    await ff.install(s.client)
    assert await s.finished(s.map(12, take, 0.05, on=[a])) > 0
    assert s.requested > taken


@on_a_scene()
async def test_a_worker_whose_only_task_has_seceded_takes_what_waits(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/4945: idle but for tasks that wait for their children.

    Also https://github.com/dask/distributed/issues/4501, where it left 60 % of a cluster idle.
    """
    a, b = s.workers
    await s.learn(0.02, "child")
    await s.occupy(b, seceded, name="parent")
    await s.until(lambda: bool(s.state(b).long_running), "the task to secede")
    await s.done(s.map(30, take, 0.02, name="child", on=[a]))
    if s.way == "stock":
        assert s.ran("child") == [30, 0]
    else:
        assert s.ran("child")[1] >= 8


@on_a_scene()
async def test_an_answer_that_comes_too_late_moves_nothing(s: Scene) -> None:
    """https://github.com/dask/distributed/issues/5370: a victim answers a request that was given up meanwhile.

    The task ended up nowhere; stock Dask was repaired.  The answers are the victim's message, handed in by the test.
    """
    a, _ = s.workers
    await s.occupy(a)
    futures = s.map(3, take, 0.01, on=[a])
    await s.until(lambda: len(s.state(a).processing) > 1, "tasks that wait")
    answer = s.scheduler.stream_handlers["steal-response"]
    placed = {key: ts.processing_on for key, ts in s.scheduler.tasks.items()}
    for key in (*placed, ("job", -1)):
        for state in ("ready", "released", "executing"):
            answer(key=key, state=state, stimulus_id="steal-late", worker=a.address)
    assert {key: ts.processing_on for key, ts in s.scheduler.tasks.items()} == placed
    open_gate()
    await s.done(futures)
