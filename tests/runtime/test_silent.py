"""Workers that do not answer, and schedulers that did not listen: who is taken for silent, and what that costs."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from distributed import Client, Event, LocalCluster, wait

import dask_ferro as ff
from dask_ferro.runtime import waits as module
from tests.runtime.test_scheduler import on_cluster
from tests.runtime.test_waits import SOON, _block, _inc, _pid, _running, _soon
from tests.waiting import finished_async


async def _until(holds, saying):
    async def seen():
        while not holds():
            await asyncio.sleep(0.01)

    await _soon(seen(), saying)


def test_a_scheduler_that_was_busy_takes_no_worker_for_silent():
    """It reads no answer meanwhile: an answer that came in time counts, and the task is not placed twice."""

    async def test(client, scheduler):
        await ff.install(client)
        stealing = scheduler.extensions["stealing"]
        victim, thief = (scheduler.workers[a] for a in sorted(scheduler.workers))
        blocker = client.submit(_block, "stall", workers=[victim.address], key="blocker-stall")
        await _running(scheduler, blocker.key)
        held = client.submit(_inc, 1, workers=[victim.address], key="held")
        await _running(scheduler, held.key)
        await _until(lambda: scheduler.workers[victim.address].executing, "a heartbeat of the busy worker")
        ts = scheduler.tasks[held.key]
        stealing.move_task_request(ts, victim, thief)
        time.sleep(module._SILENT + 0.7)  # the scheduler's loop is held up
        closed = []
        try:

            async def answered():
                while ts in stealing.in_flight or ts.state == "processing":
                    closed.extend(stealing.waits.silent)
                    await asyncio.sleep(0)

            await _soon(answered(), "the answer, and the task")
            counts = stealing.counts
            assert (counts["confirmed"], counts["stale"], closed) == (1, 0, [])
        finally:
            await Event("stall", client=client).set()
        assert await _soon(held, "the one that moved") == 2

    on_cluster(test, workers=2)


def test_a_stolen_task_counts_as_running_although_nothing_else_happens():
    """No transition tells of its message; for ever at its start, what waits behind it would not be seen to wait."""

    async def test(client, scheduler):
        await ff.install(client)
        stealing = scheduler.extensions["stealing"]
        victim, thief = sorted(scheduler.workers)
        first = client.submit(_block, "alone", workers=[victim], key="blocker-alone")
        await _running(scheduler, first.key)
        second = client.submit(
            _block, "alone", workers=[victim], allow_other_workers=True, key="second-alone"
        )
        entries = stealing.ledger.entries
        try:
            await _until(
                lambda: second.key in entries and entries[second.key].worker.address == thief, "the move"
            )
            await _until(
                lambda: entries[second.key].started < float("inf"), "the stolen task to count as running"
            )
        finally:
            await Event("alone", client=client).set()
        await finished_async([first, second], "both")

    on_cluster(test, workers=2)


def test_each_task_that_waits_is_counted_once():
    """Of many, each tick shows others: one that is shown again is none that began to wait."""

    async def test(client, scheduler):
        await ff.install(client, tick=0.05, patience=0.1)
        busy = sorted(scheduler.workers)[0]
        waits = scheduler.extensions["stealing"].waits
        blocker = client.submit(_block, "many", workers=[busy], key="blocker-many")
        await _running(scheduler, blocker.key)
        held = client.map(_inc, range(60), workers=[busy], pure=False)
        turn = waits._turn
        try:
            await _until(lambda: waits._turn > turn + 40, "40 ticks")
            assert 40 <= waits.began["restricted"] <= len(held)
        finally:
            await Event("many", client=client).set()
        await finished_async(held, "those that waited")

    on_cluster(test, workers=2)


def _slow(i):
    time.sleep(0.05)
    return i


def test_all_that_waits_at_a_silent_worker_leaves_soon():
    """Silence is found out once: each further task does not wait for as long again."""
    count = 40
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        ff.install(client)
        pids = client.run(_pid)
        hung = min(pids)
        wait(client.map(_slow, range(4), pure=False), timeout=SOON)  # their duration is known
        os.kill(pids[hung], signal.SIGSTOP)
        try:
            where = {"workers": [hung], "allow_other_workers": True, "pure": False}
            behind = [client.submit(_slow, i, **where) for i in range(count)]
            end = time.monotonic() + SOON
            while sum(f.done() for f in behind) < count - 1:
                assert time.monotonic() < end, (
                    f"{sum(f.done() for f in behind)} of {count - 1} in {SOON:.0f} s"
                )
                time.sleep(0.05)
        finally:
            os.kill(pids[hung], signal.SIGCONT)
        assert client.gather(behind) == list(range(count))


def test_roots_that_are_queued_pass_a_silent_worker_by():
    """It has a slot, as far as Dask knows; what is put there would wait until it is found out again."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        ff.install(client)
        pids = client.run(_pid)
        hung = min(pids)
        wait(client.map(_slow, range(4), pure=False), timeout=SOON)  # their duration is known
        os.kill(pids[hung], signal.SIGSTOP)
        try:
            waits = cluster.scheduler.extensions["stealing"].waits
            where = {"workers": [hung], "allow_other_workers": True, "pure": False}
            behind = [client.submit(_slow, i, **where) for i in range(2)]
            end = time.monotonic() + SOON
            while hung not in waits.silent or sum(f.done() for f in behind) < 1:
                assert time.monotonic() < end, f"waited {SOON:.0f} s for the worker to count as silent"
                time.sleep(0.05)
            roots = client.map(_slow, range(30), pure=False)
            given = set()
            while not all(f.done() for f in roots):
                assert time.monotonic() < end + SOON, "the roots, on the worker that is left"
                given |= {ts.key for ts in list(cluster.scheduler.workers[hung].processing)}
                time.sleep(0.005)
            assert not given & {f.key for f in roots}
        finally:
            os.kill(pids[hung], signal.SIGCONT)
        assert client.gather(behind + roots) == [0, 1, *range(30)]
        assert _heard_again(waits)


def _heard_again(waits):
    """Whether no worker counts as silent, soon."""
    end = time.monotonic() + SOON
    while waits.silent and time.monotonic() < end:
        time.sleep(0.05)
    return not waits.silent
