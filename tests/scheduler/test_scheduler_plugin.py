"""Parts of the scheduler plugin: they come and go by one call, and are given each fact once."""

from __future__ import annotations

import logging

import pytest
from distributed import WorkerPlugin
from distributed.protocol.pickle import dumps

from dask_ferro.scheduler import reach
from dask_ferro.scheduler.plugin import Part, part_of, plugin_of, put_on, take_off
from tests.clusters import on_cluster


class Heard(Part):
    """A part that keeps what it is given."""

    name = "heard"

    def __init__(self, told=None, fails=False, needed=False):
        self.facts, self.told, self.fails, self.needed = [], told, fails, needed

    def serves(self, other):
        return self.told == other.told

    @property
    def is_needed(self):
        return self.needed

    async def ready(self):
        if self.fails:
            raise ZeroDivisionError("on purpose")

    async def stop(self):
        self.facts.append("stop")

    def calls(self):
        return {"heard_told": self.answer}

    async def answer(self):
        return self.told

    def task_assigned(self, ts):
        self.facts.append(("assigned", ts.key))

    def task_left(self, ts, finish, seconds, message):
        self.facts.append(("left", ts.key, finish, seconds is not None, message["worker"]))

    def task_changed(self, ts, start, finish):
        self.facts.append(("changed", ts.key, start, finish))


class Wrong(Part):
    """A part that has an error."""

    name = "wrong"

    def task_assigned(self, ts):
        raise ValueError("on purpose")


@on_cluster(workers=1)
async def test_each_fact_is_given_to_each_part_whatever_another_one_does(client, scheduler, caplog):
    part = Heard()
    for one in (Wrong(), part):
        await put_on(one, dask_scheduler=scheduler)
    (worker,) = scheduler.workers
    with caplog.at_level(logging.ERROR):
        assert await client.submit(abs, -1, key="x") == 1
    assert part.facts[:2] == [("assigned", "x"), ("left", "x", "memory", True, worker)]
    assert {fact[0] for fact in part.facts[2:]} <= {"changed"}
    assert "lost track: task_assigned" in caplog.text


@on_cluster(workers=1)
async def test_a_part_is_put_on_once_and_replaced_where_it_does_not_serve(client, scheduler):
    first, same, other = Heard(1), Heard(1), Heard(2)
    for part, on in ((first, first), (same, first), (other, other)):
        await put_on(part, dask_scheduler=scheduler)
        assert part_of(scheduler, Heard) is on
        assert await client.scheduler.heard_told() == on.told
    assert (first.facts, same.facts, other.facts) == (["stop"], [], [])
    other.needed = True
    await take_off("heard", dask_scheduler=scheduler)
    assert part_of(scheduler, Heard) is other
    other.needed = False
    await take_off("heard", dask_scheduler=scheduler)
    await take_off("heard", dask_scheduler=scheduler)
    assert (plugin_of(scheduler), "heard_told" in scheduler.handlers, other.facts) == (None, False, ["stop"])


@on_cluster(workers=1)
async def test_a_part_that_cannot_begin_is_off_and_so_is_the_one_before(client, scheduler):
    first, wrong = Heard(1), Heard(2, fails=True)
    await put_on(first, dask_scheduler=scheduler)
    with pytest.raises(ZeroDivisionError):
        await put_on(wrong, dask_scheduler=scheduler)
    assert (first.facts, wrong.facts, plugin_of(scheduler)) == (["stop"], ["stop"], None)


class Stuck(Heard):
    """A part that cannot be taken off without an error."""

    async def stop(self):
        raise ZeroDivisionError("on purpose")


@on_cluster(workers=1)
async def test_a_part_whose_end_has_an_error_is_off_too(client, scheduler):
    for end in (
        lambda: take_off("heard", dask_scheduler=scheduler),
        lambda: put_on(Heard(2), dask_scheduler=scheduler),
    ):
        await put_on(Stuck(1), dask_scheduler=scheduler)
        with pytest.raises(ZeroDivisionError):
            await end()
        assert plugin_of(scheduler) is None


class Picky(WorkerPlugin):
    """A plugin that one worker refuses."""

    name = "picky"

    def setup(self, worker):
        if worker.name == 0:
            raise ZeroDivisionError("on purpose")


@on_cluster(workers=2)
async def test_a_worker_plugin_that_one_refused_is_taken_off_all(client, scheduler):
    async def have():
        return set((await client.run(lambda dask_worker: "picky" in dask_worker.plugins)).values())

    with pytest.raises(RuntimeError, match="on purpose"):
        await reach.put_on("picky", dumps(Picky()), 10.0, dask_scheduler=scheduler)
    assert (await have(), "picky" in scheduler.worker_plugins) == ({False}, False)
