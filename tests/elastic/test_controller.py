"""The elastic controller on clusters of this machine: its options, and what it does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
from distributed import Client, Event, LocalCluster, Worker
from distributed.deploy import Cluster
from emulated import workload_kernels
from simulated.tiled_linalg import iterated_cholesky

import dask_ferro as ff
from dask_ferro.elastic.options import check_room, elastic_options
from dask_ferro.elastic.providers import SpecPools
from dask_ferro.elastic.site_jobs import SiteJob
from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.simulate.graphs.taskgraph import TaskGraph
from tests.clusters import running
from tests.waiting import BOUND_S, finished, opened, until, until_async

KB = 1024
MAY_END = threading.Event()


def counted(client: Client, workers: int) -> None:
    """Wait until there are as many workers."""
    until(lambda: count(client) == workers, f"{workers} workers", seen=lambda: count(client))


def looked(elastic: ff.Elastic, times: int) -> None:
    """Wait until a controller has looked at the cluster so often."""
    looks = len(elastic.decisions)
    until(lambda: len(elastic.decisions) >= looks + times, f"{times} looks of the controller")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"minimum": 3, "maximum": 2}, "0 <= minimum <= maximum", id="bounds that contradict"),
        pytest.param(
            {"minimum": -1}, "minimum=-1, wanted a whole number of at least 0", id="fewer than none"
        ),
        pytest.param({"efficiency": 0}, "efficiency=0, wanted a number above 0", id="no efficiency"),
        pytest.param({"efficiency": "high"}, "efficiency='high'", id="an efficiency in words"),
        pytest.param({"max_pending": 0}, "max_pending=0", id="nothing may wait"),
        pytest.param({"idle_timeout": "soon"}, "idle_timeout='soon'", id="a patience in words"),
        pytest.param(
            {"wait_count": 3}, "got wait_count.*; use idle_timeout, the time", id="an option of Dask's own"
        ),
        pytest.param({"target_duration": "5s"}, "use efficiency, the price of another job", id="another"),
        pytest.param(
            {"minimun": 3}, "unknown minimun; wanted some of .*; did you mean minimum", id="misspelled"
        ),
    ],
)
def test_wrong_options_are_refused_by_name(options, words):
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        pytest.raises(ff.InputError, match=words),
    ):
        cluster.adapt(Adaptive=ff.Elastic, **options)


@pytest.mark.parametrize(
    ("minimum", "maximum", "refused"),
    [
        pytest.param(0, 3, True, id="no job fits"),
        pytest.param(None, 3, True, id="nor without a minimum"),
        pytest.param(0, 0, False, id="none is an order"),
        pytest.param(0, 4, False, id="a job of the smallest pool fits"),
        pytest.param(1, 3, False, id="the minimum holds, in whole jobs"),
        pytest.param(0, None, False, id="no maximum"),
    ],
)
def test_a_maximum_that_allows_no_job_is_refused(minimum, maximum, refused):
    kinds = (Pool("cpu", processes=8), Pool("gpu", processes=4))
    with pytest.raises(ff.InputError, match="wanted at least 4") if refused else nullcontext():
        check_room(elastic_options({"minimum": minimum, "maximum": maximum}), kinds)


def test_a_cluster_that_starts_no_workers_by_itself_is_refused():
    with pytest.raises(ff.InputError, match="got Cluster, which cannot start workers"):
        ff.Elastic(Cluster.__new__(Cluster))


@pytest.mark.cluster
def test_workers_follow_the_work_and_keep_what_they_made():
    with running(0, kind=ff.LocalCluster) as client:
        elastic = client.cluster.adapt(Adaptive=ff.Elastic, minimum=0, maximum=2, interval=0.2)
        futures = client.map(nap, range(40), seconds=0.5)
        counted(client, 2)
        finished(futures)
        client.cluster.adapt(Adaptive=ff.Elastic, minimum=1, maximum=1, interval=0.2)
        counted(client, 1)
        assert client.gather(futures) == list(range(40))
        assert any("submit" in action for entry in elastic.decisions for action in entry["actions"])
        assert client.run_on_scheduler(tries) == 40


@pytest.mark.cluster
@pytest.mark.parametrize("tile_bytes", [8 * KB, 256 * KB], ids=["light tiles", "heavy tiles"])
def test_who_joins_runs_its_share_of_the_next_iteration_though_others_hold_all_of_its_input(tile_bytes):
    """No copies are made ahead: what a worker reads moves when it is read, at most once to each."""
    graph = iterated_cholesky(nt=8, iterations=1, seconds=0.02, tile_bytes=tile_bytes)
    held = TaskGraph("tiles", tuple(task for task in graph.tasks if task.kernel == "tile"))
    with running(2, kind=ff.LocalCluster, processes=False) as client:
        client.amm.stop()  # it drops one of two copies, of its own choice
        tiles = workload_kernels.submit(client, held)
        finished(tiles)
        first = set(client.cluster.scheduler.workers)
        client.cluster.adapt(Adaptive=ff.Elastic, minimum=4, maximum=4, interval=0.2)
        counted(client, 4)
        sent_ahead = sum(client.run(sent).values())
        with ff.profile(client) as recorded:
            finished(workload_kernels.submit(client, graph))
        holders = client.who_has(tiles)
        sent_then = sum(client.run(sent).values())
    ran = [span for span in recorded.trace.spans if span.kind == "compute"]
    joined = Counter(span.worker for span in ran if span.worker not in first)
    assert len(ran) == len({span.key for span in ran}) == len(graph.tasks) - len(held.tasks)
    assert len(joined) == 2
    assert sum(joined.values()) >= len(ran) / 3  # a half of them is even
    assert all(first & set(who) for who in holders.values())
    assert sent_ahead == 0 < sent_then <= 3 * len(graph.tasks) * tile_bytes


@pytest.mark.cluster
def test_a_worker_that_dies_for_good_is_replaced():
    with running(0) as client:
        client.cluster.adapt(Adaptive=ff.Elastic, minimum=1, maximum=1, interval=0.2)
        counted(client, 1)
        (name,) = until(lambda: tuple(client.cluster.workers), "the worker to be known")
        client.cluster.sync(client.cluster.workers[name].close)
        until(
            lambda: count(client) == 1 and name not in client.cluster.workers,
            f"another worker in the place of {name}",
            seen=lambda: list(client.cluster.workers),
        )
        assert client.submit(nap, 5, 0.0).result(timeout=60) == 5


@pytest.mark.cluster
def test_bounds_change_while_a_worker_is_leaving():
    with running(0, kind=ff.LocalCluster) as client:
        client.cluster.adapt(Adaptive=ff.Elastic, minimum=2, maximum=2, interval=0.2)
        counted(client, 2)
        futures = client.map(held, range(2))
        until(lambda: all(client.processing().values()), "a task on each worker", seen=client.processing)
        for workers in (1, 2, 1, 1):
            elastic = client.cluster.adapt(
                Adaptive=ff.Elastic, minimum=workers, maximum=workers, interval=0.1
            )
            looked(elastic, 2)  # the first may be that of the one before, which had begun
        Event("bounds", client).set()
        assert client.gather(futures) == [0, 1]
        counted(client, 1)
        until(  # Dask's cluster does not close while a worker of its starts
            lambda: elastic.decisions[-1]["jobs"] == {"running": 1},
            "one job, and none that starts or leaves",
            seen=lambda: elastic.decisions[-1],
        )


def test_spec_pools_ask_under_names_that_none_had_before():
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        pools = SpecPools(cluster)
        names: list[str] = []
        for _ in range(3):
            cluster.sync(request_and_release, pools, names)
        assert len(set(names)) == 3


def test_jobs_that_are_released_while_another_one_is_forgotten_are_none():
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        pools = SpecPools(cluster)
        jobs = cluster.sync(forget_and_release, pools)
        assert jobs == {str(name) for name in cluster.worker_spec}
        assert len(jobs) == 1


async def forget_and_release(pools: SpecPools) -> set[str]:
    """One of four jobs ended by itself, and two are let go while the look that notices it ends what is left of it."""
    pools.request("default", 4)
    await pools.wait_submitted()
    ended, *leaving = [job.name for job in await pools.reconcile()][:3]
    await pools.cluster.workers[int(ended)].close()

    def known() -> set[int]:
        return {worker["name"] for worker in pools.cluster.scheduler_info["workers"].values()}

    await until_async(
        lambda: int(ended) not in known(), f"the cluster to know of the end of {ended}", seen=known
    )
    seen, _ = await asyncio.gather(pools.reconcile(), pools.release(leaving))
    return {job.name for job in seen}


class LateSite(SpecPools):
    """A site that answers late: its answer is from before the leaving jobs had left."""

    def __init__(self, cluster: Any) -> None:
        super().__init__(cluster)
        self.late = 0

    async def reconcile(self) -> tuple[SiteJob, ...]:
        jobs = await super().reconcile()
        if leaving := self.cluster._adaptive._ongoing.leaving:
            MAY_END.set()
            await until_async(lambda: not leaving, "the end of the jobs that leave", seen=lambda: leaving)
            self.late += 1
        return jobs


@pytest.mark.cluster
def test_nobody_goes_in_the_place_of_one_that_went_while_the_site_was_asked():
    with running(4, kind=ff.LocalCluster, processes=False) as client:
        before = set(client.cluster.scheduler.workers)
        site = LateSite(client.cluster)
        MAY_END.clear()
        tasks = [
            client.submit(waiting, address, workers=[address], allow_other_workers=True) for address in before
        ]
        until(
            lambda: all(ws.processing for ws in client.cluster.scheduler.workers.values()),
            "a task on each worker",
        )
        client.cluster.adapt(Adaptive=ff.Elastic, minimum=4, maximum=4, interval=0.05)._pools = site
        elastic = client.cluster.adapt(Adaptive=ff.Elastic, minimum=2, maximum=2, interval=0.05)
        counted(client, 2)
        looked(elastic, 3)
        assert (count(client), site.late > 0) == (2, True)
        assert set(client.cluster.scheduler.workers) < before
        verbs = Counter(action["kind"] for entry in elastic.decisions for action in entry["done"])
        assert verbs == {"drain": 1}
        assert set(client.gather(tasks)) == before


async def request_and_release(pools: SpecPools, names: list[str]) -> None:
    pools.request("default", 1)
    await pools.wait_submitted()
    (job,) = await pools.reconcile()
    names.append(job.name)
    await pools.release([job.name])
    assert await pools.reconcile() == ()


def nap(value: int, seconds: float) -> int:
    time.sleep(seconds)
    return value


def waiting(value: str) -> str:
    """Run in a worker of this process, until the test lets it end."""
    assert MAY_END.wait(BOUND_S)
    return value


def held(value: int) -> int:
    opened("bounds")
    return value


def count(client: Client) -> int:
    return len(client.scheduler_info(n_workers=-1)["workers"])


def tries(dask_scheduler: Any) -> int:
    """How many task runs ended well."""
    return sum(
        prefix.state_counts["memory"]
        for name, prefix in dask_scheduler.task_prefixes.items()
        if name == "nap"
    )


def sent(dask_worker: Worker) -> int:
    return dask_worker.transfer_outgoing_bytes_total
