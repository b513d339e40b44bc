"""Which failures of jobs close a pool: a table over a pure function, and a pool that has some."""

from __future__ import annotations

from math import inf

import dask
import pytest

import dask_ferro as ff
from dask_ferro.runtime.pools.failures import FailureLimits, limits, recent, too_many
from tests.runtime.pools.test_pool import built

L = FailureLimits(row=3, window=5, seconds=60.0)
SAID = "5 jobs ended before a worker came within 40 s"


@pytest.mark.parametrize(
    ("row", "times", "limit", "said"),
    [
        pytest.param(0, [], L, "", id="none"),
        pytest.param(2, [98.0, 99.0], L, "", id="two in a row"),
        pytest.param(3, [1.0, 2.0, 99.0], L, "3 jobs ended before a worker came", id="three, however long it took"),
        pytest.param(1, [60.0, 70.0, 80.0, 90.0, 100.0], L, SAID, id="five within a minute, some worked in between"),
        pytest.param(1, [60.0, 70.0, 80.0, 100.0], L, "", id="four within a minute"),
        pytest.param(1, [40.0, 70.0, 80.0, 90.0, 100.0], L, "", id="the first is a minute ago"),
        pytest.param(1, [1.0, 2.0, 60.0, 70.0, 80.0, 90.0, 100.0], L, SAID, id="older ones count for nothing"),
        pytest.param(9, [100.0] * 9, L._replace(row=inf, window=inf), "", id="neither is counted"),
        pytest.param(4, [60.0, 70.0, 80.0, 90.0, 100.0], L._replace(row=inf), SAID, id="only the window counts"),
        pytest.param(2, [100.0] * 9, L._replace(window=inf), "", id="only those in a row count"),
        pytest.param(1, [100.0] * 9, L._replace(seconds=0.0), "", id="a window of no time has none"),
    ],
)  # fmt: skip
def test_too_many(row: int, times: list[float], limit: FailureLimits, said: str) -> None:
    assert too_many(row, times, 100.0, limit) == said


def test_no_more_are_remembered_than_may_matter() -> None:
    assert recent([float(n) for n in range(100)], 100.0, L) == [95.0, 96.0, 97.0, 98.0, 99.0]


def test_what_fails_now_and_then_closes_its_pool_and_says_so() -> None:
    """Every other job works: never two failures in a row."""
    pool, closed = built(), []
    with dask.config.set({"ferro.elastic.failures-in-window": 4, "ferro.elastic.failures-window": "2m"}):
        for n in range(12):
            pool.failures = 0  # a job in between had its worker
            if pool.fail(f"job {n}: FAILED", 10.0 * n):
                closed.append((10.0 * n, pool.closed))
    assert closed[0] == (30.0, "4 jobs ended before a worker came within 30 s; the last, job 3: FAILED")
    assert len(closed) == 2  # it was open again at 60, and those from before count no more
    assert closed[1] == (90.0, "4 jobs ended before a worker came within 30 s; the last, job 9: FAILED")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, FailureLimits(3, 20, 600.0)),
        ({"failures": None, "failures-in-window": "none", "failures-window": "1h"}, FailureLimits(inf, inf, 3600.0)),
        ({"failures": 1, "failures-in-window": 7, "failures-window": 30}, FailureLimits(1, 7, 30.0)),
    ],
)  # fmt: skip
def test_limits_are_the_configurations(settings: dict, wanted: FailureLimits) -> None:
    with dask.config.set({f"ferro.elastic.{key}": value for key, value in settings.items()}):
        assert limits() == wanted


@pytest.mark.parametrize(
    ("key", "value"), [("failures", 0), ("failures-in-window", -3), ("failures-window", "x")]
)
def test_what_is_no_limit_is_refused_by_its_key(key: str, value: object) -> None:
    with (
        dask.config.set({f"ferro.elastic.{key}": value}),
        pytest.raises(ff.ConfigError, match=rf"ferro\.elastic\.{key}: got .*, wanted"),
    ):
        limits()


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
