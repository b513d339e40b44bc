"""`ff.LocalCluster`: a worker that is lost again and again comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

import dask
import pytest
from distributed import SpecCluster

import dask_ferro as ff
from dask_ferro.scheduler.upstream_deploy import KeepsRestartedWorkers
from tests.clusters import running
from tests.waiting import WHOLE_S, until


class Nanny:
    """What a cluster closes when it gives a worker up."""

    closed = False

    async def close(self):
        self.closed = True


def scene(kind):
    """A cluster with one worker, whose losses are told by hand."""

    class Scene(kind):
        def __init__(self):
            self.workers, self.scheduler_info, self._futures = {0: Nanny()}, {"workers": {}}, set()

        def __del__(self):
            """Nothing was started."""

        def come(self, address):
            self.scheduler_info["workers"][address] = {"name": 0}

        def lose(self, address):
            self._update_worker_status("remove", address)

    return Scene()


@pytest.mark.parametrize("again", ["tcp://there:1", "tcp://there:2"], ids=["at its address", "elsewhere"])
@pytest.mark.parametrize("kind", [KeepsRestartedWorkers, SpecCluster], ids=["ours", "stock"])
def test_the_timeout_of_an_earlier_loss_does_not_count(kind, again):
    async def play():
        timers = []
        asyncio.get_running_loop().call_later = lambda delay, act, *given: timers.append(partial(act, *given))
        cluster = scene(kind)
        nanny = cluster.workers[0]
        for address in ("tcp://there:1", again):
            cluster.come(address)
            cluster.lose(address)
        first, latest = timers
        first()
        is_kept = 0 in cluster.workers
        latest()
        await asyncio.gather(*cluster._futures)
        assert (cluster.workers, nanny.closed) == ({}, True)
        return is_kept

    assert asyncio.run(play()) == (kind is not SpecCluster)


@pytest.mark.cluster
def test_a_worker_that_stays_away_is_given_up_and_a_killed_one_comes_back():
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": 20.0}),
        running(2, kind=ff.LocalCluster) as client,
    ):
        for _ in range(3):
            address, pid = next(iter(client.run(os.getpid).items()))
            os.kill(pid, signal.SIGKILL)
            until(partial(is_gone, client.cluster, address), "the cluster to know of it", every=0.005)
            client.wait_for_workers(2, timeout=WHOLE_S)
        with dask.config.set({"distributed.deploy.lost-worker-timeout": 0.2}):
            client.sync(next(iter(client.cluster.workers.values())).close)
            until(lambda: len(client.cluster.workers) == 1, "the cluster to give it up")
        assert client.submit(sum, [1, 2]).result(timeout=WHOLE_S) == 3


def is_gone(cluster, address):
    return address not in cluster.scheduler_info["workers"]
