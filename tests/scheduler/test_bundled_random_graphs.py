"""Random graphs on a cluster, bundled and not: the same results while workers die, tasks fail, and clients cancel."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from dask.local import get_sync
from distributed import Client, LocalCluster, Scheduler, Worker
from distributed.scheduler import TaskState

import dask_ferro as ff
from dask_ferro.flow.costs import MeasuredTasks
from dask_ferro.flow.member import is_ours, share_of
from dask_ferro.lower.bundling import choice
from dask_ferro.lower.upstream import GraphNode, Task, TaskRef
from dask_ferro.scheduler.bundle_costs import BundleCosts
from dask_ferro.scheduler.plugin import part_of
from tests.clusters import on_cluster
from tests.lower.bundling import graphs
from tests.lower.bundling.graphs import NAMES, random_graph, random_wanted
from tests.waiting import until_async

DISTURBANCES = ("none", "kill", "cancel", "fail", "restrict", "resources", "overlap")
# Beside those that a graph has at random.
_failures: dict[Any, int] = {}


class Fails:
    """A task that fails the first time; `token` tells whose."""

    def __init__(self, token: str) -> None:
        self.token = token

    def __call__(self, value: Any) -> Any:
        _failures[self.token] = _failures.get(self.token, 0) + 1
        if _failures[self.token] == 1:
            raise OSError("the first time")
        return value


@pytest.fixture(autouse=True)
def _costs_are_forgotten() -> Iterator[None]:
    with dask.config.set({"ferro.bundle.costs": None}):
        yield


def retries_of(key: Any) -> int:
    # A task with retries is in no bundle.
    return 3 if str(key).startswith("fails-") else 0


def renamed(graph: dict[Any, GraphNode], token: str) -> dict[Any, Any]:
    """Return a graph whose keys are its own: a cluster runs many."""

    def name(key: Any) -> Any:
        if isinstance(key, tuple):
            head = str(key[0]).removesuffix("-1f2e3d4c")
            return (f"{head}-{token}", *key[1:])
        return f"{key}-{token}"

    names = {key: name(key) for key in graph}
    return {names[key]: task.substitute(names, key=names[key]) for key, task in graph.items()}


async def compared(client: Client, scheduler: Scheduler, workers: list[Worker], seed: int, how: str) -> int:
    """Run a random graph, disturbed, and compare its results; return the number of its bundles."""
    rng = random.Random(seed)
    graph = renamed(random_graph(rng, most=40), f"{seed:08x}")
    wanted = random_wanted(rng, graph)
    expected = get_sync(graph, wanted)
    options: dict[str, Any] = {}
    if how == "fail":
        last, fails = wanted[-1], f"fails-{seed:08x}"
        graph[fails] = Task(fails, Fails(f"{seed}"), TaskRef(last))
        wanted, expected = [*wanted, fails], [*expected, expected[-1]]
    elif how == "restrict":
        options["workers"] = [rng.choice(workers).address]
    elif how == "resources":
        options["resources"] = {"A": 1}
    # To cancel a key is to cancel those that need it, too: another graph is cancelled.
    second = renamed(graph, "again") if how == "cancel" else graph
    others = list(second)[-3:] if how == "cancel" else wanted[:2] if how == "overlap" else []
    with ff.bundle_tasks(client=client), dask.annotate(retries=retries_of):
        futures = client.get(graph, wanted, sync=False, **options)
        more = client.get(second, others, sync=False) if others else []
    own = {*graph, *others}

    def bundles() -> int:
        # Bundles of this graph alone: it has read its tasks, or somebody asked for them.
        return sum(
            is_ours(ts.run_spec) for key, ts in scheduler.tasks.items() if key in own or _reads(ts, own)
        )

    await until_async(lambda: bundles() or all(f.status == "finished" for f in futures), "the graph", every=0)
    found = bundles()
    if how == "kill":
        victim = workers.pop(rng.randrange(len(workers)))
        await victim.close(executor_wait=False)
        workers.append(await Worker(scheduler.address, nthreads=1, resources={"A": 1}))
    if how == "cancel":
        await client.cancel(more, force=False)
    assert await client.gather(futures) == list(expected), (seed, how)
    if how == "overlap":
        assert await client.gather(more) == list(expected[:2])
    return found


def _reads(ts: TaskState, keys: set[Any]) -> bool:
    """Return whether a bundle runs tasks of some keys."""
    share = share_of(ts.run_spec)
    return share is not None and any(task.key in keys for task in share.tasks)


@pytest.fixture(params=["bundles", "flows", "short flows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether a graph's tasks are in bundles, or in flows wherever some can be made, or in several of a few tasks."""
    monkeypatch.setattr(choice, "FLOW_ENOUGH", 0.0 if request.param == "bundles" else 1e9)
    monkeypatch.setattr(choice, "FLOW_GAINS", 1e9 if request.param == "bundles" else 0.1)
    if request.param == "short flows":
        monkeypatch.setattr(choice, "FLOW_LASTS", 4e-3)
        monkeypatch.setattr(choice, "FLOW_LEAST", 1e-9)
    return str(request.param)


@pytest.mark.parametrize("how", DISTURBANCES)
@on_cluster({str(i): {"resources": {"A": 1}} for i in range(3)})
async def test_a_few_graphs(
    client: Client,
    scheduler: Scheduler,
    workers: list[Worker],
    how: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await check(client, scheduler, workers, range(6), how, way, monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("how", DISTURBANCES)
@on_cluster({str(i): {"resources": {"A": 1}} for i in range(3)})
async def test_a_thousand_graphs(
    client: Client,
    scheduler: Scheduler,
    workers: list[Worker],
    how: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await check(client, scheduler, workers, range(1000, 1143), how, way, monkeypatch)


async def check(
    client: Client,
    scheduler: Scheduler,
    workers: list[Worker],
    seeds: range,
    how: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare the results of some graphs."""
    monkeypatch.setattr(graphs, "PAUSE_S", 0.003 if how in ("kill", "cancel", "overlap") else 0.0)
    own = list(workers)
    await ff.install(client, bundles=True)
    for name in (*NAMES, "fails", "data"):
        part_of(scheduler, BundleCosts).costs.add(MeasuredTasks(name.replace(" ", "-"), name, 1, 1e-3, 100.0))  # type: ignore[union-attr]
        part_of(scheduler, BundleCosts).costs.add(MeasuredTasks(name, name, 1, 1e-3, 100.0))  # type: ignore[union-attr]
    part = part_of(scheduler, BundleCosts)
    assert part is not None
    assert part._flows is not None
    await until_async(lambda: part._flows.members == len(workers), "the workers' hubs")  # type: ignore[union-attr]
    bundles = [await compared(client, scheduler, own, seed, how) for seed in seeds]
    assert sum(map(bool, bundles)) >= len(bundles) // 3
    for worker in own:
        if worker not in workers:
            await worker.close()
    assert isinstance(client.cluster, LocalCluster)
