"""Pools that are paused or closed: what is said of them, and whether missing workers can come."""

from __future__ import annotations

from math import inf
from time import mktime
from typing import Any

import pytest

from dask_ferro.elastic.report import closed_text, in_rows, shortage
from dask_ferro.elastic.site_jobs import SiteJob
from dask_ferro.local.foreground import summary
from dask_ferro.policy.scaling.facts import Pool

CPU, GPU = Pool("cpu", processes=2), Pool("gpu", maximum=3)
PAUSED: dict[str, Any] = {"is_paused": True, "closed": "by its user"}
SHUT = {"closed": "no more", "closed_until": 99.0}


@pytest.mark.parametrize(
    ("missing", "jobs", "kinds", "said"),
    [
        pytest.param(0, {}, [CPU._replace(**PAUSED)], "", id="nobody is missing"),
        pytest.param(1, {}, [CPU._replace(**PAUSED)], "cpu is paused: by its user", id="the only pool is paused"),
        pytest.param(9, {}, [CPU._replace(**PAUSED), CPU], "", id="another one has room"),
        pytest.param(3, {}, [CPU._replace(**PAUSED), GPU], "", id="as much as is missing"),
        pytest.param(4, {}, [CPU._replace(**PAUSED), GPU], "cpu is paused: by its user", id="or less"),
        pytest.param(3, {"gpu": 1}, [CPU._replace(**PAUSED), GPU], "cpu is paused: by its user", id="beside its jobs"),
        pytest.param(3, {"gpu": 9}, [CPU._replace(**PAUSED), GPU], "cpu is paused: by its user", id="more than it may"),
        pytest.param(4, {}, [GPU, CPU._replace(maximum=0)], "", id="a maximum is no reason"),
        pytest.param(4, {}, [GPU._replace(closed="sbatch is busy")], "", id="trouble that passes is none"),
        pytest.param(
            inf, {}, [CPU._replace(**PAUSED), GPU._replace(is_paused=True, closed="x")],
            "cpu is paused: by its user\ngpu is paused: x", id="both",
        ),
    ],
)  # fmt: skip
def test_workers_cannot_come(missing: float, jobs: dict[str, int], kinds: list[Pool], said: str) -> None:
    assert shortage(missing, jobs, kinds) == said


def test_workers_cannot_come_where_pools_are_closed() -> None:
    assert shortage(1, {}, [CPU._replace(**SHUT)]).startswith("cpu is closed until ")
    assert shortage(2, {"cpu": 1}, [CPU._replace(**SHUT), CPU]) == ""


def test_everybody_says_that_a_pool_is_paused() -> None:
    words = Pool("gpu", maximum=4, closed="by its <user>", is_paused=True)
    assert in_rows((), (words,)) == [("pool gpu 0..4", "no jobs; paused: by its <user>")]
    assert closed_text([GPU._replace(**PAUSED)]) == "gpu is paused: by its user"
    shut = {"why": "by its user", "until": 0.0, "output": "", "paused": True}
    assert summary({"jobs": {}, "actions": [], "closed": {"gpu": shut, "cpu": shut | {"paused": False}}}) == (
        "no jobs; gpu is paused"
    )


def test_a_cluster_is_described_by_its_pools() -> None:
    states = [("pending", "Priority"), ("pending", "Priority"), ("running", ""), ("pending", "Resources")]
    jobs = [
        SiteJob(f"cpu-{n}", "cpu", state, (), 0.0, n, reason=reason)
        for n, (state, reason) in enumerate(states)
    ]
    noon = mktime((2026, 11, 23, 12, 30, 0, 0, 0, -1))
    shut = GPU._replace(closed="job 7: " + "x" * 200, closed_until=noon)
    assert in_rows(jobs, (CPU, shut), (2, inf)) == [
        ("bounds", "2.. workers"),
        ("pool cpu", "1 running, 3 pending (Priority, Resources)"),
        ("pool gpu 0..3", f"no jobs; closed until 12:30:00: job 7: {'x' * 113}..."),
    ]
