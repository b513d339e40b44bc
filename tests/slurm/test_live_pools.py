"""Pools that are added, removed, paused and resumed while a cluster runs, on a real SLURM."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client

import dask_ferro as ff
from tests.slurm.tools import LATER, Site, command, looked, partitions, queue, queued, refuses
from tests.standing import PROGRAM
from tests.standing import command as standing
from tests.waiting import finished, until, until_async

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.usefixtures("slurm"),
    pytest.mark.filterwarnings("default:dask_ferro. pool:UserWarning"),
]

GPU = {"worker_extra_args": ["--resources", "GPU=1"]}


def test_a_pool_that_is_added_has_workers_and_one_that_is_removed_loses_nothing(site):
    """Two workers throughout: those of the one pool make room for those of the other, and hand over what they hold."""
    s: Site = site()
    s.cluster.scale(2)
    s.connected(2)
    held = s.client.map(lambda n: bytes(10_000) + bytes([n]), range(20), pure=False)
    finished(held)
    s.cluster.pools.add("gpu", queue="gpu", **GPU)
    assert [pool.name for pool in s.cluster.pools] == ["default", "gpu"]
    begin = time.monotonic()
    s.cluster.pools.remove("default")
    assert time.monotonic() - begin < 5.0
    most = [2]

    def moved() -> bool:
        most.append(len(queue(s.cluster)))
        return [pool.name for pool in s.cluster.pools] == ["gpu"] and len(s.workers) == 2

    until(
        moved, "workers of the other pool alone", seen=lambda: (repr(s.cluster), s.cluster.pools(), s.workers)
    )
    assert {worker["resources"]["GPU"] for worker in s.workers.values()} == {1.0}
    assert partitions(s.cluster) == ["gpu", "gpu"]
    assert [value[-1] for value in s.client.gather(held)] == list(range(20))
    assert all(future.status == "finished" for future in held)
    assert s.client.run_on_scheduler(again, [future.key for future in held]) == []
    assert max(most) <= 3  # one took over what two held
    with pytest.raises(
        ff.ConfigError, match="pool 'gpu' is the last one and cannot be removed; add another one"
    ):
        s.cluster.pools.remove("gpu")
    s.cluster.pools.add("default")
    assert [pool.name for pool in s.cluster.pools] == ["gpu", "default"]


def again(keys: list[str], dask_scheduler: Any) -> list[str]:
    """The tasks that were sent to a worker more than once."""
    return [key for key in keys if sum(row[2] == "processing" for row in dask_scheduler.story(key)) > 1]


def test_nothing_is_asked_of_a_paused_pool_and_who_waits_is_told(site):
    s: Site = site()
    s.cluster.adapt(minimum=0, maximum=2, interval=0.3)
    s.cluster.pools.pause("default")
    future = s.client.submit(abs, -7)
    reason = "default is paused: by its user at"
    with pytest.raises(ff.ConfigError, match=f"1 workers cannot come for now: {reason}"):
        s.client.wait_for_workers(1)
    until(lambda: "for default" in decided(s), "a look at the work", seen=lambda: decided(s))
    assert decided(s).endswith("; default is paused")
    assert "pools: default paused: by its user at" in repr(s.cluster)
    assert "paused: by its user at" in s.cluster._repr_html_()
    with pytest.raises(ff.ConfigError, match=f"(?s)no job can be had; {reason}.*cluster.pools.resume"):
        s.cluster.scale(2)
    assert (future.status, queue(s.cluster)) == ("pending", {})
    told = [message for _, message in s.client.get_events("ferro") if message["action"] == "pool"]
    assert [(one["order"], one["pool"]) for one in told] == [("pause", "default")]
    warned = [str(message) for _, message in s.client.get_events("warn")]
    assert [reason in text for text in warned] == [True]  # tasks that wait elsewhere
    s.cluster.pools.resume("default")  # the order holds
    assert future.result(timeout=60) == 7
    s.connected(2)
    s.cluster.pools.pause("default")
    with pytest.raises(ff.ConfigError, match=f"1 of 3 workers cannot come for now: {reason}"):
        s.cluster.scale(3)
    assert len(queue(s.cluster)) == 2  # those that run go on


def decided(s: Site) -> str:
    return str(s.cluster._adaptive.decisions[-1]["why"])


async def test_on_an_event_loop_what_waits_in_the_queue_stays_or_goes(play):
    async with play(pools={"slow": LATER}) as cluster:
        cluster.request("slow", 2)
        await cluster.wait_submitted()
        await cluster.pools.pause("slow")
        cluster.request("slow", 1)
        assert [job.pool for job in await looked(cluster, ["pending"] * 2)] == ["slow"] * 2
        with pytest.raises(ff.ConfigError, match=r"pool 'slow' is there already; wanted another name"):
            await cluster.pools.add("slow")
        wrong = {
            "unknown option 'queu'; did you mean 'queue'": {"queu": "gpu"},
            "got cores=0, wanted a whole number of at least 1": {"cores": 0},
            "pool 'x': got minimum=-1, wanted a number of at least 0": {"minimum": -1},
            "pool 'x': SLURM would never start jobs of it: .*asked for 64 CPUs": {"cores": 64},
            "pool 'x': SLURM would never start jobs of it: .*invalid partition specified: nosuch": {
                "queue": "nosuch"
            },
        }
        for words, options in wrong.items():
            with pytest.raises(ff.ConfigError, match=words):
                await cluster.pools.add("x", **options)
        for order in (cluster.pools.pause, cluster.pools.resume, cluster.pools.remove):
            with pytest.raises(ff.ConfigError, match="no pool 'x'; there are default, slow"):
                await order("x")
        await cluster.pools.pause("default")
        with pytest.raises(ff.ConfigError, match=r"1 of 3 workers cannot come for now: default is paused"):
            await cluster.scale(3)
        with pytest.raises(ff.ConfigError, match=r"3 workers cannot come for now: default is paused"):
            await cluster.wait_for_workers(3)
        await cluster.pools.remove("slow")
        await queued(cluster, lambda jobs: jobs == {}, "its jobs to be cancelled")

        async def is_forgotten() -> bool:
            await cluster.reconcile()
            return [pool.name for pool in cluster.pools] == ["default"]

        await until_async(is_forgotten, "it to be forgotten", every=0.1)
        assert len(cluster.pools) == 1
        assert cluster.pools == cluster.pools()


async def test_what_slurm_has_not_taken_is_taken_back_when_its_pool_is_paused(play, fake):
    calls = fake("sbatch", 1, refuses("Resource temporarily unavailable"))

    async with play(**LATER) as cluster:
        cluster.request("default", 2)
        await until_async(lambda: cluster.pools[0].closed, "a submission that failed")
        await cluster.pools.pause("default")
        assert await cluster.reconcile() == ()
        assert cluster.pools[0].mode == "paused"
        await cluster.wait_submitted()
        await asyncio.sleep(1.0)  # the next try would have been
        assert (queue(cluster), len(calls.read_text().splitlines())) == ({}, 1)
        await cluster.pools.resume("default")
        cluster.request("default", 1)
        await cluster.wait_submitted()
        await looked(cluster, ["pending"])


async def test_each_pool_has_a_dry_run_when_the_cluster_starts(play):
    """Before anything is asked for: the one that SLURM would never start is closed, the other is not."""

    async with play(pools={"large": {"cores": 64}}) as cluster, Client(cluster, asynchronous=True):
        await until_async(lambda: cluster.pools[1].closed_until, "the wrong pool to be closed")
        assert "asked for 64 CPUs" in cluster.pools[1].closed
        assert cluster.pools[0].closed == ""
        assert queue(cluster) == {}
        await cluster.scale(1)  # tasks that other workers cannot run delay no worker
        await asyncio.wait_for(cluster.wait_for_workers(1), 60)


def pools(*words: object) -> subprocess.CompletedProcess[str]:
    line = [str(PROGRAM), "pools", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)


def test_the_command_line_changes_the_pools_of_a_cluster_that_runs(tmp_path: Path):
    file = tmp_path / "s.json"
    started = ("--config", "local-test", "--name", tmp_path.name, "--maximum", 2, "--scheduler-file", file)
    with standing(tmp_path, *started) as running:
        running.says("no jobs")
        there = ("--scheduler-file", file)
        done = pools(*there, "add", "gpu", "queue=gpu", "maximum=1")
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.split()[:2] for line in done.stdout.splitlines()[3:]] == [
            ["default", "open"],
            ["gpu", "open"],
        ]
        assert pools(*there, "pause", "default").returncode == 0
        running.says("default is paused")
        done = pools("list", *there, "--json")
        assert '"state": "paused"' in done.stdout
        done = pools(*there, "add", "x", "queu=gpu")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "pool 'x': unknown option 'queu'; did you mean 'queue'" in done.stderr


# -- each order, under an order and under bounds, from a thread and on an event loop ----------------------------


def steps(
    cluster: ff.SLURMCluster, bound: Callable[[int], Any], seen: Callable[[], list[str]]
) -> Iterator[Any]:
    """Yield what may have to be awaited, and what is to come true."""
    yield bound(2)
    yield lambda: seen() == ["cpu", "cpu"]
    yield cluster.pools.pause("default")
    yield cluster.pools.add("gpu", queue="gpu", maximum=3)
    yield bound(3)
    yield lambda: seen() == ["cpu", "cpu", "gpu"]  # those in the queue stayed
    yield cluster.pools.pause("gpu")
    command("scancel", "--name", cluster.job_name, "--partition", "gpu")
    yield lambda: seen() == ["cpu", "cpu"]
    yield cluster.pools.remove("default")
    yield lambda: seen() == [] and [pool.name for pool in cluster.pools] == ["gpu"]
    yield cluster.pools.resume("gpu")
    yield lambda: seen() == ["gpu"] * 3
    assert cluster.pools[0].mode == ""


class Seen:
    """The partitions of a cluster's jobs, and the most jobs that there were at once."""

    def __init__(self, cluster: ff.SLURMCluster) -> None:
        self.cluster, self.most = cluster, 0

    def __call__(self) -> list[str]:
        found = partitions(self.cluster)
        self.most = max(self.most, len(found))
        return found


def bound(cluster: ff.SLURMCluster, kind: str) -> Callable[[int], Any]:
    if kind == "scale":
        return cluster.scale
    return lambda n: cluster.adapt(minimum=n, maximum=n)


@pytest.mark.parametrize("kind", ["scale", "adapt"])
def test_every_order_from_a_thread(site, kind):
    with dask.config.set({"ferro.elastic.interval": 0.2}):
        s: Site = site(**LATER)
        seen = Seen(s.cluster)
        for step in steps(s.cluster, bound(s.cluster, kind), seen):
            if callable(step):
                until(step, "the jobs", seen=seen)
        assert seen.most == 3


@pytest.mark.parametrize("kind", ["scale", "adapt"])
async def test_every_order_on_an_event_loop(play, kind):
    with dask.config.set({"ferro.elastic.interval": 0.2}):
        async with play(**LATER) as cluster:
            seen = Seen(cluster)
            for step in steps(cluster, bound(cluster, kind), seen):
                if callable(step):
                    await until_async(partial(asyncio.to_thread, step), "the jobs", every=0.1, seen=seen)
                elif isinstance(step, Awaitable):
                    await step
            assert seen.most == 3
