"""Pools that were paused by their user: the jobs that are requested, and those that go on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.policy.scaling.facts import BOOTING, PENDING, RUNNING, Demand, ScalingFacts
from dask_ferro.policy.scaling.step import ScalingParameters, step
from tests.policy.scaling.test_step import (
    CPU,
    GPU,
    OLD,
    PARAMETERS,
    asked,
    decide,
    gone,
    jobs,
    staffs,
    work,
)

WORK = work((60.0, 40.0))
PAUSE = GPU._replace(is_paused=True)
OF_GPU: dict[str, Any] = {"pool": "gpu", "threads": 1}
TWO = {"minimum": 2, "maximum": 2}


@pytest.mark.parametrize(
    ("pools", "there", "demands", "changes", "wanted", "leave"),
    [
        pytest.param([PAUSE], [], [WORK], {}, {}, [], id="nothing for work"),
        pytest.param([PAUSE], [], [], TWO, {}, [], id="nor for an order"),
        pytest.param([PAUSE._replace(minimum=2)], [], [], {}, {}, [], id="nor for its own minimum"),
        pytest.param([CPU, PAUSE], [], [], TWO, {"cpu": 2}, [], id="another pool fills the order"),
        pytest.param(
            [PAUSE], jobs(RUNNING, PENDING, BOOTING, **OF_GPU), [WORK], {}, {}, [],
            id="those that there are go on, queued ones too",
        ),
        pytest.param(
            [PAUSE], jobs(RUNNING, ends_in=1.0, **OF_GPU), [WORK], {}, {}, ["j0"], id="no successor of it"
        ),
        pytest.param(
            [CPU, PAUSE._replace(lingering=1)], [], [], TWO, {"cpu": 1}, [], id="nobody confirmed the end of its job"
        ),
    ],
)  # fmt: skip
def test_of_pools_that_were_paused(
    pools: list, there: list, demands: list, changes: dict, wanted: dict, leave: list
) -> None:
    decision = decide(pools, there, *demands, **changes)
    assert (asked(decision), sorted(gone(decision))) == (wanted, leave)


@pytest.mark.parametrize(
    ("pools", "demands", "said"),
    [
        ([CPU, PAUSE], [], "no work; gpu is paused"),
        ([PAUSE], [Demand(((4.0, 2.0),))], "8 s of work for gpu, up to 2 wide, 4 s at least; gpu is paused"),
    ],
)
def test_says_so(pools: list, demands: list, said: str) -> None:
    assert decide(pools, [], *demands).why == said


def test_while_jobs_go_nothing_is_rounded_up() -> None:
    there = [*jobs(RUNNING, RUNNING, RUNNING), *jobs(RUNNING, first=3, ends_in=1.0)]
    assert asked(decide([CPU._replace(processes=3)], there, minimum=12, maximum=12, surge=2)) == {}


@st.composite
def ruled(draw: st.DrawFn) -> ScalingFacts:
    """Facts of two pools, of which some are paused."""
    staff = draw(staffs() | staffs(ends=True))
    return staff._replace(pools=tuple(pool._replace(is_paused=draw(st.booleans())) for pool in staff.pools))


@settings(deadline=None)
@given(ruled(), PARAMETERS)
def test_never_more_than_the_maximum_and_nothing_of_a_pool_that_is_not_open(
    staff: ScalingFacts, parameters: ScalingParameters
) -> None:
    decision = step(staff, parameters, OLD)
    pools = {pool.name: pool for pool in staff.pools}
    assert all(not pools[name].is_paused for name in asked(decision))

    there = sum(pools[job.pool].processes for job in staff.jobs)
    there += sum(pool.lingering * pool.processes for pool in staff.pools)
    new = sum(count * pools[name].processes for name, count in asked(decision).items())
    fixed = max(pool.processes for pool in staff.pools) - 1
    most = max(parameters.maximum, parameters.minimum + fixed)
    assert not new or there + new <= most + parameters.surge
