"""The names of Dask's own stealing extension that Dask itself, dashboards and scripts use work on ours."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from distributed import Event, secede, wait
from distributed.stealing import WorkStealing

from dask_ferro.policy.events import Hurry
from dask_ferro.scheduler.stealing import Stealing
from tests import clusters
from tests.waiting import until_async


class Scene:
    """Two or more workers; a task that blocks the first one, and some that wait behind it."""

    def __init__(self, client, cluster, scheduler, workers):
        self.client, self.scheduler, self.workers = client, scheduler, workers
        self.stealing = scheduler.extensions["stealing"]
        self.first, self.second, *_ = scheduler.workers.values()

    async def pile(self, count=10, name="go", **options):
        """Return futures: `count` tasks that wait at the first worker, behind one that blocks it."""
        where = {"workers": [self.first.address], "allow_other_workers": True, "pure": False, **options}
        there = len(self.first.processing)
        first = self.client.submit(blocked, name, key=f"first-{name}", **where)
        await until_async(lambda: len(self.first.processing) == there + 1, "the first task to run")
        tasks = [self.client.submit(same, i, key=f"{name}-{i}", **where) for i in range(count)]
        await until_async(
            lambda: len(self.first.processing) == there + count + 1,
            f"{count} tasks to wait at the first worker",
        )
        return [first, *tasks]

    async def still(self, count=10, **options):
        """The same, without stealing."""
        await self.stealing.stop()
        return await self.pile(count, **options)

    async def done(self, futures, name="go"):
        """Open the gate; every task has a result, and nothing is left in the books."""
        await Event(name, self.client).set()
        await asyncio.wait_for(wait(futures), 60)
        assert [f.status for f in futures] == ["finished"] * len(futures)
        await until_async(lambda: not self.stealing.in_flight, "the answers to all requests")
        assert not self.stealing.ledger.entries
        assert all(
            amount == 0 for w in self.scheduler.workers.values() for amount in w.used_resources.values()
        )

    def task(self, key):
        return self.scheduler.tasks[key]


def blocked(name):
    assert Event(name).wait(timeout=60)


def same(i):
    return i


def left(name):
    secede()
    assert Event(name).wait(timeout=60)


# A task moves however short it is, and however little that gains.
MOVES_EACH = {"shortest": 0.0, "margin": 0.0}


@asynccontextmanager
async def scene(workers=3, installed=True, parameters=MOVES_EACH, **options):
    async with clusters.opened(workers, installed=installed, parameters=parameters, **options) as given:
        yield {"s": Scene(**given)}


on_a_scene = clusters.plays(scene, "s")


async def moves_on_request(s):
    """`move_task_request`, `move_task_confirm`: the task is the thief's, first of two requests; nothing is lost."""
    # Where it goes is the caller's to answer for, as with Dask.
    futures = await s.still(allow_other_workers=False)
    third = list(s.scheduler.workers.values())[2]
    assert s.stealing.move_task_request(s.task("go-9"), s.first, s.second).startswith("ferro-steal-")
    assert s.stealing.in_flight["go-9"].thief.address == s.second.address
    assert s.stealing.move_task_request(s.task("go-9"), s.first, third) == "in-flight"
    await until_async(lambda: s.task("go-9").state == "memory", "the moved task to be done")
    assert {ws.address for ws in s.task("go-9").who_has} == {s.second.address}
    assert s.stealing.counts["confirmed"] == 1
    await s.done(futures)
    assert len(s.scheduler.workers) == 3  # an answer that raises costs the victim its connection


async def steals_again_after_a_stop(s):
    """`stop`, `start`: no steps in between, and afterwards those that events call for, not the tick's alone."""
    await s.stealing.stop()
    assert not s.stealing.in_flight
    futures = await s.pile()
    assert s.stealing.counts["requests"] == 0
    s.stealing.settings = s.stealing.settings.__class__(**{**vars(s.stealing.settings), "tick": 3600.0})
    await s.stealing.start()
    await s.stealing.start()
    await until_async(lambda: s.stealing.counts["confirmed"] > 0, "a move, without a tick")
    await s.done(futures)


async def balances_by_hand(s):
    """`balance`, `count`, `metrics`, `log`, `story`: one step over all workers, also while it is stopped."""
    futures = await s.still()
    s.stealing.balance()
    key = next(iter(s.stealing.in_flight))
    assert s.stealing.count == 1
    assert sum(s.stealing.metrics["request_count_total"].values()) == len(s.stealing.in_flight)
    assert any(key in line for line in s.stealing.story(key))
    s.stealing.log(("mine", key))
    assert s.stealing.story(key)[-1] == ("mine", key)
    await s.done(futures)


async def takes_out(s):
    """`remove_key_from_stealable`: a task that seceded is out of the book; costs of unknown tasks are the ledger's."""
    futures = await s.still()
    ts = s.task("go-5")
    s.stealing.remove_key_from_stealable(ts)
    assert ts.key not in s.stealing.ledger.entries
    assert s.stealing.move_task_request(ts, s.first, s.second) == "comm-closed"
    assert s.stealing.unknown_durations == {}
    await s.done(futures)


async def judges_as_dask_does(s):
    """`steal_time_ratio`, `stealing_objective`, `cost_multipliers`, `scheduler`: Dask's own figures, unchanged."""
    futures = await s.still()
    ts, busy = s.task("go-5"), {ws: ws.occupancy for ws in s.scheduler.workers.values()}
    assert s.stealing.steal_time_ratio(ts) == WorkStealing.steal_time_ratio(s.stealing, ts)
    assert s.stealing.stealing_objective(ts, s.first, occupancies=busy) > (0, -1)
    assert s.stealing.cost_multipliers == WorkStealing.cost_multipliers
    assert s.stealing.scheduler is s.scheduler
    await s.done(futures)


async def hears_of_workers_and_restarts(s):
    """`add_worker`, `remove_worker`, `restart`, `in_flight`: a restart leaves an empty book."""
    await s.stealing.stop()
    await s.pile(name="before")
    await Event("before", s.client).set()
    await s.client.restart(wait_for_workers=False)
    assert isinstance(s.scheduler.extensions["stealing"], Stealing)
    assert (s.stealing.ledger.entries, s.stealing.ledger.waiting, s.stealing.in_flight) == ({}, 0, {})
    assert sorted(s.scheduler.workers) == sorted(s.stealing.ledger.rows)


async def ends(s):
    """`teardown`: no steps any more, and what waits is done all the same."""
    futures = await s.still(count=2)
    await s.stealing.start()
    s.stealing.teardown()
    assert "stealing" not in s.scheduler.periodic_callbacks
    await s.done(futures)


NAMES = {
    moves_on_request: ("move_task_request", "move_task_confirm"),
    steals_again_after_a_stop: ("start", "stop"),
    balances_by_hand: ("balance", "count", "metrics", "log", "story"),
    takes_out: ("remove_key_from_stealable", "unknown_durations"),
    judges_as_dask_does: ("steal_time_ratio", "stealing_objective", "cost_multipliers", "scheduler"),
    hears_of_workers_and_restarts: ("add_worker", "remove_worker", "restart", "in_flight"),
    ends: ("teardown",),
}  # fmt: skip


@pytest.mark.parametrize("names", [pytest.param(names, id=", ".join(names)) for names in NAMES.values()])
def test_names_of_dasks_stealing_work_on_ours(names):
    on_a_scene()(next(test for test, own in NAMES.items() if own == names))()


@on_a_scene()
async def test_a_task_that_its_thief_no_longer_takes_is_told_as_stale_everywhere(s):
    """A silent worker's row is closed while Dask calls it running: log, pages and counts agree."""

    futures = await s.still(allow_other_workers=False)
    stimulus = s.stealing.move_task_request(s.task("go-9"), s.first, s.second)
    s.stealing.ledger.set_accepts(s.second.address, False)
    await until_async(lambda: s.stealing.counts["stale"], "the answer")
    assert (s.stealing.counts["confirmed"], s.stealing.counts["seconds_moving"]) == (0, 0)
    assert [moved.outcome for moved in s.stealing.records.moves.since()[0]] == ["stale"]
    assert [line[0] for line in s.stealing.story("go-9")][-1] == "reschedule"
    assert any(stimulus in line for line in s.scheduler.story("go-9"))  # it was placed anew by that answer
    s.stealing.ledger.set_accepts(s.second.address, True)
    await s.done(futures)


@on_a_scene()
async def test_where_one_instruction_fails_the_others_are_done(s, caplog):
    done = []

    def hurried(told, now):
        done.append(told.worker)
        if told.worker == "first":
            raise ValueError("no such connection")

    s.stealing._acts[Hurry] = hurried
    with pytest.raises(ValueError, match="no such connection"):
        s.stealing._enact([Hurry("first", True), Hurry("second", True)], 0.0)
    assert done == ["first", "second"]
    assert "could not do Hurry(worker='first'" in caplog.text
