"""How many jobs there should be and which go, as tables of claims; what holds of any facts follows as properties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dask_ferro.policy.scaling import work_profile as profiles
from dask_ferro.policy.scaling.facts import (
    BOOTING,
    LEAVING,
    PENDING,
    RUNNING,
    Cancel,
    Decision,
    Demand,
    Drain,
    Job,
    Keep,
    Pool,
    ScalingFacts,
    Submit,
)
from dask_ferro.policy.scaling.fleet import Fleet
from dask_ferro.policy.scaling.step import ScalingParameters, step

GB = 10**9
P = ScalingParameters(notice=5.0)
CPU = Pool("cpu", threads=4, queue_wait=1.0, start_up=3.0)
ONE = Pool("cpu", threads=1, queue_wait=1.0, start_up=3.0)
GPU = Pool("gpu", threads=1, queue_wait=1.0, start_up=3.0, cost=4.0)
SPOT = Pool("spot", threads=4, queue_wait=1.0, start_up=3.0, cost=0.3)
NOW = 1000.0


def jobs(*states: str, pool: str = "cpu", first: int = 0, **facts: Any) -> list[Job]:
    """Jobs j0, j1, ... of those states."""
    return [
        Job(f"j{n}", pool, state, order=n, free=10 * GB, **facts) for n, state in enumerate(states, first)
    ]


def work(*entries: tuple[float, float], **facts: Any) -> Demand:
    return Demand(entries, **facts)


def decide(
    pools: list[Pool],
    there: list[Job],
    *demands: Demand,
    surplus: dict[str, float] | None = None,
    **changes: Any,
) -> Decision:
    staff = ScalingFacts(NOW, tuple(pools), tuple(there), demands)
    return step(staff, replace(P, **changes), surplus)


def asked(decision: Decision) -> dict[str, int]:
    return {action.pool: action.count for action in decision.actions if isinstance(action, Submit)}


def named(decision: Decision, kind: type) -> list[str]:
    return [name for action in decision.actions if isinstance(action, kind) for name in action.jobs]


def gone(decision: Decision) -> list[str]:
    return named(decision, Cancel) + named(decision, Drain)


# -- grow --------------------------------------------------------------------------------------------------

TINY = work((0.01, 5))  # not worth a job where any worker would do it


@pytest.mark.parametrize(
    ("there", "changes", "wanted"),
    [
        pytest.param(jobs(RUNNING), {}, {}, id="tiny tasks wait for who is there"),
        pytest.param(jobs(RUNNING, stalled=True), {}, {"cpu": 1}, id="who takes no tasks helps nobody: one more"),
        pytest.param(jobs(RUNNING, stalled=True) + jobs(PENDING, first=1), {}, {},
            id="the one that is on its way will do"),
        pytest.param(jobs(RUNNING, RUNNING, stalled=True), {"maximum": 2}, {}, id="they count toward the maximum"),
        pytest.param(jobs(RUNNING, stalled=True) + jobs(RUNNING, first=1), {}, {}, id="another one is there"),
    ],
)  # fmt: skip
def test_who_has_taken_no_tasks_for_a_while_does_no_work(there, changes, wanted):
    assert asked(decide([ONE], there, TINY, **changes)) == wanted


def test_who_takes_no_tasks_goes_when_idle_for_long_and_its_data_fits_elsewhere():
    full = jobs(RUNNING, stalled=True, idle_for=60.0, unique=1 * GB)
    others = jobs(RUNNING, first=1)
    assert named(decide([ONE], full + others, TINY), Drain) == ["j0"]
    assert gone(decide([ONE], full + [job._replace(free=0) for job in others], TINY)) == []


BURST = work((0.5, 300))  # 300 tasks of half a second


@pytest.mark.parametrize(
    ("pools", "there", "demands", "changes", "wanted"),
    [
        pytest.param([CPU], [], [], {}, {}, id="nothing for no work"),
        pytest.param([CPU], [], [BURST], {}, {"cpu": 8}, id="300 x 0.5 s on 4 threads: 8, not 30 as stock"),
        pytest.param(
            [CPU._replace(queue_wait=0, start_up=2)], [], [BURST], {}, {"cpu": 8}, id="8 with a quick start too"
        ),
        pytest.param([CPU], jobs(*[PENDING] * 8), [BURST], {}, {}, id="those on their way count as there"),
        pytest.param([CPU], jobs(*[BOOTING] * 5), [BURST], {}, {"cpu": 2}, id="booting ones too, and their work"),
        pytest.param([CPU], jobs(*[PENDING] * 7, LEAVING), [BURST], {}, {"cpu": 1}, id="leaving ones do not"),
        pytest.param([ONE], [], [work((20, 12))], {}, {"cpu": 12}, id="a job for each of 12 long tasks"),
        pytest.param([CPU], [], [work((20, 13))], {}, {"cpu": 4}, id="the last of 13 long tasks waits for none"),
        pytest.param([CPU], [], [work((0.1, 3))], {}, {"cpu": 1}, id="one job, however little there is to do"),
        pytest.param([CPU], [], [work((1000, 1))], {}, {"cpu": 1}, id="one job for one chain, however long"),
        pytest.param([ONE], [], [work((1, 1), (1, 40))], {}, {"cpu": 9}, id="few jobs for a peak that is over soon"),
        pytest.param(
            [ONE], jobs(RUNNING), [work((60, 1), (60, 40))], {}, {}, id="none for what comes later than a new job"
        ),
        pytest.param(
            [ONE], jobs(RUNNING), [work((4, 1), (60, 40))], {}, {"cpu": 39}, id="in time for what comes with it"
        ),
        pytest.param(
            [CPU._replace(queue_wait=600)], jobs(*[RUNNING] * 8), [work((60, 300))], {}, {},
            id="none for what is done before it comes",
        ),
        pytest.param([CPU], [], [BURST], {"efficiency": 0.9}, {"cpu": 2}, id="efficiency buys node-seconds"),
        pytest.param([CPU], [], [BURST], {"worth": 1.0, "efficiency": 0.2}, {"cpu": 38}, id="or speed"),
        pytest.param(
            [CPU], [], [work((0.5, 150)), work((0.5, 150))], {}, {"cpu": 8}, id="demands on the same pools add up"
        ),
        pytest.param([CPU], [], [BURST], {"maximum": 5}, {"cpu": 5}, id="up to the maximum"),
        pytest.param(
            [CPU._replace(processes=2)], [], [BURST], {"maximum": 5}, {"cpu": 2}, id="of whole jobs, rounded down"
        ),
        pytest.param([CPU._replace(maximum=3)], [], [BURST], {}, {"cpu": 3}, id="up to the pool's maximum"),
        pytest.param(
            [CPU._replace(lingering=2)], jobs(RUNNING), [BURST], {"maximum": 5}, {"cpu": 2},
            id="jobs whose end is not confirmed count as there",
        ),
        pytest.param([CPU._replace(maximum=3, lingering=2)], [], [BURST], {}, {"cpu": 1}, id="in their pool too"),
        pytest.param(
            [CPU._replace(lingering=2)], [], [], {"minimum": 4, "maximum": 4}, {"cpu": 2}, id="nor for the minimum"
        ),
        pytest.param(
            [CPU._replace(processes=2, lingering=1)], [], [], {"minimum": 2, "maximum": 3}, {},
            id="nor is it rounded up over the maximum beside them",
        ),
        pytest.param([CPU], jobs(PENDING), [BURST], {"max_pending": 3}, {"cpu": 2}, id="so many pending at a time"),
        pytest.param([CPU], [], [], {"minimum": 2}, {"cpu": 2}, id="to the minimum without work"),
        pytest.param(
            [CPU._replace(processes=2)], [], [], {"minimum": 3}, {"cpu": 2}, id="of whole jobs, rounded up"
        ),
        pytest.param(
            [CPU._replace(processes=2)], [], [], {"minimum": 3, "maximum": 3}, {"cpu": 2},
            id="at least what was asked for where whole jobs cannot give it",
        ),
        pytest.param([CPU._replace(minimum=2)], jobs(RUNNING), [], {}, {"cpu": 1}, id="to the pool's minimum"),
        pytest.param(
            [CPU, GPU._replace(minimum=1)], [], [], {"maximum": 0}, {}, id="the maximum is over a pool's minimum"
        ),
        pytest.param(
            [CPU, GPU._replace(processes=3, lingering=2)], [], [work((0.1, 1), pools=frozenset({"gpu"}))],
            {"minimum": 2, "maximum": 7}, {}, id="nothing in the place of work that waits for room",
        ),
        pytest.param([CPU._replace(closed="down")], [], [BURST], {"minimum": 1}, {}, id="nothing that is closed"),
        pytest.param([CPU], [], [work((5, 9), pools=frozenset({"tpu"}))], {}, {}, id="nothing that may not run it"),
    ],
)  # fmt: skip
def test_asks_for(pools: list, there: list, demands: list, changes: dict, wanted: dict) -> None:
    assert asked(decide(pools, there, *demands, **changes)) == wanted


PAUSE, TWO = GPU._replace(is_paused=True), {"minimum": 2, "maximum": 2}
ONLY_CPU, ONLY_GPU = {"pools": frozenset({"cpu"})}, {"pools": frozenset({"gpu"})}


@pytest.mark.parametrize(
    ("pools", "there", "demands", "changes", "wanted"),
    [
        pytest.param([CPU, GPU], [], [work((20, 8))], {}, {"cpu": 2}, id="the cheaper of two"),
        pytest.param(
            [CPU, GPU], [], [work((20, 8), speeds={"gpu": 40.0})], {}, {"gpu": 1}, id="the one that is worth its price"
        ),
        pytest.param([CPU, GPU], [], [work((20, 8), **ONLY_GPU)], {}, {"gpu": 8}, id="the one that may run it"),
        pytest.param(
            [CPU, GPU], [], [work((20, 8)), work((20, 2), **ONLY_GPU)], {}, {"cpu": 2, "gpu": 2}, id="each its own"
        ),
        pytest.param([CPU, SPOT], [], [work((20, 8))], {}, {"spot": 2}, id="spot, where it is cheap"),
        pytest.param(
            [CPU, SPOT._replace(queue_wait=600)], [], [work((20, 8))], {}, {"cpu": 2}, id="not where it comes too late"
        ),
        pytest.param(
            [CPU, SPOT._replace(maximum=1)], [], [work((20, 8))], {}, {"cpu": 1, "spot": 1},
            id="the next when one is full",
        ),
        pytest.param(
            [CPU, SPOT._replace(closed="no such account")], [], [work((20, 8))], {}, {"cpu": 2}, id="or closed"
        ),
        pytest.param(
            [CPU, SPOT], jobs(PENDING, pool="spot", age=300.0), [work((20, 8))], {}, {"cpu": 2},
            id="or its queue is stuck: what waits there counts for nothing that is done before it comes",
        ),
        pytest.param(
            [CPU, SPOT], jobs(PENDING, pool="spot", age=9.0), [work((20, 8))], {}, {"spot": 1},
            id="not while it may come about as soon",
        ),
        pytest.param(
            [CPU._replace(closed="down"), SPOT], jobs(*[PENDING] * 2, pool="spot", age=300.0), [work((20, 8))], {}, {},
            id="not where that is closed",
        ),
        pytest.param(
            [CPU, SPOT], jobs(PENDING, PENDING, pool="spot", age=300.0) + jobs(PENDING, PENDING, first=2),
            [work((20, 8))], {}, {}, id="not twice",
        ),
        pytest.param(
            [CPU, GPU], [], [work((20, 800), **ONLY_CPU), work((20, 80), **ONLY_GPU)], {"maximum": 4},
            {"cpu": 3, "gpu": 1}, id="one job of each kind before all of one",
        ),
        pytest.param([PAUSE], [], [work((60, 40))], {}, {}, id="none that is paused, for work"),
        pytest.param([PAUSE], [], [], TWO, {}, id="nor for an order"),
        pytest.param([PAUSE._replace(minimum=2)], [], [], {}, {}, id="nor for its own minimum"),
        pytest.param([CPU, PAUSE], [], [], TWO, {"cpu": 2}, id="another pool fills the order"),
        pytest.param(
            [PAUSE], jobs(RUNNING, ends_in=1.0, pool="gpu"), [work((60, 40))], {}, {}, id="no successor there"
        ),
        pytest.param(
            [CPU, PAUSE._replace(lingering=1)], [], [], TWO, {"cpu": 1}, id="nobody confirmed the end of its job"
        ),
    ],
)  # fmt: skip
def test_of_several_pools_grows(pools: list, there: list, demands: list, changes: dict, wanted: dict) -> None:
    assert asked(decide(pools, there, *demands, **changes)) == wanted


def test_jobs_of_a_paused_pool_go_on_queued_ones_too() -> None:
    decision = decide([PAUSE], jobs(RUNNING, PENDING, BOOTING, pool="gpu", threads=1), work((60, 40)))
    assert decision.actions == ()
    assert decision.why == "2.4e+03 s of work for gpu, up to 40 wide, 60 s at least; gpu is paused"


def test_while_jobs_go_nothing_is_rounded_up() -> None:
    there = [*jobs(RUNNING, RUNNING, RUNNING), *jobs(RUNNING, first=3, ends_in=1.0)]
    assert asked(decide([CPU._replace(processes=3)], there, minimum=12, maximum=12, surge=2)) == {}


@pytest.mark.parametrize(("minimum", "why"), [(1, "at least 1 worker"), (2, "at least 2 workers")])
def test_says_the_minimum_in_words(minimum: int, why: str) -> None:
    assert decide([CPU], [], minimum=minimum).actions == (Submit("cpu", minimum, why),)


def test_says_which_pool_is_closed_and_why() -> None:
    decision = decide([CPU, SPOT._replace(closed="no such account")], [], work((20, 8)))
    assert "spot is closed (no such account)" in decision.actions[0].why


def test_says_that_nobody_may_run_some_of_the_work() -> None:
    assert decide([CPU], [], work((20, 8), **ONLY_GPU)).why == "work that no pool may run"


# -- the end of a job --------------------------------------------------------------------------------------

HOUR = CPU._replace(lifetime=3600.0)
LONG = work((8, 40), longest=8)


def ending(seconds: float, pool: str = "cpu", **facts: Any) -> list[Job]:
    return [Job("end", pool, RUNNING, order=0, ends_in=seconds, free=GB, **facts)]


@pytest.mark.parametrize(
    ("pools", "there", "changes", "wanted"),
    [
        pytest.param([HOUR], ending(100), {}, {}, id="none while the job has long to live"),
        pytest.param([HOUR], ending(11), {}, {"cpu": 1}, id="one that comes before no task fits any more"),
        pytest.param(
            [HOUR._replace(queue_wait=90.0)], ending(100), {}, {"cpu": 1}, id="one that waits in the queue meanwhile"
        ),
        pytest.param([HOUR], ending(11) + jobs(PENDING, first=1), {}, {}, id="just one"),
        pytest.param(
            [HOUR._replace(lifetime=20.0)], ending(11), {}, {}, id="none in the first half of a short life"
        ),
        pytest.param([HOUR], ending(11), {"maximum": 1}, {}, id="none over the maximum"),
        pytest.param([HOUR._replace(maximum=1)], ending(11), {}, {}, id="none over the maximum of its pool"),
        pytest.param(
            [HOUR._replace(maximum=1)], ending(11), {"maximum": 1, "surge": 1}, {"cpu": 1},
            id="one that is over both for a while, where that is allowed",
        ),
        pytest.param(
            [HOUR._replace(lifetime=9.0)], ending(5.0), {"notice": 0.0}, {"cpu": 1}, id="one that comes before it ends"
        ),
        pytest.param(
            [HOUR._replace(lifetime=9.0)], ending(5.1), {"notice": 0.0}, {},
            id="none for a task that it had no time for either",
        ),
        pytest.param(
            [CPU], ending(11) + jobs(RUNNING, first=1, age=3.0, ends_in=5.5), {}, {},
            id="none for such a task where the pool does not tell its lifetime",
        ),
        pytest.param(
            [HOUR._replace(queue_wait=7200.0)], jobs(RUNNING, ends_in=3599.0), {}, {},
            id="none in the first half where the queue takes longer than a life",
        ),
        pytest.param(
            [HOUR], ending(11) + jobs(RUNNING, first=1, ends_in=11.0), {}, {}, id="none where two are there for one"
        ),
        pytest.param(
            [HOUR], ending(11) + jobs(LEAVING, first=1, ends_in=2.0, threads=4), {}, {},
            id="none beside one that leaves at its end",
        ),
    ],
)  # fmt: skip
def test_the_successor_is(pools: list, there: list, changes: dict, wanted: dict) -> None:
    assert (
        asked(decide(pools, there, work((8, 4), longest=8), **{"minimum": 1, "maximum": 2, **changes}))
        == wanted
    )


@pytest.mark.parametrize("told", [inf, 7200.0])
def test_a_task_that_no_job_has_the_time_for_is_no_reason_to_replace_jobs(told: float) -> None:
    site = Site(
        [ONE._replace(lifetime=told)], replace(P, maximum=1), room=1000, wait=1.0, boot=3.0, life=7200.0
    )
    for _ in range(4000):
        site.tick(work((10800, 1), longest=10800))
    assert site.count == 1


@pytest.mark.parametrize(
    ("maximum", "most", "count"),
    [
        pytest.param(8, 8, 8, id="beside it"),
        pytest.param(4, 4, 8, id="after it, where the maximum has no room"),
    ],
)
def test_where_the_queue_takes_longer_than_a_life_each_job_has_one_successor(
    maximum: int, most: int, count: int
) -> None:
    slow = HOUR._replace(queue_wait=7200.0, maximum=maximum)
    site = Site([slow], replace(P, maximum=maximum), room=1000, wait=60.0, boot=3.0, life=3600.0)
    seen = 0
    for _ in range(4000):
        site.tick(work((600, 16), longest=600))
        seen = max(seen, len(site.jobs))
    assert (seen, site.count) == (most, count)


@pytest.mark.parametrize(
    ("there", "demands", "leaves"),
    [
        pytest.param(ending(11) + jobs(RUNNING, first=1), [LONG], [], id="not while it runs a task"),
        pytest.param(ending(5) + jobs(RUNNING, first=1), [LONG], ["end"], id="at the last, whatever it runs"),
        pytest.param(
            ending(7, idle_for=1.0) + jobs(RUNNING, first=1), [LONG], ["end"], id="when idle and nothing fits"
        ),
        pytest.param(
            ending(7, idle_for=1.0) + jobs(RUNNING, BOOTING, first=1), [LONG], [], id="not before who comes for it"
        ),
        pytest.param(
            ending(10, idle_for=1.0) + jobs(RUNNING, first=1), [LONG], [], id="not while something still fits"
        ),
        pytest.param(
            [Job("end", "cpu", BOOTING, ends_in=2.0), *jobs(RUNNING, first=1)], [LONG], [], id="never while it boots"
        ),
    ],
)  # fmt: skip
def test_a_job_that_is_about_to_end_leaves(there: list, demands: list, leaves: list) -> None:
    decision = decide([HOUR], there, *demands, minimum=1, maximum=1)
    assert [name for name in gone(decision) if name == "end"] == leaves


def test_what_the_last_job_holds_gets_a_successor_and_moves_to_it() -> None:
    last = ending(4, nbytes=GB, unique=GB)
    alone = decide([HOUR], last)
    assert (asked(alone), named(alone, Keep), gone(alone)) == ({"cpu": 1}, ["end"], [])
    assert gone(decide([HOUR], last + jobs(RUNNING, first=1))) == ["end"]


# -- shrink ------------------------------------------------------------------------------------------------


def idle(name: str, order: int = 0, seconds: float = 60.0, **facts: Any) -> Job:
    return Job(name, "cpu", RUNNING, order=order, idle_for=seconds, **{"free": GB, **facts})


BUSY = Job("busy", "cpu", RUNNING, order=-1, free=GB)


@pytest.mark.parametrize(
    ("there", "demands", "changes", "leaves"),
    [
        pytest.param([idle("a"), idle("b", 1)], [], {}, ["b", "a"], id="idle long enough, the newest first"),
        pytest.param([idle("a", seconds=9.0)], [], {}, [], id="not before a new one could be back"),
        pytest.param([idle("a", seconds=9.0)], [], {"idle_timeout": 4.0}, ["a"], id="or as patience says"),
        pytest.param([BUSY], [], {}, [], id="never what is busy"),
        pytest.param(jobs(BOOTING, age=900.0), [], {}, [], id="never a booting one"),
        pytest.param([idle("a"), idle("b", 1)], [], {"minimum": 1}, ["b"], id="down to the minimum"),
        pytest.param([idle("a"), idle("b", 1)], [work((9, 5))], {}, [], id="not what the work could use"),
        pytest.param([idle("a"), idle("b", 1)], [work((9, 3))], {}, ["b"], id="what it could not"),
        pytest.param(
            [idle("a"), idle("b", 1)], [work((10, 1), (60, 8))], {}, [], id="not what it is about to use"
        ),
        pytest.param(
            [idle("a", nbytes=9, unique=9), idle("b", 1, nbytes=9)], [], {}, ["b"], id="not the last that holds data"
        ),
        pytest.param([idle("a", nbytes=9)], [], {}, [], id="not the only one, minimum 0 or not"),
        pytest.param(
            [BUSY, idle("a", unique=5), idle("b", 1, unique=7), idle("c", 2, unique=6)], [], {"minimum": 2}, ["a", "c"],
            id="least unique data first",
        ),
        pytest.param(
            [idle("a", ends_in=800.0), idle("b", 1, ends_in=900.0), idle("c", 2)], [], {"minimum": 2}, ["a"],
            id="then the nearest end",
        ),
        pytest.param(
            [BUSY, idle("a", unique=GB), idle("b", 1, unique=GB)], [], {}, ["b"], id="only what fits on those that stay"
        ),
        pytest.param(
            [idle("a"), idle("b", 1), idle("c", 2, held=True)], [], {"minimum": 2}, ["b"],
            id="the next best where one may not leave",
        ),
        pytest.param([idle("a", held=True)], [], {}, [], id="nobody where none may"),
        pytest.param([idle("a", ends_in=4.0, held=True), idle("b", 1)], [], {}, ["b"], id="not at its end either"),
    ],
)  # fmt: skip
def test_lets_go(there: list, demands: list, changes: dict, leaves: list) -> None:
    assert gone(decide([CPU], there, *demands, **changes)) == leaves


def test_a_shrink_that_does_not_fit_says_so() -> None:
    decision = decide([CPU], [BUSY, idle("a", unique=2 * GB)])
    assert decision.actions == (
        Keep(
            ("a",),
            "nothing to do for longer than a new job would take to come, but their unique data fits nowhere else",
        ),
    )


def test_what_earlier_leavers_hand_over_takes_its_room() -> None:
    leaving = Job("left", "cpu", LEAVING, unique=GB)
    assert gone(decide([CPU], [BUSY, leaving, idle("a", unique=1)])) == []
    assert gone(decide([CPU], [BUSY, idle("a", unique=1)])) == ["a"]


@pytest.mark.parametrize(
    ("there", "bounds", "leaves"),
    [
        pytest.param(jobs(*[RUNNING] * 4), (1, 1), ["j3", "j2", "j1"], id="busy ones too, the newest first"),
        pytest.param([BUSY, idle("a", seconds=0.1)], (1, 1), ["a"], id="the idle before the busy, at once"),
        pytest.param(jobs(RUNNING, PENDING, PENDING), (1, 2), ["j2"], id="pending ones before all, the newest first"),
        pytest.param(jobs(RUNNING, BOOTING), (1, 1), ["j0"], id="not a booting one"),
        pytest.param(jobs(RUNNING, BOOTING, PENDING), (0, 0), ["j2", "j0", "j1"], id="a booting one for none"),
        pytest.param(jobs(*[BOOTING] * 3), (1, 1), ["j2", "j1"], id="booting ones where there are no others"),
        pytest.param(
            [BUSY._replace(held=True), *jobs(BOOTING)], (1, 1), [], id="not the booting one that is to take over"
        ),
        pytest.param(jobs(RUNNING, RUNNING), (0, 0), ["j1", "j0"], id="all, where nothing is held"),
        pytest.param(
            [BUSY._replace(nbytes=1), idle("a", nbytes=1, unique=1)], (0, 0), ["a"], id="all but the holder of the data"
        ),
        pytest.param(
            [BUSY, idle("a", held=True), idle("b", 1)], (1, 1), ["b", "busy"], id="a busy one for one that may not"
        ),
    ],
)  # fmt: skip
def test_fixed_bounds_drain(there: list, bounds: tuple, leaves: list) -> None:
    decision = decide([CPU], there, BURST, minimum=bounds[0], maximum=bounds[1])
    assert gone(decision) == leaves
    assert asked(decision) == {}


@pytest.mark.parametrize(
    ("there", "bound", "leaves"),
    [
        pytest.param([BUSY._replace(nbytes=1), idle("a", nbytes=1, unique=1)], 0, ["a", "busy"], id="the last holder"),
        pytest.param([idle("a", unique=2 * GB), idle("b", 1)], 1, ["b"], id="who holds least alone"),
        pytest.param([BUSY, idle("a", unique=2 * GB)], 1, ["a"], id="what it holds may fit nowhere"),
        pytest.param([BUSY, idle("a", held=True)], 1, ["a"], id="one that was refused a moment ago"),
        pytest.param(jobs(RUNNING, BOOTING, PENDING), 1, ["j2", "j1"], id="a booting one before one that runs"),
        pytest.param(jobs(RUNNING, BOOTING, PENDING), 0, ["j2", "j1", "j0"], id="all"),
    ],
)  # fmt: skip
def test_an_order_is_obeyed_whatever_is_held(there: list, bound: int, leaves: list) -> None:
    """Those that run drain on an order, which is bounded in time; without one, some of them would stay."""
    decision = decide([CPU], there, BURST, minimum=bound, maximum=bound, ordered=True)
    assert gone(decision) == leaves
    assert all(action.ordered for action in decision.actions if isinstance(action, Drain))
    assert asked(decision) == {}


def test_the_only_job_for_some_work_goes_on_an_order() -> None:
    fours = GPU._replace(processes=4)
    there = jobs(RUNNING, pool="gpu")
    only = work((1.0, 1), **ONLY_GPU)
    assert gone(decide([CPU, fours], there, only, minimum=1, maximum=1)) == []
    assert gone(decide([CPU, fours], there, only, minimum=0, maximum=0, ordered=True)) == ["j0"]


def test_whole_jobs_go_and_never_more_than_the_minimum_allows() -> None:
    pairs = CPU._replace(processes=2)
    there = jobs(*[RUNNING] * 4)
    assert gone(decide([pairs], there, minimum=3, maximum=3)) == ["j3", "j2"]
    assert gone(decide([pairs], there[:2], minimum=3, maximum=3)) == []


FOUR = [Job(f"l{n}", "cpu", LEAVING, order=n, free=GB, threads=4) for n in range(4)]


def test_those_that_leave_and_hold_their_nodes_leave_no_room_for_others() -> None:
    only_gpu = work((20, 8), **ONLY_GPU)
    assert asked(decide([CPU, GPU], FOUR, only_gpu, maximum=4)) == {}
    assert asked(decide([CPU, GPU], FOUR[:3], only_gpu, maximum=4)) == {"gpu": 1}
    near = [job._replace(ends_in=4.0) for job in FOUR]
    assert asked(decide([CPU, GPU], near, only_gpu, maximum=4)) == {}  # they are there until they are gone


def test_an_idle_job_within_the_minimum_makes_room_for_work_that_nobody_else_may_run() -> None:
    """It is not called back before the other job came, and the minimum holds for the rest."""
    site = Site([CPU, GPU], replace(P, minimum=2, maximum=2), room=9, wait=1.0, boot=1.0, leave=3.0)
    site.jobs = [idle("a", seconds=0.1, threads=4), idle("b", 1, seconds=0.1, threads=4)]
    for _ in range(30):
        site.tick(work((20, 2), **ONLY_GPU))
    assert site.kinds() == ["Drain", "Submit"]
    assert sorted((job.pool, job.state) for job in site.jobs) == [("cpu", RUNNING), ("gpu", RUNNING)]


# -- hysteresis --------------------------------------------------------------------------------------------


def test_pending_jobs_stay_while_they_could_do_something_and_a_while_longer() -> None:
    there, surplus = jobs(*[PENDING] * 3), {}
    for at, demands, leaves in [
        (0, (work((1, 9)),), []),
        (1, (), []),
        (10.9, (), []),
        (11, (work((1, 5)),), ["j2"]),  # two of them are of use again
        (12, (work((1, 5)),), []),
    ]:
        decision = step(ScalingFacts(at, (CPU,), tuple(there), demands), P, surplus)
        surplus = decision.surplus
        assert gone(decision) == leaves
        there = [job for job in there if job.name not in leaves]


def test_the_oldest_pending_job_is_the_last_to_be_cancelled() -> None:
    there = [job._replace(order=order) for job, order in zip(jobs(*[PENDING] * 3), (7, 2, 5), strict=True)]
    surplus = {"cpu": NOW - 100}
    assert gone(decide([CPU], there, work((1, 4)), surplus=surplus)) == ["j0", "j2"]


class Site:
    """A toy batch system: of each pool it starts `room` jobs at most, each `wait` seconds after it was asked for.

    A job ends `life` seconds after its start, and takes `leave` seconds to leave.
    """

    def __init__(
        self,
        pools: list[Pool],
        parameters: ScalingParameters,
        room: int,
        wait: float,
        boot: float,
        life: float = inf,
        leave: float = 0.0,
    ) -> None:
        self.life, self.leave = life, leave
        self.pools, self.parameters, self.room, self.wait, self.boot = pools, parameters, room, wait, boot
        self.full: set[str] = set()  # pools that start nothing for now
        self.now = 0.0
        self.surplus: dict[str, float] = {}
        self.jobs: list[Job] = []
        self.count = 0
        self.acted: list[tuple[float, str]] = []
        self.node_seconds = 0.0

    def tick(self, *demands: Demand) -> None:
        """One second, at whose end the policy is asked."""
        self.now += 1.0
        room = {p.name: (p.name not in self.full) * self.room - self.started(p.name) for p in self.pools}
        widths = [demand.profile[0][1] for demand in demands]
        found = []
        for job in self.jobs:
            job = job._replace(age=job.age + 1.0, ends_in=job.ends_in - 1.0)
            if job.ends_in <= 0 or (job.state == LEAVING and job.age >= self.leave):
                continue
            if job.state == PENDING and job.age >= self.wait and room[job.pool] > 0:
                room[job.pool] -= 1
                job = job._replace(state=BOOTING, age=0.0, ends_in=self.life)
            elif job.state == BOOTING and job.age >= self.boot:
                job = job._replace(state=RUNNING, age=0.0, threads=self.threads(job))
            if job.state == RUNNING:
                able = [
                    n for n, d in enumerate(demands) if widths[n] > 0 and job.pool in (d.pools or [job.pool])
                ]
                job = job._replace(idle_for=0.0 if able else job.idle_for + 1.0)
                if able:
                    widths[able[0]] -= self.threads(job)
            found.append(job)
        self.jobs = found
        self.node_seconds += sum(job.state != PENDING for job in self.jobs)
        staff = ScalingFacts(self.now, tuple(self.pools), tuple(self.jobs), demands)
        decision = step(staff, self.parameters, self.surplus)
        self.surplus = dict(decision.surplus)
        self.enact(decision)

    def started(self, pool: str) -> int:
        return sum(job.pool == pool and job.state != PENDING for job in self.jobs)

    def threads(self, job: Job) -> int:
        return next(pool.threads for pool in self.pools if pool.name == job.pool)

    def enact(self, decision: Decision) -> None:
        states = {job.name: job.state for job in self.jobs}
        assert all(states[name] == PENDING for name in named(decision, Cancel))
        assert all(states[name] == RUNNING for name in named(decision, Drain))
        drained = named(decision, Drain)
        if self.leave:
            self.jobs = [
                job._replace(state=LEAVING, age=0.0) if job.name in drained else job for job in self.jobs
            ]
        self.jobs = [job for job in self.jobs if job.state == LEAVING or job.name not in gone(decision)]
        for pool, count in asked(decision).items():
            self.jobs += [Job(f"n{n}", pool, PENDING, order=n) for n in range(self.count, self.count + count)]
            self.count += count
        self.acted += [(self.now, type(action).__name__) for action in decision.actions]

    def kinds(self) -> list[str]:
        """What was done, in order."""
        return [kind for _, kind in self.acted]

    def run(self, profile: profiles.Profile, ticks: int) -> float | None:
        """Let the work run; returns the second in which it was done."""
        for _ in range(ticks):
            self.tick(Demand(tuple(profile)))
            threads = sum(job.threads for job in self.jobs if job.state == RUNNING)
            profile = profiles.advance(profile, [(0.0, inf, threads)], 1.0)
            if not profile:
                return self.now
        return None


def test_bursts_six_seconds_apart_are_one_growth() -> None:
    site = Site([ONE], P, room=6, wait=1.0, boot=3.0)
    for _ in range(8):
        assert site.run([(1.0, 24.0)], 60) is not None
        for _ in range(6):
            site.tick()
    assert site.kinds() == ["Submit"]
    for _ in range(30):
        site.tick()
    assert site.jobs == []
    assert site.kinds() == ["Submit", "Drain"]


def test_a_full_cluster_neither_flaps_nor_loses_its_place() -> None:
    site = Site([ONE], replace(P, maximum=12), room=4, wait=1.0, boot=3.0)
    assert site.run([(5.0, 48.0)], 200) is not None
    assert site.kinds() == ["Submit"]
    assert sum(job.state == PENDING for job in site.jobs) == 8
    for _ in range(20):
        site.tick()
    assert site.kinds() == ["Submit", "Cancel", "Drain"]


def stuck(*full: str) -> Site:
    """Two minutes of work for two jobs, on a site some of whose queues do not move; the cheaper pool is "spot"."""
    site = Site([CPU, SPOT], P, room=9, wait=1.0, boot=3.0)
    site.full = set(full)
    for _ in range(120):
        site.tick(work((20, 8)))
    return site


def counts(site: Site) -> Counter:
    return Counter((job.pool, job.state) for job in site.jobs)


def test_work_whose_queue_is_stuck_goes_to_another_pool_and_its_jobs_are_then_cancelled() -> None:
    site = stuck("spot")
    assert site.kinds() == ["Submit", "Submit", "Cancel"]
    assert counts(site) == {("cpu", RUNNING): 2}


def test_where_two_queues_are_stuck_both_places_are_kept_until_one_moves() -> None:
    for moves, stays in (("cpu", "spot"), ("spot", "cpu")):
        site = stuck("cpu", "spot")
        for _ in range(300):
            site.tick(work((20, 8)))
        assert site.kinds() == ["Submit", "Submit"]
        assert counts(site) == {("cpu", PENDING): 2, ("spot", PENDING): 2}
        site.full = {stays}
        for _ in range(60):
            site.tick(work((20, 8)))
        assert site.kinds() == ["Submit", "Submit", "Cancel"]
        assert counts(site) == {(moves, RUNNING): 2}


def test_work_is_done_at_the_efficiency_that_was_asked_for() -> None:
    seconds, spent = {}, {}
    for efficiency in (0.9, 0.6, 0.3):
        slow = ONE._replace(start_up=60.0)
        site = Site([slow], replace(P, efficiency=efficiency, worth=0.0), room=10**6, wait=1.0, boot=60.0)
        seconds[efficiency] = site.run([(2.0, 1000.0)], 2000)
        spent[efficiency] = 2000.0 / site.node_seconds
    assert seconds[0.9] > seconds[0.6] > seconds[0.3]
    # To a decimal: the toy cluster moves in whole seconds.
    assert [round(spent[e], 1) for e in (0.9, 0.6, 0.3)] == [0.9, 0.6, 0.3]


# -- of any facts ------------------------------------------------------------------------------------------

SECONDS = st.sampled_from([0.0, 0.1, 1.0, 8.0, 300.0])
PROFILES = st.lists(
    st.tuples(st.sampled_from([0.1, 0.5, 2.0, 20.0]), st.sampled_from([0.0, 1.0, 3.0, 12.0, 100.0])),
    max_size=5,
)
POOLS = st.tuples(
    st.sampled_from([1, 4]), st.sampled_from([1, 2, 3]), st.just(0), SECONDS, st.sampled_from([0.0, 1.0, 3.0])
).map(lambda facts: Pool("cpu", *facts))
STATES = st.sampled_from([PENDING, BOOTING, RUNNING, LEAVING])


@st.composite
def staffs(draw: st.DrawFn, ends: bool = False) -> ScalingFacts:
    """Facts of two pools and of work for both, either, or none of them."""
    lingering, is_paused = draw(st.sampled_from([0, 0, 2])), draw(st.sampled_from([False, False, True]))
    gpu = draw(POOLS)._replace(name="gpu", cost=4.0, lingering=lingering, is_paused=is_paused)
    pools = (draw(POOLS), gpu)
    there = [
        Job(
            f"j{n}", (pool := draw(st.sampled_from(["cpu", "gpu"]))), draw(STATES), draw(SECONDS), n, draw(SECONDS),
            draw(st.sampled_from([3.0, 20.0, inf])) if ends else inf,
            nbytes := draw(st.sampled_from([0, 10])), nbytes,
            draw(st.sampled_from([0, 15, 1000])),
            draw(st.booleans()) * pools[pool != "cpu"].threads,
            draw(st.sampled_from([False, False, True])),
        )
        for n in range(draw(st.integers(0, 9)))
    ]  # fmt: skip
    able = st.sampled_from([None, frozenset({"gpu"}), frozenset({"cpu"}), frozenset({"tpu"})])
    demand = st.tuples(PROFILES.map(tuple), able, st.just({}), SECONDS).map(lambda facts: Demand(*facts))
    demands = draw(st.lists(demand, max_size=3))
    return ScalingFacts(NOW, pools, tuple(there), tuple(demands))


PARAMETERS = st.builds(
    lambda low, more, **rest: ScalingParameters(minimum=low, maximum=low + more, **rest),
    st.integers(0, 6),
    st.sampled_from([0, 1, 5, inf]),
    efficiency=st.sampled_from([0.2, 0.6, 1.0]),
    worth=st.sampled_from([0.0, 5.0]),
    max_pending=st.sampled_from([inf, inf, 2]),
    surge=st.sampled_from([0, 0, 1, 4]),
)
untimed = settings(deadline=None)
OLD = {"cpu": 0.0, "gpu": 0.0}


@untimed
@given(staffs() | staffs(ends=True), PARAMETERS)
def test_stays_within_the_bounds(staff: ScalingFacts, parameters: ScalingParameters) -> None:
    """Those that leave and those about to end count for the maximum, and not for the minimum."""
    decision = step(staff, parameters, OLD)
    fleet = Fleet(staff, parameters)
    processes = {pool.name: pool.processes for pool in staff.pools}

    def workers_of(some: Iterable[Job]) -> int:
        return sum(processes[job.pool] for job in some)

    spent = {job.name for job in fleet.spent}
    lingering = sum(pool.lingering * pool.processes for pool in staff.pools)
    every = workers_of(staff.jobs) + lingering
    held = lingering + workers_of(fleet.leaving)
    counts = [job for job in staff.jobs if job.state != LEAVING]
    before = workers_of(job for job in counts if job.name not in spent)
    after = workers_of(job for job in counts if job.name not in spent and job.name not in gone(decision))
    new = sum(count * processes[pool] for pool, count in asked(decision).items())
    fixed = max(processes.values()) - 1  # what rounding to whole jobs may add to the minimum
    most = max(parameters.maximum, parameters.minimum + fixed)
    assert (
        not new
        or every + new <= parameters.maximum + parameters.surge
        or (not fleet.aside() and every + new <= most + parameters.surge)
    )
    assert after + new <= max(parameters.maximum, before, parameters.minimum + fixed)
    paused = {pool.name for pool in staff.pools if pool.is_paused}
    assert not paused & asked(decision).keys()
    # One goes, another comes next: those that stay for the maximum may be of no use.
    excess = {name for action in decision.actions if action.why.startswith("at most") for name in action.jobs}
    rest = Fleet(staff._replace(jobs=tuple(j for j in staff.jobs if j.name not in excess)), parameters)
    swaps = any(map(rest.starves, rest.works))
    assert swaps or after + new >= min(parameters.minimum, before)
    if parameters.max_pending == inf and not swaps:
        assert after + new >= min(
            parameters.minimum, parameters.maximum - held - workers_of(fleet.spent) - fixed
        )
    if before > parameters.maximum:
        assert asked(decision) == {}
        stuck = [
            job for job in staff.jobs if job.state == BOOTING or job.held or job.name in named(decision, Keep)
        ]
        assert after <= parameters.maximum + fixed or stuck


@untimed
@given(staffs(ends=True), PARAMETERS)
def test_only_whole_jobs_go_and_each_in_the_way_of_its_state(
    staff: ScalingFacts, parameters: ScalingParameters
) -> None:
    decision = step(staff, parameters, OLD)
    states = {job.name: job.state for job in staff.jobs}
    assert {states[name] for name in named(decision, Cancel)} <= {PENDING}
    excess = Fleet(staff, parameters).workers() > parameters.maximum  # for which alone a booting one goes
    assert {states[name] for name in named(decision, Drain)} <= ({RUNNING, BOOTING} if excess else {RUNNING})
    assert {states[name] for name in named(decision, Keep)} <= ({RUNNING, BOOTING} if excess else {RUNNING})
    assert not any(job.held for job in staff.jobs if job.name in named(decision, Drain))
    assert max(Counter(gone(decision)).values(), default=1) == 1
    assert all(count >= 1 for count in asked(decision).values())
    assert all(count >= 0 for count in decision.wanted.values())


@untimed
@given(staffs(ends=True), PARAMETERS)
def test_what_leavers_hold_fits_on_those_that_stay(
    staff: ScalingFacts, parameters: ScalingParameters
) -> None:
    decision = step(staff, parameters, OLD)
    left = named(decision, Drain)
    drained = [job for job in staff.jobs if job.name in left]
    stay = [job for job in staff.jobs if job.state == RUNNING and job.name not in left]
    assert sum(job.unique for job in drained) <= sum(job.free for job in stay)
    assert stay or not any(job.nbytes for job in drained)


@untimed
@given(staffs(), PARAMETERS)
def test_never_lets_go_what_the_work_could_use_now(
    staff: ScalingFacts, parameters: ScalingParameters
) -> None:
    decision = step(staff, parameters, OLD)
    pools = {pool.name: pool for pool in staff.pools}
    there = [job for job in staff.jobs if job.state != LEAVING]
    assume(sum(pools[job.pool].processes for job in there) <= parameters.maximum)
    for demand in staff.demands:
        able = [job for job in there if demand.profile and job.pool in (demand.pools or pools)]
        stay = [job for job in able if job.name not in gone(decision)]
        before, left = (sum(pools[job.pool].threads for job in some) for some in (able, stay))
        assert not able or left >= min(before, demand.profile[0][1])


@untimed
@given(
    PROFILES.filter(bool),
    POOLS,
    PARAMETERS,
    st.data(),
    st.sampled_from(["wider", "more after it", "another"]),
)
def test_more_work_never_wants_fewer_jobs(
    profile: list, pool: Pool, parameters: ScalingParameters, data: st.DataObject, how: str
) -> None:
    """Where something may run at any time: work that has to wait would come later, and be asked for later."""
    profile = [(seconds, max(width, 1.0)) for seconds, width in profile]
    at = data.draw(st.integers(0, len(profile) - 1))
    seconds, width = profile[at]
    more = [Demand(tuple(profile))]
    if how == "wider":
        more = [
            Demand(
                (
                    *profile[:at],
                    (seconds, width + data.draw(st.sampled_from([1.0, 50.0]))),
                    *profile[at + 1 :],
                )
            )
        ]
    elif how == "more after it":
        more = [Demand((*profile, *data.draw(PROFILES)))]
    else:
        more.append(Demand(((profiles.span(profile, inf), data.draw(st.sampled_from([1.0, 50.0]))),)))
    few, many = (
        step(ScalingFacts(NOW, (pool,), (), tuple(demands)), parameters).wanted["cpu"]
        for demands in ([Demand(tuple(profile))], more)
    )
    assert few <= many


@settings(max_examples=60, deadline=None)
@given(
    staffs(), PARAMETERS, st.integers(0, 8), SECONDS, st.sampled_from([0.0, 3.0]), st.sampled_from([0.0, 4.0])
)
def test_constant_work_does_not_make_it_flap(
    staff: ScalingFacts, parameters: ScalingParameters, room: int, wait: float, boot: float, leave: float
) -> None:
    """A hundred seconds of the same work: jobs are asked for, a few may go, and none is asked for after that.

    Not where two kinds of work have to take turns, since the maximum has no room for a job of each.
    """
    each = sum(pool.processes for pool in staff.pools)
    assume(parameters.maximum >= each or len({demand.pools for demand in staff.demands}) <= 1)
    site = Site(list(staff.pools), parameters, room, wait, boot, leave=leave)
    for _ in range(100):
        site.tick(*(demand for demand in staff.demands if demand.profile))
    kinds = site.kinds()
    leaving = [n for n, kind in enumerate(kinds) if kind in ("Cancel", "Drain")]
    assert not leaving or "Submit" not in kinds[leaving[0] :]


NUMBERS = st.floats() | st.sampled_from([nan, inf, -inf, 0.0, -1.0, 1e300])


@untimed
@given(staffs(), st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4).map(tuple), max_size=3))
def test_is_total(staff: ScalingFacts, profiles: list) -> None:
    """Seconds and widths come from users, and may be anything."""
    decision = step(staff._replace(demands=tuple(map(Demand, profiles))), P)
    assert set(decision.wanted) == {pool.name for pool in staff.pools}
    assert set(decision.surplus) <= set(decision.wanted)


def test_thousands_of_jobs_and_a_long_profile_are_bounded() -> None:
    profile = profiles.clean([(0.1, float(n % 97)) for n in range(50_000)])
    assert len(profile) == 64
    assert profiles.work(profile) == pytest.approx(sum(0.1 * (n % 97) for n in range(50_000)))
