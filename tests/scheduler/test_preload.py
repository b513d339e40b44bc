"""Wrong settings of the scheduler plugin end the scheduler, with the setting's name."""

from __future__ import annotations

import asyncio
import sys

import dask
import pytest
from distributed import Scheduler

import dask_ferro as ff
from tests.programs import ran

WRONG = {"ferro.scheduler.stealing": "foo"}


def test_our_local_cluster_refuses_a_wrong_setting_before_it_starts():
    with dask.config.set(WRONG):
        with pytest.raises(ff.InputError, match=r"ferro.scheduler.stealing.*DASK_FERRO__SCHEDULER__STEALING"):
            ff.LocalCluster(processes=False, n_workers=0, dashboard_address=":0")
        preloads = {"preload": []}  # the caller's own: then no setting applies
        with ff.LocalCluster(
            processes=False, n_workers=0, dashboard_address=":0", scheduler_kwargs=preloads
        ) as cluster:
            assert cluster.scheduler.plugins.get("dask_ferro") is None


def test_a_preload_with_a_wrong_setting_ends_the_scheduler():
    async def run():
        async with Scheduler(
            port=0, dashboard=False, dashboard_address=":0", preload=["dask_ferro.scheduler.preload"]
        ):
            raise AssertionError("it runs")

    with dask.config.set(WRONG), pytest.raises(RuntimeError, match="failed to start") as failed:
        asyncio.run(run())
    assert isinstance(failed.value.__cause__, ff.InputError)


def test_dask_scheduler_ends_by_itself_and_says_why():
    command = ["scheduler", "--port", "0", "--no-dashboard", "--preload", "dask_ferro.scheduler.preload"]
    done = ran([sys.executable, "-m", "dask", *command], env={"DASK_FERRO__SCHEDULER__STEALING": "foo"})
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if "the scheduler ends" in line]
    assert len(told) == 1
    assert "ferro.scheduler.stealing: got 'foo'" in told[0]
