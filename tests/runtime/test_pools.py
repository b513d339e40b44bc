"""What the controller keeps and forgets of the jobs of a cluster of local workers."""

from __future__ import annotations

import asyncio
import logging
from math import inf

import pytest
from distributed import LocalCluster, WorkerPlugin

import dask_ferro as ff
from dask_ferro.runtime.pools import SpecPools

pytestmark = pytest.mark.cluster


def local(workers: int) -> LocalCluster:
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=False, dashboard_address=None, asynchronous=True
    )


class SlowEnd(WorkerPlugin):
    """Holds its worker up while that closes."""

    async def teardown(self, worker: object) -> None:
        await asyncio.sleep(0.3)


def test_a_job_that_is_being_released_does_not_end_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with local(1) as cluster:
            pools = SpecPools(cluster)
            ((name, worker),) = cluster.workers.items()
            await worker.plugin_add(SlowEnd(), name="slow")
            await cluster.scheduler.remove_worker(worker.address, stimulus_id="test", close=True)
            async with asyncio.timeout(20):
                while cluster.scheduler_info["workers"] or worker.status.name != "closing":
                    await asyncio.sleep(0.01)
            released = asyncio.ensure_future(pools.release([str(name)]))
            await asyncio.sleep(0)
            seen = await pools.reconcile()
            assert ([job.name for job in seen], released.done()) == ([str(name)], False)
            await released
            assert await pools.reconcile() == ()

    with caplog.at_level(logging.WARNING, "dask_ferro"):
        asyncio.run(scenario())
    assert "ended by itself" not in caplog.text


def test_the_next_try_of_a_job_that_is_gone_is_forgotten() -> None:
    async def scenario() -> None:
        async with local(1) as cluster:
            elastic = cluster.adapt(Adaptive=ff.Elastic, minimum=1, maximum=1, interval="1h")
            (name,) = map(str, cluster.worker_spec)
            elastic._not_before |= {name: inf, "gone": inf}
            await elastic.adapt()
            assert elastic._not_before == {name: inf}
            elastic._not_before[name] = 0.0
            await elastic.adapt()
            assert elastic._not_before == {}

    asyncio.run(scenario())
