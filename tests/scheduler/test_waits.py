"""Short tasks beside a worker that has nothing to do, on real schedulers: they do not wait for a long one."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from uuid import uuid4

import numpy as np
import pytest
from distributed import Client, Event, LocalCluster
from onnx import helper

import dask_ferro as ff
from dask_ferro.scheduler.plugin import part_of
from dask_ferro.scheduler.scheduling import Scheduling
from tests.clusters import on_cluster
from tests.graphs import model
from tests.scheduler.test_events import published
from tests.scheduler.test_prometheus import scraped
from tests.waiting import finished_async, opened, until_async

# Seconds in which what does not wait for the long task is done by far, on a machine with everything else to do.
SOON = 30.0


def _block(name):
    opened(name)


def _made(nbytes, i):
    return np.full(nbytes // 8, float(i))


def _read(x):
    return float(x[0])


async def _soon(what, saying):
    """Await something, or fail saying what was waited for."""
    try:
        return await asyncio.wait_for(what, SOON)
    except TimeoutError:
        raise AssertionError(f"waited {SOON:.0f} s for {saying}") from None


async def _in_state(scheduler, future, state):
    await until_async(
        lambda: (ts := scheduler.tasks.get(future.key)) is not None and ts.state == state,
        f"{future.key} to be {state}",
        seconds=SOON,
    )


@asynccontextmanager
async def _blocked(client, scheduler, worker):
    """A worker that is at one task until the block ends; then the task and those that were noted have to end too."""
    name, others = f"gate-{uuid4().hex}", []
    blocker = client.submit(_block, name, workers=[worker], key=f"blocker-{name}")
    await _in_state(scheduler, blocker, "processing")
    try:
        yield others
        assert blocker.status == "pending"
    finally:
        await Event(name, client=client).set()
    await finished_async([blocker, *others], "what waited")


@pytest.mark.parametrize("nbytes", [800, 246_000, 4_000_000])
@on_cluster(workers=3)
async def test_readers_of_what_a_busy_worker_holds_do_not_wait_for_it(client, scheduler, nbytes):
    await ff.install(client)
    busy = sorted(scheduler.workers)[0]
    warm = client.submit(_made, 800, 0, key="warm")
    await finished_async(client.map(_read, [warm] * 4, pure=False))  # their duration is known
    data = [client.submit(_made, nbytes, i, workers=[busy], pure=False) for i in range(12)]
    await finished_async(data)
    async with _blocked(client, scheduler, busy):
        found = client.map(_read, data, pure=False)
        got = await _soon(client.gather(found), "readers of what lies on a busy worker")
        assert got == [float(i) for i in range(len(data))]


def _images():
    """A small net over images, of about a millisecond a chunk of 20, and what it reads: 246 kB a chunk."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(4, 3, 3, 3)).astype("f4")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["y"]),
    ]
    return model(nodes, {"x": ("N", 3, 32, 32)}, {"y": ("N", 4, 1, 1)}, {"w": weights})


def test_calls_of_a_model_do_not_wait_for_a_task_that_sleeps():
    """Three workers, one long task, then calls of 20 chunks one after the other."""
    options = {"threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(n_workers=3, **options) as cluster, Client(cluster) as client:
        ff.install(client)
        x = np.random.default_rng(1).normal(size=(400, 3, 32, 32)).astype("f4")
        net = ff.from_onnx(_images())
        want = net(x).compute(scheduler="sync")
        blocker = client.submit(_block, "sleeps", key="sleeps")
        try:
            for call in range(4):
                got = client.compute(net(x, batch_size=20)).result(timeout=SOON)
                assert np.allclose(got, want, atol=1e-4), f"call {call}"
                assert blocker.status == "pending"
        finally:
            Event("sleeps", client=client).set()
        blocker.result(timeout=SOON)


# -- a quiet cluster, and one that is busy with itself ------------------------------------------------------


def _inc(x):
    return x + 1


@pytest.mark.parametrize("kept", [False, True])
@on_cluster(workers=4)
async def test_a_quiet_cluster_uses_all_of_its_workers(client, scheduler, kept):
    await ff.install(client)
    results, where = [], dict.fromkeys(scheduler.workers, 0)
    for i in range(40):
        future = client.submit(_inc, i, pure=False)
        await _soon(finished_async(future), f"task {i}")
        (ws,) = scheduler.tasks[future.key].who_has
        where[ws.address] += 1
        results += [future] if kept else []
    assert min(where.values()) >= 3, where


@on_cluster(workers=4)
async def test_large_results_that_are_kept_lie_on_all_workers(client, scheduler):
    await ff.install(client)
    kept = []
    for i in range(12):
        kept.append(client.submit(_made, 4_000_000, i, pure=False))
        await _soon(finished_async(kept[-1]), f"task {i}")
    held = sorted(ws.nbytes for ws in scheduler.workers.values())
    assert held[-1] <= 2 * held[0], held


def _nothing(x, y=None):
    pass


@on_cluster(workers=10)
async def test_short_tasks_stay_with_their_inputs_while_the_scheduler_is_busy(client, scheduler):
    """A task counts as running from when its message has left: before, it is not overdue, however long that takes."""

    await ff.install(client)
    first = sorted(scheduler.workers)[0]
    found = []
    for _ in range(3):  # on a machine that stalls for some ten milliseconds tasks leave, and are right to
        xs = client.map(_nothing, range(10), workers=[first], pure=False)
        await finished_async(xs)
        readers = client.map(_nothing, range(100), y=xs, pure=False)
        await _soon(finished_async(readers), "100 tasks that do nothing")
        found.append(len({ws.address for x in xs for ws in scheduler.tasks[x.key].who_has}))
    assert min(found) <= 3, found


@on_cluster(workers=2)
async def test_tasks_that_would_rather_run_on_workers_that_died_run_on_others(client, scheduler):
    await ff.install(client)
    cluster = client.cluster
    old = sorted(scheduler.workers)
    cluster.scale(0)

    await until_async(lambda: not scheduler.workers, "the workers to leave", seconds=SOON)
    future = client.submit(_inc, 1, workers=old, allow_other_workers=True)
    # Else the new worker may be there before the task is, which then never waits for the old ones.
    await _in_state(scheduler, future, "no-worker")
    cluster.scale(1)
    assert await _soon(future, "a task whose workers are gone") == 2


# -- messages ------------------------------------------------------------------------------------------


async def _told_to_others(scheduler):
    """What events and metrics say of waits: the events that count some as restricted, and three metrics."""
    part_of(scheduler, Scheduling).events.tick()
    found = await scraped(scheduler)
    names = ("idle_waits", "idle_wait_seconds", "idle_waits_begun_total")
    events = [event for event in published(scheduler, "wait") if event["restricted"]]
    return events, *(found[f"dask_ferro_{name}"] for name in names)


@on_cluster(workers=2)
async def test_a_task_that_waits_beside_an_idle_worker_is_told_with_its_reason(client, scheduler):
    await ff.install(client)
    busy = sorted(scheduler.workers)[0]
    waits = scheduler.extensions["stealing"].waits
    async with _blocked(client, scheduler, busy):
        held = client.submit(_inc, 1, workers=[busy], key="held")
        await until_async(
            lambda: any(wait.key == held.key for wait in waits.now), "what waits to be told", seconds=SOON
        )
        (line,) = [w for w in waits.now if w.key == held.key]
        assert (line.worker, line.reason, line.idle) == (busy, "restricted", 1)
        assert "held waits at" in line.sentence()
        assert waits.counts()["restricted"] == waits.began["restricted"] == 1
        (event,), counts, longest, begun = await _told_to_others(scheduler)
        assert event["restricted"] == counts["restricted"] == begun["restricted"] == 1
        assert [line for line in event["sample"] if line.startswith("held waits at")]
        assert longest[""] > 0
    assert await _soon(held, "the one that waited") == 2


@on_cluster(workers=3)
async def test_a_task_that_its_worker_was_asked_for_is_told_once_and_as_that(client, scheduler):
    """It is shown to policies as one that may not move, as actors are, since it is on its way."""

    busy = sorted(scheduler.workers)[0]
    alone = client.submit(_inc, 0, workers=[busy])
    await finished_async(alone)
    comm = scheduler.stream_comms[busy]
    send = comm.send
    comm.send = lambda *messages: send(*(m for m in messages if m["op"] != "steal-request"))
    await ff.install(client)
    (worker,) = (w for w in client.cluster.workers.values() if w.address == busy)
    worker.periodic_callbacks["heartbeat"].stop()
    waits, told = scheduler.extensions["stealing"].waits, []

    def is_told():
        told.append([wait.reason for wait in waits.now if wait.key == held.key])
        return told[-1] == ["worker_unresponsive"]

    async with _blocked(client, scheduler, busy):
        held = client.submit(_inc, alone, workers=[busy], allow_other_workers=True, key="held-asked")
        await until_async(is_told, "what was asked for to be told", seconds=SOON, seen=lambda: told[-3:])
        assert {tuple(reasons) for reasons in told} <= {
            (),
            ("about_to_move",),
            ("steal_pending",),
            ("worker_unresponsive",),
        }
        comm.send = send
    assert await _soon(held, "the one that waited") == 2
