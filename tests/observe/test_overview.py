"""The overview on real clusters: each kind of stuck work is made, and is named within five seconds.

A closed pool, and a queue that does not move, are made in `tests/on_slurm/test_overview.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, Event, Scheduler
from distributed.metrics import time

import dask_ferro as ff
from dask_ferro.observe.rules import findings as found_in
from dask_ferro.observe.snapshot import MAX_WAITS, cluster_facts
from dask_ferro.observe.top import take_snapshot
from dask_ferro.policy.waits import WaitingTask
from dask_ferro.scheduler.events import PendingJobs, ScaleEvent
from tests.clusters import on_cluster, running, stopped
from tests.waiting import opened, result, until, until_async

# Seconds within which stuck work is named, from the moment at which it is stuck.
SOON = 5.0
LIMIT = 500_000_000


def findings(client: Client) -> list[dict[str, Any]]:
    """What `dask ferro top` shows, and so does the page."""
    return client.run_on_scheduler(take_snapshot)["overview"]["findings"]


def named(client: Client, kind: str, *words: str) -> dict[str, Any]:
    """Wait until a finding of a kind says some words, and return it."""

    def found() -> list[dict[str, Any]]:
        told = [one for one in findings(client) if one["what"] == kind]
        return [one for one in told if all(text in one["sentence"] for text in words)]

    return until(found, f"{kind}: {words}", seconds=SOON, every=0.1, seen=lambda: findings(client))[0]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Three processes that pause when their memory is full, and are neither ended nor spill."""
    memory = {f"distributed.worker.memory.{name}": False for name in ("target", "spill", "terminate")}
    with dask.config.set(memory), running(3, kind=ff.LocalCluster, memory_limit=LIMIT) as client:
        yield client


@pytest.fixture
def pids(client: Client) -> dict[str, int]:
    """The workers' processes by address, once nothing is wrong any more."""
    until(lambda: not findings(client), "a healthy cluster", seen=lambda: findings(client))
    return dict(client.run(os.getpid))


def name_of(client: Client, address: str) -> str:
    return str(client.scheduler_info()["workers"][address]["name"])


@pytest.mark.cluster
def test_a_task_that_waits_behind_a_long_one_while_workers_idle(client: Client, pids: dict[str, int]) -> None:
    busy = min(pids)
    Event("open", client=client).clear()
    long = client.submit(opened, "open", workers=[busy], key="long")
    until(lambda: client.processing()[busy], "the long task")
    held = client.submit(abs, -1, workers=[busy], key="held")
    told = named(client, "waits", f"held has waited at worker {name_of(client, busy)}", "behind long")
    assert ": it may not run on the idle workers (workers=)" in told["sentence"]
    assert (told["severity"], told["page"]) == ("slow", "ferro-stealing")
    Event("open", client=client).set()
    assert (result(long), result(held)) == (None, 1)


@pytest.mark.cluster
def test_tasks_that_no_worker_may_run(client: Client, pids: dict[str, int]) -> None:
    with ff.require_device("gpu"):
        device = client.compute(dask.delayed(abs)(-1))
    resource = client.submit(abs, -2, resources={"licence": 2}, key="resource")
    worker = client.submit(abs, -3, workers=["tcp://127.0.0.1:1"], key="worker")
    named(client, "no_eligible_worker", "it requires a worker with a gpu, and all workers have only cpu")
    named(
        client,
        "no_eligible_worker",
        "resource has waited",
        "the resource licence=2, and no worker declares that",
    )
    told = named(client, "no_eligible_worker", "worker has waited", "it may run at 127.0.0.1:1 only")
    assert (told["severity"], told["page"]) == ("error", "graph")
    ff.uninstall(client)  # Dask's own state is enough for these
    named(client, "no_eligible_worker", "the resource licence=2, and no worker declares that")
    ff.install(client)
    client.cancel([device, resource, worker])


@pytest.mark.cluster
def test_a_hung_worker(client: Client, pids: dict[str, int]) -> None:
    hung = min(pids)
    with stopped(pids[hung]):
        there = client.submit(abs, -1, workers=[hung], key="there")
        told = named(client, "hung", f"no report from worker {name_of(client, hung)} for", "with 1 task")
    assert told["severity"] == "warning"  # for half a minute: a call may hold the interpreter's lock
    assert result(there) == 1


@pytest.mark.cluster
def test_a_task_that_failed(client: Client, pids: dict[str, int]) -> None:
    at = min(pids)
    failed = client.submit(int, "four", workers=[at], key="number")
    behind = client.submit(abs, failed, key="behind")  # it failed of another's error
    until(lambda: behind.status == "error", "the failure")
    told = named(client, "failed", "2 tasks failed", f"number failed last, at worker {name_of(client, at)}: ")
    assert 'ValueError("invalid literal' in told["sentence"]
    assert f"the log of worker {name_of(client, at)} has the traceback" in told["remedy"]
    client.cancel([behind, failed])


@pytest.mark.cluster
def test_memory_that_is_full(client: Client, pids: dict[str, int]) -> None:
    full = max(pids)
    # Far above the 0.8 at which a worker pauses: memory that tests before this one used is given back meanwhile.
    kept = client.submit(_eat, 0.91, workers=[full], key="eaten")
    told = named(client, "memory", f"no task starts at worker {name_of(client, full)}, which paused")
    assert told["page"] == "workers"
    behind = client.submit(abs, -1, workers=[full], key="behind")
    named(client, "no_eligible_worker", "behind has waited", "only, and")
    kept.release()
    assert result(behind) == 1


def _eat(share: float) -> bytes:
    """Return so many bytes that this process uses a share of its limit."""
    import psutil

    return b"x" * int(share * LIMIT - psutil.Process().memory_info().rss)


@on_cluster(workers=2, installed={"stealing": "none"})
async def test_stealing_that_is_off_is_the_reason(client: Client, scheduler: Scheduler) -> None:
    busy, stealing = min(scheduler.workers), scheduler.extensions["stealing"]
    preferred = {"workers": [busy], "allow_other_workers": True}
    first = client.submit(opened, "open", key="first", **preferred)
    await until_async(lambda: scheduler.workers[busy].processing, "the first task")
    second = client.submit(abs, -1, key="second", **preferred)

    def told() -> list[str]:
        found = found_in(cluster_facts(scheduler, stealing, None, time()))
        return [one.sentence for one in found if "second has waited" in one.sentence]

    (sentence,) = await until_async(told, "what waits to be told", seconds=SOON)
    assert "stealing is off, which would move it" in sentence
    # The newest tick's waits may have ended since.
    waits = (
        WaitingTask(key, at, 9.0, 1, (), "about_to_move")
        for key, at in (("first", busy), ("gone", busy), ("second", "other"))
    )
    stealing.waits.now = [*stealing.waits.now, *waits]
    assert [one.key for one in cluster_facts(scheduler, stealing, None, time()).waits] == ["second"]
    await Event("open", client=client).set()
    assert await client.gather([first, second]) == [None, 1]


@on_cluster(workers=0, installed=True)
async def test_work_without_workers(client: Client, scheduler: Scheduler) -> None:
    waiting = client.map(abs, range(3))
    await until_async(lambda: len(scheduler.tasks) == 3, "the tasks")
    overview = (await client.run_on_scheduler(take_snapshot))["overview"]
    assert overview["doing"] == ("0 of 3 tasks done (0%), 0 running", _UNKNOWN, "no workers")
    assert overview["findings"] == ()  # one may be about to start
    stealing = scheduler.extensions["stealing"]

    def told(plugin: Any, elastic: ScaleEvent | None = None, later: float = 0.0) -> list[str]:
        found = found_in(cluster_facts(scheduler, plugin, elastic, time() + later))
        return [f"{one.what} {one.severity}" for one in found]

    assert await until_async(lambda: told(stealing), "the finding", seconds=SOON) == ["workers error"]
    at_zero: ScaleEvent = {"time": time(), "jobs": {}}
    assert told(stealing, at_zero) == []
    assert told(stealing, at_zero, later=10.0) == ["workers warning"]
    del waiting


_UNKNOWN = "when they end is not known: tasks of abs have no measured duration yet"


class Unrunnable:
    """Tasks without a worker, as Dask lists them, and the number of those that were looked at."""

    def __init__(self, count: int) -> None:
        self.count, self.walked = count, 0
        names = ("worker_restrictions", "host_restrictions", "resource_restrictions", "annotations")
        self.task = SimpleNamespace(key="f-1", **dict.fromkeys(names))

    def __len__(self) -> int:
        return self.count

    def items(self) -> Iterator[tuple[Any, float]]:
        for _ in range(self.count):
            self.walked += 1
            yield self.task, 0.0


def _scheduler(unrunnable: Unrunnable, **prefixes: Any) -> Any:
    return SimpleNamespace(plugins={}, task_prefixes=prefixes, workers={}, unrunnable=unrunnable, queued=())


def test_a_hundred_thousand_tasks_are_not_walked() -> None:
    """The scheduler has no `tasks` here, so that a walk of them would be an error."""
    states = dict.fromkeys(("waiting", "queued", "processing", "memory", "erred"), 0)
    states["no-worker"] = 100_000
    prefix = SimpleNamespace(name="f", states=states, duration_average=0.5)
    unrunnable = Unrunnable(100_000)
    facts = cluster_facts(_scheduler(unrunnable, f=prefix), None, None, 0.0)
    assert (unrunnable.walked, len(facts.unplaced)) == (MAX_WAITS, MAX_WAITS)
    assert (facts.unplaced_count, facts.remaining, facts.work) == (100_000, 100_000, 50_000.0)


@pytest.mark.parametrize(
    ("now", "wanted"),
    [pytest.param(1010.0, 1, id="newest"), pytest.param(1200.0, 0, id="of one that stopped")],
)
def test_jobs_and_pools_are_those_of_a_controller_that_decides(now: float, wanted: int) -> None:
    pending: PendingJobs = {"jobs": 2, "since": 1001.0, "expected": 3.0, "reasons": {"Priority": 2}}
    decision: ScaleEvent = {
        "time": 1000.0,
        "jobs": {"pending": 2},
        "closed": {"gpu": {"why": "broken", "until": 1300.0, "paused": False}},
        "pending": {"cpu": pending},
    }
    facts = cluster_facts(_scheduler(Unrunnable(0)), None, decision, now)
    assert facts.decision == (decision if wanted else {})
