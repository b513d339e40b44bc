"""Jobs that end together, where the maximum or the queue has no room for their successors: one after the other."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from dask_ferro.policy.scaling.early_exit import due_jobs
from dask_ferro.policy.scaling.facts import (
    BOOTING,
    LEAVING,
    PENDING,
    RUNNING,
    Job,
    ScalingFacts,
)
from dask_ferro.policy.scaling.fleet import Fleet
from tests.policy.scaling.test_step import NOW, ONE, Drain, P, Site, asked, decide, gone, work

GB = 10**9
# A successor takes 2 s to come, and a task takes 8 s.
POOL = ONE._replace(lifetime=3600.0, queue_wait=1.0, start_up=1.0)
TASKS = work((80, 100), longest=8)


def there(*ends: float, state: str = RUNNING, first: int = 0, **facts: Any) -> list[Job]:
    """Jobs that hold 1 MB each and can take 1 GB."""
    facts = {"nbytes": 10**6, "unique": 10**6, "free": GB, "threads": 1, **facts}
    return [
        Job(f"j{n}", "cpu", state, age=1.0, order=n, ends_in=end, **facts)
        for n, end in enumerate(ends, first)
    ]


def goes(jobs: list[Job], maximum: float = 4, pool_maximum: float = inf, **pool: Any) -> list[str]:
    staff = ScalingFacts(NOW, (POOL._replace(maximum=pool_maximum, **pool),), tuple(jobs), (TASKS,))
    return [job.name for job in due_jobs(Fleet(staff, replace(P, maximum=maximum)))]


@pytest.mark.parametrize(
    ("jobs", "rest", "names"),
    [
        pytest.param(there(*[41.0] * 4), {}, [], id="no worker while there is time for a turn each"),
        pytest.param(there(*[40.0] * 4), {}, ["j0"], id="the first when there is just that"),
        pytest.param(there(40.0, 39.0, 40.0, 40.0), {}, ["j1"], id="who ends first"),
        pytest.param(there(*[20.0] * 4), {}, ["j0", "j1"], id="two at a time where it is late"),
        pytest.param(there(*[1.0] * 8), {"maximum": 8}, ["j0", "j1", "j2", "j3"], id="never more than half"),
        pytest.param(there(10.0, 20.0, 30.0, 40.0), {}, ["j0"], id="those that end one after the other: the next"),
        pytest.param(there(11.0, 21.0, 31.0, 41.0), {}, [], id="and not before its time"),
        pytest.param(there(*[40.0] * 4), {"maximum": 8}, [], id="no worker where there is room for successors"),
        pytest.param(there(*[20.0] * 4), {"maximum": 5}, ["j0"], id="fewer where there is room for some"),
        pytest.param(there(*[40.0] * 4), {"maximum": 8, "pool_maximum": 4}, ["j0"], id="a pool's own maximum"),
        pytest.param(there(*[30.0] * 3) + there(900.0, first=3), {}, [], id="nobody while who stays has the room"),
        pytest.param(
            there(*[30.0] * 3) + there(900.0, first=3, free=0), {}, ["j0"], id="somebody where who stays has none"
        ),
        pytest.param(there(*[40.0] * 4, nbytes=0, unique=0), {}, [], id="nobody where nothing would be lost"),
        pytest.param(there(*[40.0] * 4, unique=0), {}, ["j0"], id="copies on all that end are no copies"),
        pytest.param(there(*[inf] * 4), {}, [], id="nobody who has no end"),
        pytest.param(there(*[1.0] * 4), {"closed": "no account"}, [], id="nobody where no successor can come"),
        pytest.param(there(*[40.0] * 4), {"lifetime": 60.0}, [], id="nobody in the first half of its life"),
        pytest.param(there(*[25.0] * 4), {"lifetime": 60.0}, ["j0", "j1"], id="in the second, faster"),
        pytest.param(
            there(*[20.0] * 3) + there(inf, state=BOOTING, first=3, free=0), {}, [], id="nobody else while one boots"
        ),
        pytest.param(
            there(*[30.0] * 3) + there(30.0, state=LEAVING, first=3), {}, [], id="nobody else while one leaves"
        ),
        pytest.param(there(40.0, held=True) + there(*[40.0] * 3, first=1), {}, ["j1"], id="not who may not now"),
    ],
)  # fmt: skip
def test_who_goes_in_turn(jobs: list[Job], rest: dict[str, Any], names: list[str]) -> None:
    assert goes(jobs, **rest) == names


def test_somebody_goes_where_the_successor_waits_in_the_queue_for_too_long() -> None:
    """The partition is full: the successor starts when a worker has gone."""
    waits = Job("waits", "cpu", PENDING, order=9)
    full = there(*[21.0] * 3)
    assert goes([*full, waits._replace(age=0.5)]) == []
    assert goes([*full, waits._replace(age=30.0)]) == ["j0"]


@pytest.mark.parametrize("overdue", [0.0, -5.0, -10.0, -140.0])  # a lot to hand over comes before the end
def test_who_is_late_is_not_slow(overdue: float) -> None:
    assert len(goes(there(*[overdue] * 8), maximum=8)) == 4


def test_without_work_one_successor_comes_at_a_time_so_that_turns_are_taken_though_there_is_room() -> None:
    full = there(*[30.0] * 3, free=2 * 10**6)
    assert goes(full, maximum=9) == []
    staff = ScalingFacts(NOW, (POOL,), tuple(full), ())
    idle = replace(P, maximum=9)
    assert [
        job.name for job in due_jobs(Fleet(staff._replace(jobs=tuple(there(*[2.0] * 3, free=10**7))), idle))
    ] == ["j0"]


@pytest.mark.parametrize("change", [{"is_paused": True}, {"closed": "no account"}], ids=str)
def test_a_pool_that_gets_no_more_jobs_hands_over_to_another(change: dict) -> None:
    closed = POOL._replace(**change)
    pools = [closed, POOL._replace(name="other", cost=9.0)]
    decision = decide(pools, there(*[20.0] * 2), TASKS, maximum=2)
    assert (gone(decision), asked(decision)) == (["j0"], {})
    alone = decide(pools, there(1.5), maximum=2)
    assert asked(alone) == {"other": 1}


def test_it_is_a_drain_and_says_why() -> None:
    decision = decide([POOL], there(*[40.0] * 4), TASKS, maximum=4)
    assert [a.why for a in decision.actions if isinstance(a, Drain)] == [
        "all would end before another could come"
    ]


class Lasting(Site):
    """A site whose jobs hold something from the moment that they run; each takes `leave` seconds to hand it over."""

    def tick(self, *demands: Any) -> None:
        self.jobs = [
            job._replace(nbytes=10, unique=10, free=GB, threads=1) if job.state == RUNNING else job
            for job in self.jobs
        ]
        super().tick(*demands)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize(("wait", "boot"), [(0.0, 2.0), (10.0, 5.0)])
@pytest.mark.parametrize("full", [False, True])
def test_somebody_is_always_there_and_nobody_beyond_the_maximum(
    count: int, wait: float, boot: float, full: bool
) -> None:
    """With lives that are long enough for a turn each, whatever makes successors wait: the maximum, or the queue."""
    life = 4 * count * (wait + boot + 11.0)
    pool = ONE._replace(lifetime=life, queue_wait=wait, start_up=boot)
    most = count + 2 if full else count
    site = Lasting([pool], replace(P, maximum=most), room=count, wait=wait, boot=boot, life=life, leave=3.0)
    runs: list[int] = []
    for _ in range(int(2 * life)):
        site.tick(work((8.0, 100), longest=8.0))
        assert len(site.jobs) <= most
        runs.append(sum(job.state == RUNNING for job in site.jobs))
    steady = runs[int(wait + boot + 3) :]
    assert min(steady) >= 1
    assert sum(steady) >= 0.7 * count * len(steady)  # a life costs one turn
