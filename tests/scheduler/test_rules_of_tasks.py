"""With the plugin on, a task runs where its user allows it, once, and not on a worker that is paused or busy."""

from __future__ import annotations

import asyncio
import sys
import time

import dask
import pytest
from distributed import Event, Status, Worker, wait

from tests.scheduler.test_entry_points import blocked, left, on_a_scene, same
from tests.waiting import until_async


def slow(i, seconds=0.02):
    time.sleep(seconds)
    return i


async def holders(s, futures):
    """Wait for results, each the number of its task; return the addresses that hold them."""
    await asyncio.wait_for(wait(futures), 60)
    assert await s.client.gather(futures) == list(range(len(futures)))
    return {ws.address for future in futures for ws in s.task(future.key).who_has}


def piled(s, count):
    """Submit tasks that begin at the first worker, and may go elsewhere."""
    where = {"workers": [s.first.address], "allow_other_workers": True}
    return s.client.map(slow, range(count), pure=False, **where)


@on_a_scene(workers=2, parameters={})
async def test_a_worker_that_joins_takes_its_part(s):
    futures = piled(s, 60)
    async with Worker(s.scheduler.address, nthreads=1) as new:
        assert new.address in await holders(s, futures)


@pytest.mark.parametrize("must", ["worker", "host", "resource"])
@on_a_scene(workers=2, protocol="tcp", host="127.0.0.1")
async def test_what_must_stay_stays(s, must):
    """Over TCP: two workers of 127.0.0.1, and one of 127.0.0.2 that alone has the resource."""

    async with Worker(s.scheduler.address, nthreads=1, host="127.0.0.2", resources={"A": 5}) as other:
        options = {
            "worker": {"workers": [other.address]},
            "host": {"workers": ["127.0.0.2"]},
            "resource": {"resources": {"A": 1}},
        }
        futures = s.client.map(slow, range(20), pure=False, **options[must])
        assert await holders(s, futures) == {other.address}


@on_a_scene(parameters={})
async def test_what_may_run_on_some_workers_moves_among_those(s):
    await s.client.submit(slow, 0, workers=[s.first.address])
    some = {s.first.address, s.second.address}
    futures = s.client.map(slow, range(30), pure=False, workers=list(some))
    assert await holders(s, futures) == some


@on_a_scene(workers=2)
async def test_a_task_without_a_worker_waits_for_one(s):
    needy = s.client.submit(same, 2, resources={"A": 1}, key="needy")
    await until_async(lambda: len(s.scheduler.unrunnable) == 1, "a task without a worker")
    async with Worker(s.scheduler.address, nthreads=1, resources={"A": 1}):
        assert await asyncio.wait_for(needy, 60) == 2


@on_a_scene(workers=2, installed={"stealing": "none"}, parameters={})
async def test_readers_stay_with_their_inputs_while_nobody_is_free(s):
    """However long a guess says that they take: sums of small blocks took copies of their neighbours elsewhere."""

    (block,) = await s.client.scatter([bytes(800)], workers=[s.first.address])
    with dask.annotate(ferro={"seconds": 0.01}):
        own = [s.client.submit(blocked, "go", workers=[s.second.address], pure=False) for i in range(31)]
    ahead = s.client.submit(blocked, "go", workers=[s.first.address], key="ahead-0")
    await until_async(lambda: len(s.second.processing) == 31 and s.first.processing, "work for both")
    readers = [s.client.submit(len, block, key=f"reader-{i}") for i in range(3)]
    known = s.scheduler.tasks
    await until_async(
        lambda: all(f.key in known and s.task(f.key).processing_on for f in readers), "three readers"
    )
    assert {s.task(f.key).processing_on for f in readers} == {s.first}
    await Event("go", s.client).set()
    assert await asyncio.wait_for(s.client.gather(readers), 60) == [800] * 3
    await asyncio.wait_for(wait([ahead, *own]), 60)


RAN: list[str] = []


def counted(name):
    RAN.append(name)
    assert Event(name).wait(timeout=60)
    return len(RAN)


@on_a_scene()
async def test_a_task_that_runs_is_not_taken_and_runs_once(s):
    RAN.clear()
    running = s.client.submit(
        counted, "runs", workers=[s.first.address], allow_other_workers=True, key="runs"
    )
    await until_async(lambda: RAN, "the task to run")
    for _ in range(5):
        s.stealing.balance()
    ts = s.task("runs")
    if ts.key not in s.stealing.in_flight:
        assert s.stealing.move_task_request(ts, s.first, s.second)
    await until_async(lambda: not s.stealing.in_flight, "the answer")
    assert (s.stealing.counts["confirmed"], ts.processing_on) == (0, s.first)
    await Event("runs", s.client).set()
    assert await asyncio.wait_for(running, 60) == 1
    assert s.stealing.counts["refused"] >= 1


@on_a_scene()
async def test_a_task_that_seceded_is_not_taken_and_its_worker_is_free(s):
    gone = s.client.submit(left, "out", workers=[s.first.address], allow_other_workers=True, key="gone")
    await until_async(lambda: s.first.long_running, "the task to secede")
    assert not s.stealing.ledger.entries
    assert {row.starts_in(0.0) for row in s.stealing.ledger.rows.values()} == {0.0}
    s.stealing.balance()
    assert not s.stealing.in_flight
    await Event("out", s.client).set()
    await asyncio.wait_for(gone, 60)


@on_a_scene()
async def test_an_answer_that_comes_too_late_moves_nothing(s):
    futures = await s.still(3)
    placed = {key: ts.processing_on for key, ts in s.scheduler.tasks.items()}
    answer = s.scheduler.stream_handlers["steal-response"]
    for key in (*placed, "forgotten"):
        for state in ("ready", "released", "executing"):
            answer(key=key, state=state, stimulus_id="steal-late", worker=s.first.address)
    assert {key: ts.processing_on for key, ts in s.scheduler.tasks.items()} == placed
    await s.done(futures)


@on_a_scene(workers=2, memory_limit=0)  # without the monitor, which lets a worker run again
async def test_a_paused_worker_is_given_nothing_until_it_runs_again(s):
    paused = next(w for w in s.workers if w.address == s.second.address)
    paused.status = Status.paused
    await until_async(lambda: s.second.status == Status.paused, "the scheduler to know of the pause")
    assert await holders(s, piled(s, 30)) == {s.first.address}
    waiting = await s.still(12)
    await s.stealing.start()
    paused.status = Status.running
    taken = waiting[1:]
    await asyncio.wait_for(wait(taken), 60)
    assert {ws for future in taken for ws in s.task(future.key).who_has} == {s.second}
    await s.done(waiting)


@on_a_scene(workers=2)
async def test_a_step_costs_the_same_with_many_tasks_that_may_not_move(s):
    """Calls of functions are counted, and nothing is timed."""

    kept, calls = [], []
    for count in (200, 1000):
        more = ["gate"] * (count - len(kept))
        kept += s.client.map(blocked, more, workers=[s.first.address], pure=False)
        await until_async(lambda count=count: len(s.first.processing) == count, f"{count} tasks")
        calls.append(calls_of(s.scheduler.periodic_callbacks["stealing"].callback))
    assert calls[1] < 1.2 * calls[0]
    await s.client.cancel(kept)
    await Event("gate", s.client).set()


def calls_of(step):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls
