"""Pools that are paused and resumed while a cluster runs, on a real SLURM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import dask
import pytest

import dask_ferro as ff
from tests.on_slurm.tools import LATER, Site, command, looked, partitions, queue, refuses
from tests.waiting import until, until_async

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def test_nothing_is_asked_of_a_paused_pool_and_who_waits_is_told(site):
    s: Site = site()
    s.cluster.adapt(minimum=0, maximum=2, interval=0.3)
    s.cluster.pools.pause("default")
    future = s.client.submit(abs, -7)
    reason = "default is paused: by its user at"
    with pytest.raises(ff.InputError, match=f"1 workers cannot come for now: {reason}"):
        s.client.wait_for_workers(1)
    until(lambda: "for default" in decided(s), "a look at the work", seen=lambda: decided(s))
    assert decided(s).endswith("; default is paused")
    assert "pool default: no jobs; paused: by its user at" in repr(s.cluster)
    assert "paused: by its user at" in s.cluster._repr_html_()
    with pytest.raises(ff.InputError, match=f"(?s)no job can be had; {reason}.*cluster.pools.resume"):
        s.cluster.scale(2)
    assert (future.status, queue(s.cluster)) == ("pending", {})
    s.cluster.pools.resume("default")  # the order holds
    assert future.result(timeout=60) == 7
    s.connected(2)
    s.cluster.pools.pause("default")
    with pytest.raises(ff.InputError, match=f"1 of 3 workers cannot come for now: {reason}"):
        s.cluster.scale(3)
    assert len(queue(s.cluster)) == 2  # those that run go on


def decided(s: Site) -> str:
    return str(s.cluster._adaptive.decisions[-1]["why"])


async def test_what_slurm_has_not_taken_is_taken_back_when_its_pool_is_paused(play, fake):
    calls = fake("sbatch", 1, refuses("Resource temporarily unavailable"))

    async with play(**LATER) as cluster:
        cluster.request("default", 2)
        await until_async(lambda: cluster.pools[0].closed, "a submission that failed")
        await cluster.pools.pause("default")
        assert await cluster.reconcile() == ()
        assert cluster.pools[0].is_paused
        await cluster.wait_submitted()
        await asyncio.sleep(1.0)  # the next try would have been
        assert (queue(cluster), len(calls.read_text().splitlines())) == ({}, 1)
        await cluster.pools.resume("default")
        cluster.request("default", 1)
        await cluster.wait_submitted()
        await looked(cluster, ["pending"])


GPU = {"pools": {"gpu": {"queue": "gpu", "maximum": 3, "cost": 9.0}}}


# -- each order, under an order and under bounds, from a thread and on an event loop ----------------------------


def steps(
    cluster: ff.SLURMCluster, bound: Callable[[int], Any], seen: Callable[[], list[str]]
) -> Iterator[Any]:
    """Yield what may have to be awaited, and what is to come true."""
    yield bound(2)
    yield lambda: seen() == ["cpu", "cpu"]
    yield cluster.pools.pause("default")
    yield bound(3)
    yield lambda: seen() == ["cpu", "cpu", "gpu"]  # those in the queue stayed
    yield cluster.pools.pause("gpu")
    command("scancel", "--name", cluster.job_name, "--partition", "gpu")
    yield lambda: seen() == ["cpu", "cpu"]
    yield cluster.pools.resume("gpu")
    yield lambda: seen() == ["cpu", "cpu", "gpu"]
    assert [pool.is_paused for pool in cluster.pools] == [True, False]


class Seen:
    """The partitions of a cluster's jobs, and the most jobs that there were at once."""

    def __init__(self, cluster: ff.SLURMCluster) -> None:
        self.cluster, self.most = cluster, 0

    def __call__(self) -> list[str]:
        found = partitions(self.cluster)
        self.most = max(self.most, len(found))
        return found


def test_every_order_from_a_thread(site):
    with dask.config.set({"ferro.elastic.interval": 0.2}):
        s: Site = site(**LATER, **GPU)
        seen = Seen(s.cluster)
        for step in steps(s.cluster, s.cluster.scale, seen):
            if callable(step):
                until(step, "the jobs", seen=seen)
        assert seen.most == 3


async def test_every_order_on_an_event_loop(play):
    with dask.config.set({"ferro.elastic.interval": 0.2}):
        async with play(**LATER, **GPU) as cluster:
            seen = Seen(cluster)
            for step in steps(cluster, lambda n: cluster.adapt(minimum=n, maximum=n), seen):
                if callable(step):
                    await until_async(partial(asyncio.to_thread, step), "the jobs", every=0.1, seen=seen)
                elif isinstance(step, Awaitable):
                    await step
            assert seen.most == 3
