"""Copies of what a preemption would lose: made in time, kept by Dask's memory manager, and no more than needed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from distributed import Client, Event, Future
from distributed.active_memory_manager import ReduceReplicas
from distributed.scheduler import ClientState, TaskGroup, TaskPrefix, TaskState
from distributed.system import MEMORY_LIMIT

import dask_ferro as ff
from dask_ferro.runtime.pools.providers import SpecPools
from dask_ferro.runtime.replication import copies as module
from dask_ferro.runtime.replication.anchors import CLIENT, Anchors
from tests import clusters
from tests.waiting import finished_async, opened, until, until_async

APART = {
    "distributed.worker.memory.pause": False,
    "distributed.scheduler.active-memory-manager.start": False,  # the tests run it
}
ROOM_FOR_THREE = 3.5e6 / (0.6 * min(MEMORY_LIMIT, 64e9))  # a worker's own limit is at most the machine's
RAN: Counter[str] = Counter()


def made(name, seconds, nbytes=1000):
    """Count, take some time, and return some bytes."""
    RAN[name if isinstance(name, str) else " ".join(map(str, name))] += 1
    time.sleep(seconds)
    return bytes(nbytes)


def link(before, name, seconds):
    """One more of a chain."""
    return made(name, seconds)


class Play:
    """A scheduler with the roster, and workers by name."""

    def __init__(self, client, scheduler, workers):
        self.client, self.scheduler, self.workers = client, scheduler, workers

    async def expose(self, **jobs):
        await self.client.scheduler.ferro_exposed(jobs=jobs)

    def on(self, worker, name, seconds, **options):
        where = [self.workers[worker].address]
        return self.client.submit(
            made, name, seconds, key=name, workers=where, allow_other_workers=True, **options
        )

    def read(self, future, name):
        """The length of a result, by preference on the worker "spot"."""
        where = [self.workers["spot"].address]
        return self.client.submit(len, future, key=name, workers=where, allow_other_workers=True)

    async def made(self, worker, name, seconds):
        result = self.on(worker, name, seconds)
        await finished_async([result])
        return result

    def graph(self, worker, wanted, **tasks):
        """Tasks of one graph: of the intermediate ones, no client asks for the results."""
        where = [self.workers[worker].address]
        return self.client.get(tasks, wanted, sync=False, workers=where, allow_other_workers=True)

    def holders(self, future):
        return {str(ws.name) for ws in self.scheduler.tasks[getattr(future, "key", future)].who_has or ()}

    @property
    def copies(self):
        return self.scheduler.plugins["ferro-roster"].copies

    async def lose(self, worker):
        await self.scheduler.remove_worker(self.workers[worker].address, stimulus_id="preempted")


def waits(value, name):
    """Read a value until its test lets go of it."""
    opened(name)


@asynccontextmanager
async def scene(*names, look=0.1, config=None, exposed=True):
    """Open workers of these names; the one of the name "spot" may be preempted, unless no worker is exposed yet."""
    RAN.clear()
    named = {name: {"memory_limit": "64GB"} for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LOOK", look)
        patch.setattr(module, "_SETTLED", 0.1)
        async with clusters.opened(
            named, roster=True, protocol="tcp", config=APART | (config or {})
        ) as given:
            by_name = {worker.name: worker for worker in given["workers"]}
            play = Play(given["client"], given["scheduler"], by_name)
            if exposed and "spot" in names:
                await play.expose(spot="job-1")
            yield {"p": play}


played = clusters.plays(scene, "p")


@played("spot", "safe")
async def test_a_preemption_without_warning_loses_nothing_that_was_copied(p):
    held = [p.on("spot", f"dear-{i}", 0.1) for i in range(8)]
    cheap, safe = p.on("spot", "cheap", 0.0), p.on("safe", "safe-one", 0.1)
    await finished_async([*held, cheap, safe])
    await until_async(lambda: all(p.holders(f) == {"spot", "safe"} for f in held), "a copy of each")
    await until_async(lambda: p.copies.made["results"] == 8, "all of them to be counted")
    assert (p.holders(cheap), p.holders(safe)) == ({"spot"}, {"safe"})
    await p.lose("spot")
    assert [len(value) for value in await p.client.gather(held)] == [1000] * 8
    assert {RAN[f.key] for f in held} == {1}
    assert (await p.client.scheduler.ferro_roster())["copies"] == {
        "results": 8,
        "bytes": sum(p.scheduler.tasks[f.key].nbytes for f in held),
    }


@played("spot", "safe")
async def test_scattered_data_and_the_end_of_a_chain_are_dear(p):
    scattered = await p.client.scatter(bytes(1000), workers=[p.workers["spot"].address])
    first = p.on("spot", "first", 0.2)
    last = p.client.submit(len, first, key="last", workers=[p.workers["spot"].address])
    await finished_async([last])
    del first  # to compute the last again, it would have to be as well
    await until_async(lambda: p.holders(last) == {"spot", "safe"}, "a copy of a length that took long")
    await until_async(lambda: p.holders(scattered) == {"spot", "safe"}, "a copy of the scattered one")


@played("spot", "safe", "other", exposed=False)
async def test_dasks_memory_manager_keeps_copies_while_they_are_wanted(p):
    manager = p.scheduler.extensions["amm"]
    before = set(manager.policies)
    assert {type(policy) for policy in before} == {ReduceReplicas}
    await p.expose(spot="job-1")
    dear = await p.made("spot", "dear", 0.1)
    await until_async(lambda: len(p.holders(dear)) == 2, "the copy")
    (other,) = {"safe", "other"} - p.holders(dear)
    third = p.client.submit(len, dear, workers=[p.workers[other].address], key="reads it")
    await finished_async([third])
    assert len(p.holders(dear)) == 3
    manager.run_once()
    await until_async(lambda: len(p.holders(dear)) == 2, "one copy too many to be dropped")
    for _ in range(3):
        manager.run_once()
        await asyncio.sleep(0)
    assert len(p.holders(dear)) == 2
    assert p.holders(dear) != {"spot"}
    await p.expose()
    assert manager.policies == before
    manager.run_once()
    await until_async(lambda: len(p.holders(dear)) == 1, "the copy to be dropped")


@played("spot", "safe", config={"ferro.elastic.copy-share": 0})
async def test_copies_have_a_share_of_memory_and_none_where_that_is_zero(p):
    assert p.copies.copying.share == 0
    _dear = await p.made("spot", "dear", 0.1)
    p.copies._look(time.monotonic())
    p.copies._look(time.monotonic() + 2 * module._SETTLED)
    assert not p.copies._coming


@played("spot", "safe", config={"ferro.elastic.copy-share": ROOM_FOR_THREE})
async def test_copies_take_no_more_than_their_share_however_long_it_goes_on(p):
    """A quarter of what was free at each look added up to nearly all of it."""
    held = [p.on("spot", f"dear-{i}", 0.1, nbytes=10**6) for i in range(8)]
    await finished_async(held)
    await until_async(lambda: p.copies.made["results"] == 3, "as many as fit into 3.5 MB")
    for later in (2.0, 4.0, 6.0):
        p.copies._look(time.monotonic() + later)
    assert not p.copies._coming
    await p.lose("spot")  # they are no copies any more
    await until_async(lambda: sum(RAN.values()) == 13, "the other five to run again", seen=lambda: RAN)


@played("spot", "safe", config={"ferro.elastic.copy-share": 1e-6})
async def test_an_input_that_would_be_lost_as_well_counts(p):
    """The length took no time, and its input cannot be copied: 0.2 s were lost with both."""
    first = p.on("spot", "first", 0.2, nbytes=10**6)
    last = p.read(first, "last")
    await finished_async([first, last])
    await until_async(lambda: p.holders(last) == {"spot", "safe"}, "a copy of the length")
    assert p.holders(first) == {"spot"}


@played("spot", "safe")
async def test_an_input_that_is_copied_itself_does_not_count(p):
    first = p.on("spot", "first", 0.2)
    last = p.read(first, "last")
    await finished_async([first, last])
    await until_async(lambda: p.holders(first) == {"spot", "safe"}, "a copy of the input")
    p.copies._look(time.monotonic() + 2.0)
    assert set(p.copies.kept) == {"first"}


@played("spot", "safe", look=3600.0)
async def test_what_is_about_to_be_released_is_not_copied(p, monkeypatch):
    """The input of a running task, which no other task reads."""
    dear = await p.made("spot", "dear", 0.1)
    reader = p.client.submit(waits, dear, "enough", key="reader", workers=[p.workers["spot"].address])
    await until_async(lambda: "reader" in p.scheduler.tasks, "the reader")
    del dear
    try:
        await until_async(lambda: not p.scheduler.tasks["dear"].who_wants, "nobody else to want it")
        for later in (0.0, 1.0):
            p.copies._look(time.monotonic() + later)
        assert not p.copies.kept
        monkeypatch.setattr(module, "_SOON", 0.0)  # it would have been
        p.copies._look(time.monotonic() + 1.0)
        assert set(p.copies.kept) == {"dear"}
    finally:
        await Event("enough", client=p.client).set()
    await finished_async([reader])


@played("spot", "safe")
async def test_a_long_chain_of_short_tasks_does_not_start_over(p):
    """Each result was released before it had been there for long enough: all of the chain ran again."""
    chain = {f"link-{i}": (link, f"link-{i - 1}", ["link", i], 0.1) for i in range(1, 60)}
    last = p.graph("spot", "link-59", **{"link-0": (made, ["link", 0], 0.1)}, **chain)
    await until_async(lambda: RAN["link 50"], "most of the chain to be done")
    assert len(p.copies.anchors.seconds) <= 2  # those before were let go
    await p.lose("spot")
    await finished_async([last])
    assert sum(RAN.values()) - 60 < 40
    del last
    await until_async(lambda: not p.copies.anchors.seconds and not p.scheduler.tasks, "all to be let go")


def followed(p, seconds=2.5):
    """A dear intermediate result of the worker "spot", and what waits with it."""
    return p.graph("spot", "reader", first=(made, "its name", seconds), reader=(waits, "first", "enough"))


async def held_and_copied(p):
    await until_async(lambda: set(p.copies.anchors.seconds) == {"first"}, "one to be held")
    await until_async(lambda: p.copies.made["results"] == 1, "its copy")


async def enough(p, *waiting):
    """Let those go on that wait for it, and wait for their ends."""
    await Event("enough", client=p.client).set()
    await finished_async(waiting)


async def released(p, key):
    await until_async(lambda: p.scheduler.tasks[key].state == "released", f"{key} to be released")


@played("spot", "safe")
async def test_anchors_are_let_go_with_what_they_were_for(p):
    reader = followed(p)
    await held_and_copied(p)
    await enough(p, reader)
    await until_async(lambda: not p.copies.anchors.seconds, "it to be let go")
    assert p.holders(reader) == {"spot", "safe"}
    await released(p, "first")
    assert CLIENT not in p.scheduler.clients


@played("spot", "safe")
async def test_nothing_is_held_where_no_job_is_preemptible_any_more(p):
    reader = followed(p)
    await until_async(lambda: set(p.copies.anchors.seconds) == {"first"}, "one to be held")
    await p.expose()
    assert not p.copies.anchors.seconds
    assert CLIENT not in p.scheduler.clients
    await enough(p, reader)
    await released(p, "first")


@pytest.mark.parametrize("scatters", [True, False])
@played("spot", "safe")
async def test_what_a_user_releases_or_cancels_is_gone(p, scatters):
    """It was held as long as anything that was made of it, and a cancel did nothing."""
    where = [p.workers["spot"].address]
    if scatters:
        dear, other = await p.client.scatter([b"dear", b"other"], workers=where)
    else:
        dear = p.on("spot", "dear", 2.5)
        await finished_async([dear])
        other = p.on("spot", "other", 2.5)
    await finished_async([dear, other])
    reads = p.read(dear, "reads")
    await finished_async([reads])
    first, second, tasks = dear.key, other.key, p.scheduler.tasks
    await until_async(lambda: len(p.holders(first)) == len(p.holders(second)) == 2, "copies")
    assert not p.copies.anchors.seconds
    del dear
    await until_async(lambda: first not in tasks or tasks[first].state == "released", "it to be released")
    await p.client.cancel([other])
    await until_async(lambda: second not in tasks, "it to be cancelled")


@played("spot", "safe")
async def test_what_a_client_asks_for_later_is_held_no_more(p):
    reader = followed(p)
    await until_async(lambda: p.copies.made["results"] == 1, "a copy")
    p.copies._ticks.stop()
    first = p.client.get({"first": (made, "its name", 2.5)}, "first", sync=False)
    await until_async(lambda: not p.copies.anchors.seconds, "it to be let go")
    assert CLIENT not in p.scheduler.clients
    del first
    await enough(p, reader)
    await released(p, "first")


@played("spot", "safe")
async def test_what_a_client_cancels_before_the_next_look_is_gone(p):
    reader = followed(p)
    await until_async(lambda: p.copies.made["results"] == 1, "a copy")
    p.copies._ticks.stop()
    p.scheduler.client_desires_keys(["first"], p.client.id)  # as a variable does for who reads it
    first = Future("first", p.client)
    assert len(p.scheduler.tasks["first"].who_wants) == 2
    await p.client.cancel([first])
    await until_async(lambda: "first" not in p.scheduler.tasks, "it to be cancelled")
    await until_async(lambda: reader.status == "cancelled", "the reader to hear of it")
    await enough(p)  # its thread


@played("spot", "safe")
async def test_what_was_made_of_a_held_result_is_copied_instead(p):
    """The length took no time, its input was there twice: both were held for as long as the length was."""
    last = p.graph(
        "spot", "last", first=(made, "its name", 2.5), wait=(waits, "first", "enough"), last=(id, "wait")
    )
    await held_and_copied(p)
    p.scheduler.task_prefixes["wait"].duration_average = 0.0
    await enough(p, last)
    for name in ("wait", "last"):
        p.scheduler.task_prefixes[name].duration_average = 0.0
    await until_async(lambda: p.holders(last) == {"spot", "safe"}, "a copy of what is left")
    await released(p, "first")


@played("spot", "safe", "other")
async def test_what_is_held_counts_in_its_receivers_share_though_the_original_is_gone(p):
    await p.expose(spot="job-1", other="job-2")
    reader = p.graph(
        "spot", "reader", first=(made, "its name", 2.5, 10**6), reader=(waits, "first", "enough")
    )
    await until_async(lambda: p.copies.made["results"] == 1, "a copy")
    await p.lose("spot")
    p.copies._look(time.monotonic())
    assert p.copies.kept.nbytes == {p.workers["safe"].address: p.scheduler.tasks["first"].nbytes}
    await enough(p, reader)


@played("a", "b", "c")
async def test_what_is_held_and_lost_is_not_computed_again_for_nobody(p):
    await p.expose(a="job-1", b="job-2", c="job-3")
    graph = {
        "first": (made, "its name", 2.5),
        "second": (waits, "first", "once"),
        "last": (waits, "second", "enough"),
    }
    last = p.graph("a", "last", **graph)
    await until_async(lambda: p.copies.made["results"] == 1, "a copy")
    (keeps,) = p.holders("first") - {"a"}
    (third,) = {"b", "c"} - {keeps}
    p.scheduler.request_acquire_replicas(p.workers[third].address, [], stimulus_id="none")
    await Event("once", client=p.client).set()
    await until_async(lambda: p.scheduler.tasks["second"].state == "memory", "the second")
    p.scheduler.request_acquire_replicas(p.workers[third].address, ["second"], stimulus_id="reads")
    await until_async(lambda: third in p.holders("second"), "another copy of the second")
    assert set(p.copies.anchors.seconds) == {"first"}
    for gone in ("a", keeps):
        await p.lose(gone)
    await until_async(lambda: not p.copies.anchors.seconds, "it to be let go")
    assert p.scheduler.tasks["first"].state == "released"
    await enough(p, last)
    assert RAN["its name"] == 1


@played("a", "late", "c")
async def test_a_safe_worker_that_joins_gets_what_only_preemptible_ones_have(p):
    await p.expose(a="job-1", c="job-2", late="job-3")
    dear = await p.made("a", "dear", 0.1)
    await until_async(lambda: len(p.holders(dear)) == 2, "a copy in another job")
    await p.expose(a="job-1", c="job-2")
    await until_async(lambda: "late" in p.holders(dear), "a copy on the safe one")


@played("spot", "one", "two")
async def test_a_receiver_to_which_nothing_comes_is_passed_over(p, monkeypatch):
    monkeypatch.setattr(module, "_LOST", 1.0)
    able = {name: p.workers[name].state for name in ("one", "two")}
    fetches = able["one"].transfer_incoming_count_limit
    for state in able.values():
        state.transfer_incoming_count_limit = state.transfer_incoming_bytes_throttle_threshold = 0
    dear = await p.made("spot", "dear", 0.1)
    await until_async(lambda: p.copies._coming, "one of them to be asked")
    (deaf,) = (name for name in able if p.workers[name].address == p.copies._coming["dear"][0])
    (hears,) = able.keys() - {deaf}
    able[hears].transfer_incoming_count_limit = fetches
    await until_async(lambda: p.holders(dear) == {"spot", hears}, "a copy on the one that fetches")


@played("spot", "safe")
async def test_what_is_forgotten_leaves_no_trace(p):
    held = [p.on("spot", f"dear-{i}", 0.05) for i in range(4)]
    await finished_async(held)
    keys = [future.key for future in held]
    await until_async(lambda: all(len(p.scheduler.tasks[key].who_has) == 2 for key in keys), "a copy of each")
    await until_async(lambda: len(p.copies.kept) == 4, "all of them to be counted")
    del held
    await until_async(lambda: not p.scheduler.tasks, "the scheduler to forget")
    p.copies._look(time.monotonic())
    assert [len(book) for book in (p.copies.kept, p.copies._since, p.copies._coming)] == [0] * 3


@played("spot", "one", "two", look=3600.0)
async def test_a_receiver_is_not_doubted_for_what_was_released_meanwhile(p):
    """A result that was computed again elsewhere, after its copy was asked for, cost its receiver five minutes."""
    able = {p.workers[name].address: p.workers[name].state for name in ("one", "two")}
    for state in able.values():
        state.transfer_incoming_count_limit = state.transfer_incoming_bytes_throttle_threshold = 0
    _dear = await p.made("spot", "dear", 0.1)
    for later in (0.0, 2.0):
        p.copies._look(time.monotonic() + later)
    asked = p.copies._coming["dear"][0]
    ts = p.scheduler.tasks["dear"]
    ts.worker_restrictions, ts.loose_restrictions = able.keys() - {asked}, False
    await p.lose("spot")
    await until_async(lambda: ts.state == "memory", "it to be computed again")
    p.copies._look(time.monotonic() + 2.0 + module._LOST)
    assert asked not in p.copies._doubted


@played("spot", "safe", look=3600.0)
async def test_a_look_is_bounded_however_many_results_there_are(p, monkeypatch):
    """All were looked at in each: with 100,000 of them a scheduler stood still for two seconds."""
    monkeypatch.setattr(module, "_MOST", 40)
    where = [p.workers["spot"].address]
    held = await p.client.scatter({f"cheap-{i}": i for i in range(400)}, workers=where)
    dear = set(list(held)[::20])
    for key in held.keys() - dear:  # as if they could be computed again, in no time
        p.scheduler.tasks[key].run_spec = object()
        p.scheduler.tasks[key].prefix.duration_average = 0.0
    looks: list[set[str]] = []
    real = p.copies._worthy

    def worthy(now, exposed, *args):
        looks.append({ts.key for ts in exposed})
        return real(now, exposed, *args)

    monkeypatch.setattr(p.copies, "_worthy", worthy)
    for turn in range(1, 21):  # a half of each look is in turns
        p.copies._look(time.monotonic() + turn)
    assert max(map(len, looks)) <= 40
    assert set().union(*looks) == set(held)
    assert set(p.copies.kept) == dear


def test_paths_from_many_held_results_are_looked_at_once():
    group = TaskGroup("x", TaskPrefix("x"))
    readers = [TaskState(("reader", i), object(), "released", group, False) for i in range(100)]
    last = TaskState("last", object(), "memory", group, False)
    for task in readers:
        task.dependents = {last}
    anchors = Anchors(SimpleNamespace(tasks={}, clients={}))
    for i in range(100):
        ts = TaskState(("held", i), object(), "memory", group, False)
        ts.state = "memory"
        ts.dependents = set(readers[i % 10 :: 10])
        ts.who_wants = {ClientState(CLIENT)}
        anchors._scheduler.tasks[ts.key] = ts
        anchors.seconds[ts.key] = 1.0
    assert anchors.review(lambda ts: False) <= 100 * 10 + 100
    assert not anchors.seconds


class Preemptible:
    """A cluster's pools, all of which may be preempted while it says so."""

    def __init__(self, pools):
        self._own, self.may_be = pools, True

    def __getattr__(self, name):
        return getattr(self._own, name)

    def pools(self):
        return tuple(kind._replace(preemptible=self.may_be) for kind in self._own.pools())


def test_nothing_is_copied_when_nobody_says_any_more_who_may_be_preempted():
    """A scheduler that knew of such jobs went on for ever: adapting had stopped, or a new one began with none."""
    with (
        ff.LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster),
    ):

        def exposed():
            roster = cluster.scheduler.plugins.get("ferro-roster")
            return roster is not None and bool(roster.copies._jobs)

        pools = Preemptible(SpecPools(cluster))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dask_ferro.runtime.elastic.controller.pools_of", lambda cluster: pools)
            bounds = {"minimum": 1, "maximum": 1, "interval": 0.05}
            cluster.adapt(Adaptive=ff.Elastic, **bounds)
            until(exposed, "it to be told")
            second = cluster.adapt(Adaptive=ff.Elastic, **bounds)
            until(lambda: second._exposures.told, "the next one to go on")
            assert exposed()
            second.stop()
            until(lambda: not exposed(), "it to be taken back")
            pools.may_be = False
            cluster.scheduler.plugins["ferro-roster"].exposed(jobs={"0": "job-0"})  # by one that has died
            cluster.adapt(Adaptive=ff.Elastic, **bounds)
            until(lambda: not exposed(), "a new one to say that there are none")
