"""`ff.LocalCluster`: a worker that is killed again and again comes back."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import dask
import distributed
import pytest

import dask_ferro as ff
from tests.clusters import running
from tests.waiting import WHOLE_S, until

TIMEOUT_S = 4.0


@pytest.mark.cluster
@pytest.mark.parametrize("kind", [ff.LocalCluster, distributed.LocalCluster], ids=["ours", "stock"])
def test_a_worker_that_is_lost_again_as_the_timeout_of_its_first_loss_ends_comes_back(kind):
    """Stock Dask then closes the nanny that is starting the worker again."""
    # A process that imports all anew is away for half a second.
    slow = {"distributed.worker.multiprocessing-method": "spawn"}
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": TIMEOUT_S, **slow}),
        running(1, kind=kind) as client,
    ):
        lost = kill(client)
        client.wait_for_workers(1, timeout=WHOLE_S)
        time.sleep(max(lost + TIMEOUT_S - 0.15 - time.monotonic(), 0.0))
        again = kill(client)
        if again < lost + TIMEOUT_S < again + 0.3:  # else the machine was too busy to hit that moment
            stays = kind is ff.LocalCluster
            until(lambda: time.monotonic() > lost + TIMEOUT_S + 0.5, "the timeout to end")
            assert bool(client.cluster.workers) == stays
        if kind is ff.LocalCluster:
            client.wait_for_workers(1, timeout=WHOLE_S)
            assert client.submit(sum, [1, 2]).result(timeout=WHOLE_S) == 3


def kill(client):
    """Kill the only worker; return the time at which the cluster knows."""
    ((address, pid),) = client.run(os.getpid).items()
    os.kill(pid, signal.SIGKILL)
    until(partial(is_gone, client.cluster, address), "the cluster to know of it", every=0.005)
    return time.monotonic()


def is_gone(cluster, address):
    return address not in cluster.scheduler_info["workers"]


@pytest.mark.cluster
def test_a_worker_that_stays_away_is_given_up():
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": 0.2}),
        running(2, kind=ff.LocalCluster) as client,
    ):
        client.sync(next(iter(client.cluster.workers.values())).close)
        until(lambda: len(client.cluster.workers) == 1, "the cluster to give it up")
        assert client.submit(sum, [1, 2]).result(timeout=WHOLE_S) == 3
