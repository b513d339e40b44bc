"""Which failures of jobs close a pool, and a pool that is paused."""

from __future__ import annotations

import dask
import pytest

import dask_ferro as ff
from dask_ferro.runtime.pools import pool as pools
from tests.runtime.pools.test_pool import SHAPE, built

WITHIN = "5 jobs ended before a worker came within 40 s"
ROW = "3 jobs ended before a worker came"


@pytest.mark.parametrize(
    ("row", "times", "most", "said"),
    [
        pytest.param(2, [98.0, 99.0], 3, "", id="two in a row"),
        pytest.param(3, [1.0, 2.0, 99.0], 3, ROW, id="three, however long it took"),
        pytest.param(1, [60.0, 70.0, 80.0, 90.0, 100.0], 3, WITHIN, id="five within a minute, some worked in between"),
        pytest.param(1, [60.0, 70.0, 80.0, 100.0], 3, "", id="four within a minute"),
        pytest.param(1, [40.0, 70.0, 80.0, 90.0, 100.0], 3, "", id="the first is a minute ago"),
        pytest.param(1, [1.0, 2.0, 60.0, 70.0, 80.0, 90.0, 100.0], 3, WITHIN, id="older ones count for nothing"),
        pytest.param(4, [60.0, 70.0, 80.0, 90.0, 100.0], None, WITHIN, id="only the window counts"),
    ],
)  # fmt: skip
def test_too_many(row: int, times: list[float], most: int | None, said: str, monkeypatch) -> None:
    """The last failure of these, with so many in a row."""
    pool = built()
    monkeypatch.setattr(pools, "WINDOW", (5, 60.0))
    with dask.config.set({"ferro.elastic.failures": most}):
        for at in times[:-1]:
            pool.failures = 0  # a job in between had its worker
            assert not pool.fail("job 1: FAILED", at)
        pool.failures = row - 1
        assert pool.fail("job 2: FAILED", times[-1]) == bool(said)
    assert pool.closed == (f"{said}; the last, job 2: FAILED" if said else "")


def test_what_fails_now_and_then_closes_its_pool_and_says_so(monkeypatch) -> None:
    """Every other job works: never two failures in a row."""
    pool, closed = built(), []
    monkeypatch.setattr(pools, "WINDOW", (4, 120.0))
    for n in range(12):
        pool.failures = 0  # a job in between had its worker
        if pool.fail(f"job {n}: FAILED", 10.0 * n):
            closed.append((10.0 * n, pool.closed))
    assert closed[0] == (30.0, "4 jobs ended before a worker came within 30 s; the last, job 3: FAILED")
    assert len(closed) == 2  # it was open again at 60, and those from before count no more
    assert closed[1] == (90.0, "4 jobs ended before a worker came within 30 s; the last, job 9: FAILED")


def test_a_cluster_is_refused_whose_configuration_has_no_limit_of_failures() -> None:
    with (
        dask.config.set({"ferro.elastic.failures": 0}),
        pytest.raises(ff.ConfigError, match=r"ferro\.elastic\.failures: got .*, wanted"),
    ):
        ff.SLURMCluster(**SHAPE)


def test_a_pool_that_is_paused_says_so_until_it_is_resumed_and_then_is_open_whatever_closed_it() -> None:
    pool = built()
    for n in range(3):
        pool.fail(f"job {n}: FAILED", 10.0)
    pool.pause(20.0)
    said = pool.pool(21.0, "")
    assert (said.is_paused, said.closed_until) == (True, 0.0)
    assert "cluster.pools.resume('cpu') goes on with it; 3 jobs ended before a worker came" in said.closed
    pool.resume()
    assert (pool.pool(22.0, "").closed, pool.pool(22.0, "").is_paused) == ("", False)
    assert [pool.fail("job 4: FAILED", 23.0) for _ in range(3)] == [False, False, True]
