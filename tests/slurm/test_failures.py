"""Which failures of jobs close a pool, and a pool that is paused."""

from __future__ import annotations

import dask
import pytest

import dask_ferro as ff
from dask_ferro.slurm.job_lifecycle import BatchJob, JobState
from tests.slurm.test_pool import SHAPE, built


@pytest.mark.parametrize(
    ("ends", "most", "closes"),
    [
        pytest.param("xx", 3, False, id="two"),
        pytest.param("xxx", 3, True, id="three"),
        pytest.param("xoxoxox", 3, False, id="every other job works"),
        pytest.param("xxoxx", 3, True, id="a node on which all jobs fail beside one that works"),
        pytest.param("x" * 99, None, False, id="no limit"),
    ],
)
def test_failures_close_a_pool(ends: str, most: int | None, closes: bool) -> None:
    pool = built()
    with dask.config.set({"ferro.elastic.failures": most}):
        for n, end in enumerate(ends):
            if end == "x":
                reason = pool.fail(f"job {n}: FAILED")
            else:
                pool.measure(BatchJob("a", "a", n, 1, 0.0, state=JobState.RUNNING), JobState.BOOTING)
    said = f"{most} jobs ended before a worker came; the last, job {len(ends) - 1}: FAILED"
    assert reason == (said if closes else "")


def test_a_cluster_is_refused_whose_configuration_has_no_limit_of_failures() -> None:
    with (
        dask.config.set({"ferro.elastic.failures": 0}),
        pytest.raises(ff.InputError, match=r"ferro\.elastic\.failures: got .*, wanted"),
    ):
        ff.SLURMCluster(**SHAPE)


def test_a_pool_that_is_paused_says_so_until_it_is_resumed_and_then_is_open_whatever_closed_it() -> None:
    pool = built()
    pool.close("3 jobs ended before a worker came", 10.0)
    pool.pause(20.0)
    said = pool.pool(21.0, "")
    assert (said.is_paused, said.closed_until) == (True, 0.0)
    assert "cluster.pools.resume('cpu') goes on with it; 3 jobs ended before a worker came" in said.closed
    pool.resume()
    assert (pool.pool(22.0, "").closed, pool.pool(22.0, "").is_paused) == ("", False)
    assert [bool(pool.fail("job 4: FAILED")) for _ in range(3)] == [False, False, True]
