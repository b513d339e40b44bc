"""On real schedulers: nothing that takes longer is given to a worker whose end is near, and what waits is not lost."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import dask
import pytest
from distributed import Client, Event, LocalCluster, Scheduler
from distributed.metrics import monotonic

import dask_ferro as ff
from dask_ferro.policy.ledger import Ledger
from tests import clusters
from tests.waiting import opened, ticks, until_async

on_cluster = partial(clusters.on_cluster, installed=True)


def ledger(scheduler: Scheduler) -> Ledger:
    return scheduler.extensions["stealing"].ledger


def end_soon(scheduler: Scheduler) -> None:
    """Let all workers end in five seconds, where a fresh one would have a minute."""
    for address in scheduler.workers:
        ledger(scheduler).set_end(address, time.time() + 5.0)
    ledger(scheduler).fresh = 60.0


def submit(client: Client, count: int, seconds: float, **options: Any) -> list[Any]:
    """Submit tasks that say that they take so long, and take nothing."""
    with dask.annotate(ferro={"seconds": seconds}):
        return [client.submit(_where, number, pure=False, **options) for number in range(count)]


def _where(_: int) -> str:
    from distributed import get_worker

    return str(get_worker().address)


def blocked(client: Client, count: int, seconds: float) -> list[Any]:
    """Submit tasks alike that say that they take so long, and wait for the event "go"."""

    def block(_: int) -> None:
        opened("go")

    with dask.annotate(ferro={"seconds": seconds}):
        return client.map(block, range(count), pure=False)


async def states(scheduler: Scheduler, futures: list[Any], wanted: str) -> None:
    """Wait until all tasks are in a state."""

    def found() -> set[str | None]:
        return {ts.state if (ts := scheduler.tasks.get(f.key)) else None for f in futures}

    await until_async(lambda: found() == {wanted}, f"tasks that are {wanted!r}", seen=found)


async def given(scheduler: Scheduler, tasks: int) -> dict[str, int]:
    """Wait until so many tasks are with workers, and return how many each has."""

    def found() -> dict[str, int]:
        return {address: len(ws.processing) for address, ws in scheduler.workers.items()}

    await until_async(lambda: sum(found().values()) >= tasks, f"{tasks} tasks with workers", seen=found)
    return found()


@pytest.mark.parametrize("then", ["a fresh one joins", "nobody comes after all", "stock Dask is back"])
@on_cluster()
async def test_a_task_for_which_no_worker_has_the_time_waits_until(
    cluster: LocalCluster, client: Client, scheduler: Scheduler, then: str
) -> None:
    old = set(scheduler.workers)
    end_soon(scheduler)
    futures = submit(client, 3, 8.0)
    await states(scheduler, futures, "no-worker")
    if then == "a fresh one joins":
        cluster.scale(3)
        assert set(await client.gather(futures)) == set(scheduler.workers) - old
    elif then == "nobody comes after all":
        ledger(scheduler).fresh = 0.0
        assert set(await client.gather(futures)) <= old
    else:
        await ff.uninstall(client)
        assert set(await client.gather(futures)) <= old


@on_cluster()
async def test_who_waits_by_our_choice_does_not_fail_by_dasks_timeout_for_tasks_without_workers(
    client: Client, scheduler: Scheduler
) -> None:
    end_soon(scheduler)
    futures = submit(client, 3, 8.0)
    await states(scheduler, futures, "no-worker")
    scheduler.no_workers_timeout = 30.0
    for ts in scheduler.unrunnable:  # with ten seconds to go
        scheduler.unrunnable[ts] -= 20.0
    await until_async(
        lambda: all(since >= monotonic() - 15.0 for since in scheduler.unrunnable.values()),
        "the tasks' waiting to count from now on",
    )
    assert {scheduler.tasks[future.key].state for future in futures} == {"no-worker"}
    ledger(scheduler).fresh = 0.0
    await client.gather(futures)


@on_cluster(config=clusters.UNCHECKED)
async def test_roots_for_which_no_worker_has_the_time_stay_queued(
    cluster: LocalCluster, client: Client, scheduler: Scheduler
) -> None:
    old = set(scheduler.workers)
    end_soon(scheduler)
    futures = blocked(client, 20, 8.0)
    await states(scheduler, futures, "queued")
    await ticks(scheduler)
    await states(scheduler, futures, "queued")
    cluster.scale(3)
    given_to = await given(scheduler, 2)
    assert {given_to[address] for address in old} == {0}
    await Event("go").set()
    await client.gather(futures)


@on_cluster()
async def test_a_task_that_must_run_on_a_worker_that_is_there_waits_for_no_other(
    client: Client, scheduler: Scheduler
) -> None:
    end_soon(scheduler)
    worker = next(iter(scheduler.workers))
    assert await client.gather(submit(client, 1, 8.0, workers=[worker])) == [worker]
