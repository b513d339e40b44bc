"""Pools that were paused or removed by their user: the jobs that are requested, and the workers that leave."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.policy.scaling.facts import (
    BOOTING,
    LEAVING,
    PAUSED,
    PENDING,
    REMOVED,
    RUNNING,
    Cancel,
    Decision,
    Demand,
    Drain,
    Job,
    Keep,
    Recall,
    ScalingFacts,
)
from dask_ferro.policy.scaling.step import ScalingParameters, ScalingState, step
from tests.policy.scaling.test_step import (
    CPU,
    GB,
    GPU,
    OLD,
    PARAMETERS,
    asked,
    decide,
    gone,
    jobs,
    named,
    staffs,
    work,
)

WORK = work((60.0, 40.0))
PAUSE, GO = GPU._replace(mode=PAUSED), GPU._replace(mode=REMOVED)
OF_GPU: dict[str, Any] = {"pool": "gpu", "threads": 1}
HOLDS = {"nbytes": GB, "unique": GB}
TWO = {"minimum": 2, "maximum": 2}


@pytest.mark.parametrize(
    ("pools", "there", "demands", "changes", "wanted", "leave"),
    [
        pytest.param([PAUSE], [], [WORK], {}, {}, [], id="paused: nothing for work"),
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
            [CPU, GO], jobs(RUNNING, BOOTING, PENDING, **OF_GPU), [], {}, {}, ["j0", "j1", "j2"],
            id="removed: all of its jobs go, each in the way of its state",
        ),
        pytest.param([CPU, GO], jobs(RUNNING, **OF_GPU), [WORK], {"maximum": 1}, {}, ["j0"], id="busy ones too"),
        pytest.param(
            [CPU, GO], jobs(RUNNING, PENDING, **OF_GPU), [], TWO, {}, ["j0", "j1"],
            id="not replaced before they are gone",
        ),
        pytest.param(
            [CPU, GO], jobs(LEAVING, **OF_GPU), [], TWO, {"cpu": 1}, [], id="one is gone, one still there"
        ),
        pytest.param([CPU, GO._replace(lingering=1)], [], [], TWO, {"cpu": 1}, [], id="nobody confirmed its end"),
        pytest.param([CPU, GO], [], [], TWO, {"cpu": 2}, [], id="all are gone"),
        pytest.param(
            [CPU, GO], jobs(LEAVING, **OF_GPU), [WORK], {"maximum": 1}, {}, [], id="nobody of it is called back"
        ),
        pytest.param(
            [CPU, GO], jobs(RUNNING, RUNNING, **OF_GPU, **HOLDS), [], {"minimum": 2, "maximum": 3}, {"cpu": 1}, ["j0"],
            id="one job comes for what they hold, and one of them has room for the other's",
        ),
        pytest.param(
            [CPU, GO], jobs(RUNNING, RUNNING, **OF_GPU, **HOLDS), [], TWO | {"surge": 1}, {"cpu": 1}, ["j0"],
            id="beyond the maximum where that is allowed",
        ),
        pytest.param(
            [CPU, GO], [job._replace(free=0) for job in jobs(RUNNING, RUNNING, **OF_GPU, **HOLDS)], [], TWO, {}, [],
            id="else they stay, and say why",
        ),
        pytest.param(
            [CPU, GO], jobs(RUNNING, RUNNING, **OF_GPU, **HOLDS), [], TWO, {}, ["j0"],
            id="the first makes room for the new one, where the other can take its data",
        ),
        pytest.param(
            [CPU, GO], jobs(RUNNING, RUNNING, nbytes=GB, pool="gpu"), [], TWO, {}, ["j0"],
            id="copies on two of them are no copies: one after the other",
        ),
        pytest.param(
            [CPU, GO], jobs(RUNNING, **OF_GPU, **HOLDS) + jobs(BOOTING, first=1), [], TWO, {}, [],
            id="one that is on its way is waited for",
        ),
        pytest.param(
            [CPU, GO], jobs(RUNNING, RUNNING, **OF_GPU, **HOLDS) + jobs(RUNNING, first=2), [], TWO, {},
            ["j0", "j1"], id="it came: they go",
        ),
        pytest.param(
            [CPU._replace(closed="down"), GO], jobs(RUNNING, **OF_GPU, **HOLDS), [], TWO, {}, [],
            id="where nobody can be had, they stay",
        ),
        pytest.param(
            [CPU, GO], jobs(RUNNING, **OF_GPU, **HOLDS), [], {"maximum": 0, "ordered": True}, {}, ["j0"],
            id="an order that no worker stays ends them all the same",
        ),
        pytest.param(
            [CPU, GO], jobs(RUNNING, **OF_GPU, **HOLDS), [], {"maximum": 0}, {}, [], id="a bound does not"
        ),
        pytest.param(
            [CPU, GO], jobs(RUNNING, RUNNING, **OF_GPU, **HOLDS), [], TWO | {"ordered": True}, {}, ["j0"],
            id="an order is no other case",
        ),
        pytest.param(
            [CPU, GO], jobs(RUNNING, held=True, **OF_GPU), [], {}, {}, [], id="one that could not leave stays a while"
        ),
    ],
)  # fmt: skip
def test_of_pools_that_were_paused_or_removed(
    pools: list, there: list, demands: list, changes: dict, wanted: dict, leave: list
) -> None:
    decision = decide(pools, there, *demands, **changes)
    assert (asked(decision), sorted(gone(decision))) == (wanted, leave)
    assert named(decision, Recall) == []


@pytest.mark.parametrize(
    ("pools", "demands", "said"),
    [
        ([CPU, PAUSE], [], "no work; gpu is paused"),
        ([CPU, GO], [], "no work; gpu is being removed"),
        ([PAUSE], [Demand(((4.0, 2.0),))], "8 s of work for gpu, up to 2 wide, 4 s at least; gpu is paused"),
    ],
)
def test_says_so(pools: list, demands: list, said: str) -> None:
    assert decide(pools, [], *demands).why == said


def test_who_came_to_take_over_is_not_dismissed_before_it_has() -> None:
    """It has no work, and was asked for again when it was gone: a job every fourteen seconds, for ever."""
    stuck = [job._replace(free=0) for job in jobs(RUNNING, **OF_GPU, **HOLDS)]
    came = [Job("new", "cpu", RUNNING, order=9, idle_for=900.0, free=GB // 2, threads=4)]
    assert gone(decide([CPU, GO], [*stuck, *came], maximum=2)) == []
    assert asked(decide([CPU, GO], [*stuck, *came], maximum=3)) == {"cpu": 1}  # with it there is room


def test_nobody_is_asked_to_take_over_from_a_job_that_may_not_leave() -> None:
    actors = [job._replace(held=True, free=0) for job in jobs(RUNNING, **OF_GPU, **HOLDS)]
    assert asked(decide([CPU, GO], actors, maximum=2)) == {}


@pytest.mark.parametrize(
    ("pools", "there", "bounds"),
    [
        ([CPU._replace(processes=3), GO], jobs(RUNNING, **OF_GPU, **HOLDS), {"minimum": 3, "maximum": 3}),
        (
            [CPU._replace(processes=3)],
            [*jobs(RUNNING, RUNNING, RUNNING), *jobs(RUNNING, first=3, ends_in=1.0)],
            {"minimum": 12, "maximum": 12, "surge": 2},
        ),
    ],
)
def test_while_jobs_go_nothing_is_rounded_up(pools: list, there: list, bounds: dict) -> None:
    assert asked(decide(pools, there, **bounds)) == {}


def test_says_why_jobs_of_a_removed_pool_stay() -> None:
    decision = decide([CPU, GO], jobs(RUNNING, **OF_GPU, **HOLDS))
    (kept,) = (action for action in decision.actions if isinstance(action, Keep))
    assert kept == Keep(("j0",), "their pool was removed, but their unique data fits nowhere else")


@st.composite
def ruled(draw: st.DrawFn) -> ScalingFacts:
    """Facts of two pools, of which some are paused or removed."""
    staff = draw(staffs() | staffs(ends=True))
    modes = st.sampled_from(["", PAUSED, REMOVED])
    return staff._replace(pools=tuple(pool._replace(mode=draw(modes)) for pool in staff.pools))


@settings(deadline=None)
@given(ruled(), PARAMETERS)
def test_never_more_than_the_maximum_and_nothing_of_a_pool_that_is_not_open(
    staff: ScalingFacts, parameters: ScalingParameters
) -> None:
    decision, _ = step(staff, OLD, parameters)
    pools = {pool.name: pool for pool in staff.pools}
    assert all(not pools[name].mode for name in asked(decision))
    removed = [job for job in staff.jobs if pools[job.pool].mode == REMOVED]
    assert not {job.name for job in removed} & set(named(decision, Recall))

    there = sum(pools[job.pool].processes for job in staff.jobs)
    there += sum(pool.lingering * pool.processes for pool in staff.pools)
    new = sum(count * pools[name].processes for name, count in asked(decision).items())
    fixed = max(pool.processes for pool in staff.pools) - 1
    most = max(parameters.maximum, parameters.minimum + fixed)
    assert not new or there + new <= most + parameters.surge


@settings(deadline=None)
@given(ruled(), PARAMETERS)
def test_each_job_of_a_removed_pool_goes_or_it_is_said_why_not(
    staff: ScalingFacts, parameters: ScalingParameters
) -> None:
    decision, _ = step(staff, OLD, parameters)
    pools = {pool.name: pool for pool in staff.pools}
    stays = {
        job.name
        for job in staff.jobs
        if pools[job.pool].mode == REMOVED and job.state != LEAVING and not job.held
    }
    assert stays == stays & {*gone(decision), *named(decision, Keep)}


@pytest.mark.parametrize("bounds", [TWO, {"minimum": 0, "maximum": 2}], ids=["scale", "adapt"])
@pytest.mark.parametrize("held", [0, GB])
def test_step_by_step_all_jobs_are_others_and_nothing_was_lost(bounds: dict, held: int) -> None:
    """Two jobs of a pool that was removed; their data move to the workers that stay."""
    there = jobs(RUNNING, RUNNING, nbytes=held, unique=held, idle_for=0.0, **OF_GPU)
    state, most, data = ScalingState(), 0, held * len(there)
    for n in range(20):
        staff = ScalingFacts(1000.0 + n, (CPU, GO), tuple(there), (WORK,))
        decision, state = step(staff, state, ScalingParameters(**bounds))
        there = _after(there, decision, n)
        most = max(most, len(there))
        assert sum(job.unique for job in there) == data
    assert [job.pool for job in there] == ["cpu", "cpu"]
    assert most == 2


def _after(there: list[Job], decision: Decision, n: int) -> list[Job]:
    """The jobs a while later: those that were to leave have left, and those that were requested are there."""
    left = [job for job in there if job.name in named(decision, Drain) + named(decision, Cancel)]
    stay = [job for job in there if job not in left]
    moved = sum(job.unique for job in left)
    if moved:
        stay[-1] = stay[-1]._replace(unique=stay[-1].unique + moved, nbytes=stay[-1].nbytes + moved)
    for pool, count in asked(decision).items():
        fresh = jobs(*[RUNNING] * count, pool=pool, first=100 * (n + 1), threads=4)
        stay += fresh
    return stay
