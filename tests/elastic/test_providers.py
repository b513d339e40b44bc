"""What the controller keeps and forgets of the jobs of a cluster of local workers."""

from __future__ import annotations

import asyncio
import logging
from math import inf

import pytest
from distributed import LocalCluster, WorkerPlugin

import dask_ferro as ff
from dask_ferro.elastic.providers import SpecPools
from tests.waiting import BOUND_S, until_async

pytestmark = pytest.mark.cluster


def local(workers: int) -> LocalCluster:
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=False, dashboard_address=":0", asynchronous=True
    )


class HeldEnd(WorkerPlugin):
    """Holds its worker up while that closes, until the test lets it go."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def teardown(self, worker: object) -> None:
        await asyncio.wait_for(self.may_end.wait(), BOUND_S)


def test_a_job_that_is_being_released_does_not_end_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with local(1) as cluster:
            pools = SpecPools(cluster)
            ((name, worker),) = cluster.workers.items()
            held = HeldEnd()
            await worker.plugin_add(held, name="held")
            await cluster.scheduler.remove_worker(worker.address, stimulus_id="test", close=True)
            await until_async(
                lambda: not cluster.scheduler_info["workers"] and worker.status.name == "closing",
                "a worker that is gone for the scheduler and still closes",
            )
            released = asyncio.ensure_future(pools.release([str(name)]))
            await asyncio.sleep(0)
            seen = await pools.reconcile()
            assert ([job.name for job in seen], released.done()) == ([str(name)], False)
            held.may_end.set()
            await released
            assert await pools.reconcile() == ()

    with caplog.at_level(logging.WARNING, "dask_ferro"):
        asyncio.run(scenario())
    assert "ended without a request" not in caplog.text


async def test_the_next_try_of_a_job_that_is_gone_is_forgotten() -> None:
    async with local(1) as cluster:
        elastic = cluster.adapt(Adaptive=ff.Elastic, minimum=1, maximum=1, interval="1h")
        (name,) = map(str, cluster.worker_spec)
        elastic._ongoing.not_before |= {name: inf, "gone": inf}
        await elastic.adapt()
        assert elastic._ongoing.not_before == {name: inf}
        elastic._ongoing.not_before[name] = 0.0
        await elastic.adapt()
        assert elastic._ongoing.not_before == {}
