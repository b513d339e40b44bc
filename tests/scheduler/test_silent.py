"""Workers that do not answer, and schedulers that did not read: the workers that count as silent, and the cost."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from functools import partial

from distributed import Event, wait

import dask_ferro as ff
from dask_ferro.scheduler import waits as module
from tests.clusters import on_cluster, running, stopped
from tests.scheduler.test_waits import SOON, _block, _blocked, _in_state, _inc, _soon
from tests.waiting import finished_async, until, until_async

_until = partial(until_async, seconds=SOON)


@on_cluster(workers=2)
async def test_a_scheduler_that_was_busy_takes_no_worker_for_silent(client, scheduler):
    """It reads no answer meanwhile: an answer that came in time counts, and the task is not placed twice."""

    await ff.install(client)
    stealing = scheduler.extensions["stealing"]
    victim, thief = (scheduler.workers[a] for a in sorted(scheduler.workers))
    closed = []

    def answered():
        if ts.key not in stealing.in_flight and ts.state != "processing":
            return True
        closed.extend(stealing.waits.silent)
        return False

    async with _blocked(client, scheduler, victim.address):
        held = client.submit(_inc, 1, workers=[victim.address], key="held")
        await _in_state(scheduler, held, "processing")
        await _until(lambda: scheduler.workers[victim.address].executing, "a heartbeat of the busy worker")
        ts = scheduler.tasks[held.key]
        stealing.move_task_request(ts, victim, thief)
        time.sleep(module._SILENT + 0.7)  # the scheduler's loop is held up
        await _until(answered, "the answer, and the task", every=0)
        counts = stealing.counts
        assert (counts["confirmed"], counts["stale"], closed) == (1, 0, [])
    assert await _soon(held, "the one that moved") == 2


@on_cluster(workers=2)
async def test_a_stolen_task_counts_as_running_although_nothing_else_happens(client, scheduler):
    """No transition tells of its message; for ever at its start, what waits behind it would not be seen to wait."""

    await ff.install(client)
    stealing = scheduler.extensions["stealing"]
    victim, thief = sorted(scheduler.workers)
    first = client.submit(_block, "alone", workers=[victim], key="blocker-alone")
    await _in_state(scheduler, first, "processing")
    second = client.submit(_block, "alone", workers=[victim], allow_other_workers=True, key="second-alone")
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


@on_cluster(workers=2, installed=True, parameters={"tick": 0.05, "patience": 0.1})
async def test_each_task_that_waits_is_counted_once(client, scheduler):
    """Of many, each tick shows others: one that is shown again is none that began to wait."""
    busy = sorted(scheduler.workers)[0]
    core, waits = scheduler.extensions["stealing"].core, scheduler.extensions["stealing"].waits
    async with _blocked(client, scheduler, busy) as others:
        held = client.map(_inc, range(60), workers=[busy], pure=False)
        others += held
        ticks = core.ticks
        await _until(lambda: core.ticks > ticks + 40, "40 ticks")
        assert 40 <= waits.began["restricted"] <= len(held)


def _slow(i):
    time.sleep(0.05)
    return i


@contextmanager
def _to_hang():
    """Two worker processes, and of one that may be stopped its address and its process."""
    with running(2) as client:
        ff.install(client)
        pids = client.run(os.getpid)
        wait(client.map(_slow, range(4), pure=False), timeout=SOON)  # their duration is known
        yield client, *min(pids.items())


def test_all_that_waits_at_a_silent_worker_leaves_soon():
    """Silence is found out once: each further task does not wait for as long again."""
    count = 40
    with _to_hang() as (client, hung, pid):
        with stopped(pid):
            where = {"workers": [hung], "allow_other_workers": True, "pure": False}
            behind = [client.submit(_slow, i, **where) for i in range(count)]
            until(
                lambda: sum(f.done() for f in behind) >= count - 1,
                f"{count - 1} of {count} tasks",
                seconds=SOON,
                seen=lambda: sum(f.done() for f in behind),
            )
        assert client.gather(behind) == list(range(count))


def test_roots_that_are_queued_pass_a_silent_worker_by():
    """It has a slot, as far as Dask knows; what is put there would wait until it is found out again."""
    with _to_hang() as (client, hung, pid):
        with stopped(pid):
            waits = client.cluster.scheduler.extensions["stealing"].waits
            where = {"workers": [hung], "allow_other_workers": True, "pure": False}
            behind = [client.submit(_slow, i, **where) for i in range(2)]
            until(
                lambda: hung in waits.silent and any(f.done() for f in behind),
                "the worker to count as silent, and one of its tasks",
                seconds=SOON,
            )
            roots = client.map(_slow, range(30), pure=False)
            given = set()

            def done():
                given.update(ts.key for ts in list(client.cluster.scheduler.workers[hung].processing))
                return all(f.done() for f in roots)

            until(done, "the roots, on the worker that is left", seconds=SOON, every=0.005)
            assert not given & {f.key for f in roots}
        assert client.gather(behind + roots) == [0, 1, *range(30)]
        until(
            lambda: not waits.silent, "the worker to be heard again", seconds=SOON, seen=lambda: waits.silent
        )
