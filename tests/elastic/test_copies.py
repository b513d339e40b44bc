"""Copies of what a preemption would lose: made in time, kept by Dask's memory manager, and no more than needed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager

import dask
import pytest
from distributed import Client, Status
from distributed.active_memory_manager import ReduceReplicas

import dask_ferro as ff
from dask_ferro.elastic import copies as module
from dask_ferro.elastic.copies import WorkerPlace, droppable_replicas, receivers
from dask_ferro.elastic.providers import SpecPools
from dask_ferro.elastic.scheduler_rpc import ScalingRPC
from dask_ferro.scheduler.plugin import part_of
from tests import clusters
from tests.waiting import finished_async, until, until_async

APART = {
    "distributed.worker.memory.pause": False,
    "distributed.scheduler.active-memory-manager.start": False,  # the tests run it
}
RAN: Counter[str] = Counter()

# -- to whom, and who drops --------------------------------------------------------------------------------

SAFE, NEAR, FAR, SIBLING = (
    WorkerPlace("", "h1"),
    WorkerPlace("j2", "h1"),
    WorkerPlace("j3", "h2"),
    WorkerPlace("j1", "h3"),
)
HOLDER = WorkerPlace("j1", "h1")


@pytest.mark.parametrize(
    ("able", "holders", "wanted"),
    [
        pytest.param({"s": SAFE, "w": FAR}, [HOLDER], {"s"}, id="a safe one before another job"),
        pytest.param({"w": SIBLING}, [HOLDER], set(), id="not within the job"),
        pytest.param({"near": NEAR, "far": FAR}, [HOLDER], {"far"}, id="another host before the same"),
        pytest.param({"near": NEAR, "own": SIBLING}, [HOLDER], {"near"}, id="another job of the host before nobody"),
        pytest.param({"s": SAFE, "w": FAR}, [HOLDER, NEAR], {"s"}, id="a safe one of what two jobs hold"),
        pytest.param({"w": FAR}, [HOLDER, NEAR], set(), id="no third job of what two jobs hold"),
        pytest.param({}, [HOLDER], set(), id="nobody where nobody has room"),
    ],
)  # fmt: skip
def test_the_receivers_are(able, holders, wanted):
    assert receivers(able, holders) == wanted


@pytest.mark.parametrize(
    ("jobs", "short", "is_worth", "wanted"),
    [
        pytest.param(("", ""), (), True, {0, 1}, id="safe ones by Dask's rule"),
        pytest.param(("j1", "j1"), (), True, {0, 1}, id="those of one job by Dask's rule"),
        pytest.param(("", "j1"), (), False, {1}, id="not the safe one of a cheap result"),
        pytest.param(("", "j1"), (), True, set(), id="neither a copy nor what it was made of"),
        pytest.param(("", "j1"), (1,), True, {1}, id="what was copied where memory is short"),
        pytest.param(("", "j1"), (0,), True, {0}, id="a copy where memory is short"),
        pytest.param(("", "j1"), (0, 1), True, {0, 1}, id="either where both are short"),
        pytest.param(("", "", "j1"), (), True, {2}, id="the exposed one of three"),
        pytest.param(("", "j1", "j2"), (), True, {1, 2}, id="an exposed copy once a safe one is there"),
        pytest.param(("j1", "j2"), (), True, set(), id="neither of two jobs where it would be copied again"),
        pytest.param(("j1", "j2"), (), False, {0, 1}, id="cheap ones by Dask's rule"),
        pytest.param(("j1", "j1", "j2"), (), True, {0, 1}, id="one of the same job"),
        pytest.param(("j1", "j2", "j3"), (), True, {0, 1, 2}, id="one of three jobs"),
    ],
)
def test_who_may_drop_a_replica(jobs, short, is_worth, wanted):
    assert (
        droppable_replicas(dict(enumerate(jobs)), lambda: is_worth, lambda holder: holder in short) == wanted
    )


# -- on a cluster --------------------------------------------------------------------------------------------


def made(name, seconds, nbytes=1000):
    """Count, take some time, and return some bytes."""
    RAN[name] += 1
    time.sleep(seconds)
    return bytes(nbytes)


class Play:
    """A scheduler with the roster, and workers by name."""

    def __init__(self, client, scheduler, workers):
        self.client, self.scheduler, self.workers = client, scheduler, workers

    async def expose(self, **jobs):
        await self.client.scheduler.ferro_roster(exposed=jobs)

    def on(self, worker, name, seconds, **options):
        where = [self.workers[worker].address]
        return self.client.submit(
            made, name, seconds, key=name, workers=where, allow_other_workers=True, **options
        )

    async def made(self, worker, name, seconds, **options):
        result = self.on(worker, name, seconds, **options)
        await finished_async([result])
        return result

    def holders(self, future):
        return {str(ws.name) for ws in self.scheduler.tasks[future.key].who_has or ()}

    @property
    def copies(self):
        return part_of(self.scheduler, ScalingRPC).copies

    async def runs(self, times=3):
        """Let the policy run some times, and the workers answer."""
        for _ in range(times):
            self.copies._runs.run_once()
            await asyncio.sleep(0.02)


@asynccontextmanager
async def scene(*names, every=0.1, config=None, exposed=True):
    """Open workers of these names; the one of the name "spot" may be preempted, unless no worker is exposed yet."""
    RAN.clear()
    named = {name: {"memory_limit": "64GB"} for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_INTERVAL", every)
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
    with dask.annotate(ferro={"seconds": 0.001}):
        cheap = p.on("spot", "cheap", 0.0)
    safe = p.on("safe", "safe-one", 0.1)
    await finished_async([*held, cheap, safe])
    # Dask may steal some of them to the safe worker before they run.
    await until_async(lambda: all("safe" in p.holders(f) for f in held), "a copy of each")
    copied = [p.scheduler.tasks[f.key].nbytes for f in held if len(p.holders(f)) == 2]
    await until_async(lambda: p.copies.totals["results"] == len(copied) > 0, "all of them to be counted")
    assert p.copies.totals["bytes"] == sum(copied)
    assert (len(p.holders(cheap)), p.holders(safe)) == (1, {"safe"})
    await p.scheduler.remove_worker(p.workers["spot"].address, stimulus_id="preempted")
    assert [len(value) for value in await p.client.gather(held)] == [1000] * 8
    assert {RAN[f.key] for f in held} == {1}


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
    await until_async(lambda: len(p.holders(dear)) == 1, "two of three to be dropped")
    assert p.holders(dear) <= {"safe", "other"}
    again = await p.made("spot", "again", 0.1)
    await until_async(lambda: len(p.holders(again)) == 2, "another copy")
    for _ in range(3):
        manager.run_once()
        await asyncio.sleep(0)
    assert len(p.holders(again)) == 2
    await p.expose()
    assert manager.policies == before
    manager.run_once()
    await until_async(lambda: len(p.holders(again)) == 1, "the copy to be dropped")


@played("spot", "safe", "other", every=3600.0)
async def test_copies_stay_while_a_holder_is_retired(p):
    """A retirement copies results until all are elsewhere, and would not end if these copies were dropped."""
    manager, cheap = p.scheduler.extensions["amm"], await p.made("spot", "cheap", 0.0)
    await p.client.replicate(cheap)
    await until_async(lambda: len(p.holders(cheap)) == 3, "the copies")
    spot = p.scheduler.workers[p.workers["spot"].address]
    spot.status = Status.closing_gracefully
    for _ in range(3):
        manager.run_once()
        await asyncio.sleep(0.05)
    assert len(p.holders(cheap)) == 3
    spot.status = Status.running
    manager.run_once()
    await until_async(lambda: len(p.holders(cheap)) == 1, "the other copies to be dropped")


@played("spot", "safe", exposed=False, config={"distributed.scheduler.active-memory-manager.policies": []})
async def test_where_dasks_policy_is_off_it_stays_off(p):
    policies = p.scheduler.extensions["amm"].policies
    await p.expose(spot="job-1")
    assert not policies
    await p.expose()
    assert not policies


@played("spot", "safe", exposed=False)
async def test_results_are_copied_without_dasks_memory_manager(p):
    del p.scheduler.extensions["amm"]
    await p.expose(spot="job-1")
    dear = await p.made("spot", "dear", 0.1)
    await until_async(lambda: len(p.holders(dear)) == 2, "the copy")
    await p.expose()
    assert p.copies._runs is None


@pytest.mark.parametrize("share", [0, 1e-6])
@played("spot", "safe", every=3600.0)
async def test_nothing_is_copied_where_the_share_of_memory_is_in_use_or_zero(p, share):
    p.copies.share = share
    await p.expose(spot="job-1")
    dear = await p.made("spot", "dear", 0.1)
    if share:
        await p.runs()
    assert (p.copies._runs is None) == (share == 0)
    assert (p.copies._coming, p.holders(dear)) == ({}, {"spot"})


@played("a", "late", "c")
async def test_a_safe_worker_that_joins_gets_what_only_preemptible_ones_have(p):
    await p.expose(a="job-1", c="job-2", late="job-3")
    dear = await p.made("a", "dear", 0.1)
    await until_async(lambda: len(p.holders(dear)) == 2, "a copy in another job")
    await p.expose(a="job-1", c="job-2")
    await until_async(lambda: "late" in p.holders(dear), "a copy on the safe one")


@played("spot", "safe", every=3600.0)
async def test_what_is_released_or_cancelled_is_gone_and_leaves_no_trace(p):
    held = [await p.made("spot", name, 0.1) for name in ("released", "cancelled")]
    await p.runs()
    await until_async(lambda: all(len(p.holders(f)) == 2 for f in held), "copies")
    await p.client.cancel([held.pop()])
    held.clear()
    await until_async(lambda: not p.scheduler.tasks, "the scheduler to forget")
    await p.runs()
    assert (p.copies._coming, p.copies._due) == ({}, [])


@played("spot", "safe", every=3600.0)
async def test_a_run_is_bounded_however_many_results_there_are(p, monkeypatch):
    """All were looked at in each: with 100,000 of them a scheduler stood still for two seconds."""
    monkeypatch.setattr(module, "_MAX_RESULTS", 40)
    where = [p.workers["spot"].address]
    held = await p.client.scatter({f"cheap-{i}": i for i in range(400)}, workers=where)
    dear = set(list(held)[::20])
    for key in held.keys() - dear:  # as if they could be computed again, in no time
        p.scheduler.tasks[key].run_spec = object()
        p.scheduler.tasks[key].prefix.duration_average = 0.0
    looks: list[set[str]] = []
    real = p.copies._next

    def looked():
        found = list(real())
        looks.append({ts.key for ts in found})
        return found

    monkeypatch.setattr(p.copies, "_next", looked)
    await p.runs(24)  # a half of each is in turns
    assert max(map(len, looks)) <= 40
    assert set().union(*looks) == set(held)
    await until_async(lambda: all(len(p.holders(held[key])) == 2 for key in dear), "copies of the dear ones")
    await p.runs(1)
    assert p.copies.totals["results"] == len(dear)


class Preemptible:
    """A cluster's pools, all of which may be preempted while it says so."""

    def __init__(self, pools):
        self._own, self.may_be = pools, True

    def __getattr__(self, name):
        return getattr(self._own, name)

    @property
    def pools(self):
        return tuple(kind._replace(preemptible=self.may_be) for kind in self._own.pools)


def test_nothing_is_copied_when_nobody_says_any_more_who_may_be_preempted():
    """A scheduler that knew of such jobs went on for ever: adapting had stopped, or a new one began with none."""
    with (
        ff.LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster),
        pytest.MonkeyPatch.context() as patch,
    ):

        def exposed():
            roster = part_of(cluster.scheduler, ScalingRPC)
            return roster is not None and bool(roster.copies._jobs)

        pools = Preemptible(SpecPools(cluster))
        patch.setattr("dask_ferro.elastic.controller.pools_of", lambda cluster: pools)
        bounds = {"minimum": 1, "maximum": 1, "interval": 0.05}
        adaptive = cluster.adapt(Adaptive=ff.Elastic, **bounds)
        until(exposed, "it to be told")
        pools.may_be = False
        until(lambda: not exposed(), "the controller to say that there are none")
        pools.may_be = True
        until(exposed, "it to be told again")
        adaptive.stop()
        patch.setattr(module, "_REPORT_LIFETIME", 0.5)
        until(lambda: not exposed(), "it to forget them")
