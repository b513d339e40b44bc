"""Rules for Dask's active memory manager: all of them hold, a retirement ends, and Dask's own policy comes back."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import dask
import pytest
from distributed import Status
from distributed.active_memory_manager import ReduceReplicas
from distributed.client import futures_of

from dask_ferro.lower.ranks.stage_workers import STAGE, StageWorkers
from dask_ferro.lower.replicas import RuledReplicas, may_drop, put_rule, remove_rule
from tests.clusters import on_cluster
from tests.waiting import finished_async, until_async


def names(scheduler, future):
    return {str(ws.name) for ws in scheduler.tasks[future.key].who_has or ()}


async def made(client, home):
    """A stage's result, on its own worker."""
    with dask.annotate(workers=[home], **{STAGE: 0}):
        result = dask.delayed(bytes)(1000, dask_key_name="result")
    (future,) = futures_of(client.persist(result, optimize_graph=False))
    await finished_async([future])
    return future


async def copied(client, scheduler, future):
    """Copies of it on all workers."""
    await client.replicate(future)
    await until_async(lambda: len(names(scheduler, future)) == len(scheduler.workers), "the copies")


class Holder(NamedTuple):
    name: str
    status: Status = Status.running


A, B, C = map(Holder, "ABC")
LEAVES = Holder("leaves", Status.closing_gracefully)


@pytest.mark.parametrize(
    ("holders", "rules", "may"),
    [
        pytest.param({A, B}, [], {A, B}, id="no rule"),
        pytest.param({A, B, C}, [{A, B}], {A, B}, id="one rule"),
        pytest.param({A, B, C}, [{A, B}, {B, C}], {B}, id="what both let"),
        pytest.param({A, B}, [{A}, {B}], set(), id="rules that agree on none"),
        pytest.param({A, LEAVES}, [{A}], set(), id="a worker is retired"),
    ],
)
def test_every_rule_has_to_let_a_holder_drop_a_result(holders, rules, may):
    assert may_drop(None, holders, [lambda ts, holders, may=may: may for may in rules]) == may


@on_cluster(3)
async def test_every_rule_has_a_say_and_dasks_own_policy_comes_back(client, scheduler, workers):
    manager = scheduler.extensions["amm"]
    before = set(manager.policies)
    assert {type(policy) for policy in before} == {ReduceReplicas}
    home, safe, _ = (worker.address for worker in workers)
    put_rule(scheduler, "safe", lambda: lambda ts, holders: {ws for ws in holders if ws.address != safe})
    await client.register_plugin(StageWorkers())  # it comes second, and finds no policy of Dask's
    assert [type(policy) for policy in manager.policies] == [RuledReplicas]
    future = await made(client, home)
    await copied(client, scheduler, future)
    kept = {str(worker.name) for worker in workers[:2]}
    manager.run_once()
    await until_async(lambda: names(scheduler, future) == kept, "one copy to be dropped")
    for _ in range(3):
        manager.run_once()
        await asyncio.sleep(0)
    assert names(scheduler, future) == kept
    remove_rule(scheduler, "safe")
    remove_rule(scheduler, "safe")
    remove_rule(scheduler, StageWorkers.name)
    assert manager.policies == before
    manager.run_once()
    await until_async(lambda: len(names(scheduler, future)) == 1, "Dask's policy to drop the other")


@on_cluster(3)
async def test_copies_stay_while_their_worker_is_retired(client, scheduler, workers):
    """A retirement copies results until all are elsewhere; what it copied was dropped again."""
    await client.register_plugin(StageWorkers())
    manager, home = scheduler.extensions["amm"], workers[0].address
    future = await made(client, home)
    await copied(client, scheduler, future)
    scheduler.workers[home].status = Status.closing_gracefully
    for _ in range(3):
        manager.run_once()
        await asyncio.sleep(0.05)
    assert len(names(scheduler, future)) == 3
    scheduler.workers[home].status = Status.running
    manager.run_once()
    await until_async(
        lambda: names(scheduler, future) == {str(workers[0].name)}, "the other copies to be dropped"
    )


@on_cluster(3)
async def test_a_retired_workers_results_are_elsewhere(client, scheduler, workers):
    await client.register_plugin(StageWorkers())
    future = await made(client, workers[0].address)
    await client.retire_workers([workers[0].address])
    assert workers[0].address not in scheduler.workers
    assert await client.gather(future) == bytes(1000)


@on_cluster(1, config={"distributed.scheduler.active-memory-manager.policies": []})
async def test_where_dasks_policy_is_off_there_are_no_rules(client, scheduler):
    put_rule(scheduler, "one", lambda: lambda ts, holders: holders)
    remove_rule(scheduler, "one")
    assert not scheduler.extensions["amm"].policies


@pytest.mark.parametrize("extension", [None, object()])
def test_without_a_memory_manager_there_are_no_rules(extension):
    class Other:
        extensions = {"amm": extension}  # noqa: RUF012

    put_rule(Other, "one", lambda: lambda ts, holders: holders)
    remove_rule(Other, "one")
