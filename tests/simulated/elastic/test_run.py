"""Jobs that come and go under a graph: what that costs, what is lost, and how fast the next iterations are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from statistics import fmean
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.contenders import simulate
from simulated.elastic.controllers import Scaling
from simulated.elastic.pools import BatchSystem, VirtualPool
from simulated.elastic.run import simulate_elastic
from simulated.stock_adaptive import StockAdaptive
from simulated.tiled_linalg import iterated_cholesky, iterated_gemm

from dask_ferro.policy.scaling.step import ScalingParameters, step
from dask_ferro.policy.stealing.policies import POLICIES as OURS
from dask_ferro.simulate.clock import Clock
from dask_ferro.simulate.cluster import VirtualCluster
from dask_ferro.simulate.engine import StuckError
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from tests.simulate.test_properties import graphs

MB = 1_000_000
QUICK = VirtualPool(queue_wait=0.2, start_up=0.3)
# The submission of the tiles is the first, so this one is that of the third iteration.
RESIZED = 4


def independent(count: int, seconds: float) -> TaskGraph:
    tasks = (TaskSpec(("task-0", i), "task", "task-0", seconds, 1000) for i in range(count))
    return TaskGraph("independent", tuple(tasks))


def pinned(workers: int, **options: object) -> Scaling:
    return Scaling(ScalingParameters(minimum=workers, maximum=workers), **options)  # type: ignore[arg-type]


# ---- iterations --------------------------------------------------------------------------------------------

GRAPHS = {
    "gemm": lambda: iterated_gemm(nt=8, iterations=5),
    "cholesky": lambda: iterated_cholesky(nt=10, iterations=5),
    "gemm of large tiles": lambda: iterated_gemm(nt=6, iterations=7, tile_bytes=8 * MB),
    # One iteration takes a tenth longer than the next or not: a mean over two of them is chance.
    "gemm of large tiles, for long": lambda: iterated_gemm(nt=6, iterations=14, tile_bytes=8 * MB),
}


class Resized(NamedTuple):
    """What is asked of a run that was resized; all of them stay, and their traces would be 5 MB each."""

    phases: tuple[float, ...]
    recomputed: int
    expired: int
    drained: int


@cache
def resized(name: str, before: int, after: int, seed: int = 0) -> Resized:
    """Iterations on so many workers, and from the third one on so many others."""
    controller = pinned(before, resize={RESIZED: after})
    run = simulate_elastic(GRAPHS[name](), [QUICK], controller, at_start={QUICK.name: before}, seed=seed)
    return Resized(run.phases, run.recomputed, run.expired, run.drained)


def speed(name: str, before: int, after: int, first: int, seeds: int) -> float:
    """How fast iterations are from one on, over how fast they are with that many workers throughout.

    From whom a worker fetches is drawn, and moves an iteration by a twentieth: a mean over some seeds.
    """
    took = {
        start: fmean(fmean(resized(name, start, after, seed=seed).phases[first:]) for seed in range(seeds))
        for start in (before, after)
    }
    return took[after] / took[before]


# By 2 and 8 each way, one graph each in the suite.
OFTEN = {("gemm", 2), ("cholesky", 8), ("gemm", -8), ("cholesky", -2)}


@pytest.mark.parametrize(
    ("graph", "by"),
    [
        pytest.param(
            graph,
            by,
            marks=() if (graph, by) in OFTEN else pytest.mark.soak,
            id=f"{'expand' if by > 0 else 'shrink'} by {abs(by)}-{graph}",
        )
        for graph, by in product(["gemm", "cholesky"], [2, 4, 8, -2, -4, -8])
    ],
)
def test_iterations_after_a_resize_are_as_fast_as_with_that_many_workers_throughout(
    graph: str, by: int
) -> None:
    before = 8 if by > 0 else 16
    assert speed(graph, before, before + by, RESIZED, seeds=2) >= 0.95
    for seed in range(2):
        run = resized(graph, before, before + by, seed=seed)
        assert (run.recomputed, run.expired, run.drained) == (0, 0, max(-by, 0))


def test_large_tiles_spread_to_new_workers_within_two_iterations_and_stay_there() -> None:
    assert speed("gemm of large tiles, for long", 8, 16, RESIZED + 2, seeds=2) >= 0.95


# ---- growing and giving back -------------------------------------------------------------------------------


def test_300_tasks_of_half_a_second_need_no_more_than_ten_jobs_of_four_threads() -> None:
    ours = simulate_elastic(independent(300, 0.5), [VirtualPool(threads=4)])
    stock = simulate_elastic(independent(300, 0.5), [VirtualPool(threads=4)], StockAdaptive(), policy="stock")
    assert (ours.submitted <= 10, stock.submitted) == (True, 30)
    assert ours.node_seconds < 0.5 * stock.node_seconds


def test_every_long_task_gets_a_job_though_nobody_knew_how_long_it_is() -> None:
    run = simulate_elastic(independent(12, 20.0), [VirtualPool()])
    assert (run.submitted, run.recomputed) == (12, 0)


def test_a_full_pool_runs_no_more_jobs_than_it_has_slots() -> None:
    run = simulate_elastic(independent(40, 2.0), [VirtualPool(slots=4)])
    assert run.peak == 4
    assert run.makespan < 1.3 * (40 * 2.0 / 4 + 3.5)


# ---- walltime ----------------------------------------------------------------------------------------------


def test_under_a_walltime_of_three_tasks_nothing_is_lost_and_little_time() -> None:
    pool = VirtualPool(walltime=25.0)
    run = simulate_elastic(
        independent(12, 8.0), [pool], Scaling(ScalingParameters(minimum=2, maximum=2, surge=2))
    )
    assert (run.recomputed, run.expired) == (0, 0)
    assert run.makespan < 1.3 * 12 * 8.0 / 2


def test_without_a_surge_nobody_is_beyond_the_maximum_and_nothing_is_lost_either() -> None:
    pool = VirtualPool(walltime=25.0)
    run = simulate_elastic(independent(12, 8.0), [pool], pinned(2))
    assert (run.recomputed, run.expired, run.peak) == (0, 0, 2)
    assert run.makespan < 1.4 * 12 * 8.0 / 2  # a successor comes when a job has gone


class Advised(Scaling):
    advice = ""

    def decide(self, staff, scheduler):  # type: ignore[no-untyped-def]
        advice = step(staff, self.parameters, self._surplus).advice
        self.advice = advice.get("default", self.advice)
        return super().decide(staff, scheduler)


# A start-up of 8.6 s: a worker with a lifetime of 20 s, less 3 s of stagger, counted as spent when it connected.
@pytest.mark.parametrize(
    ("life", "start_up", "task", "surge"),
    [*product((12.0, 20.0, 25.6, 40.0), (2.5, 8.6), (0.5, 4.0, 15.0), (0, 2))],
)
def test_with_short_lives_all_work_is_done_or_it_is_told_what_to_change(life, start_up, task, surge) -> None:
    scaling = Advised(ScalingParameters(minimum=2, maximum=2, surge=surge))
    # A successor comes while a job can still hand over: after a wait of 1 s and two steps.
    able = start_up + task + 1.0 + start_up + scaling.parameters.notice + 2.0 <= life
    pool = VirtualPool(walltime=life, start_up=start_up)
    try:
        simulate_elastic(independent(16, task), [pool], scaling, limit=300.0)
    except StuckError:
        assert not able
        assert "walltime" in scaling.advice


def test_stock_loses_results_as_fast_as_it_makes_them() -> None:
    pool = VirtualPool(walltime=25.0)
    with pytest.raises(StuckError, match="tasks are left after 300 s"):
        simulate_elastic(independent(12, 8.0), [pool], StockAdaptive(2, 2), policy="stock", limit=300.0)


# ---- the batch system --------------------------------------------------------------------------------------


def batch(*pools: VirtualPool) -> tuple[BatchSystem, Clock, list[str]]:
    clock, seen = Clock(), []

    def note(what: str):  # type: ignore[no-untyped-def]
        return lambda job: seen.append(f"{clock.now:.1f} {what} {job.name}")

    return BatchSystem(pools, clock, 0, note("connected"), note("expired")), clock, seen


def test_jobs_start_in_order_when_there_is_a_slot_and_end_at_their_walltime() -> None:
    system, clock, seen = batch(VirtualPool("p", queue_wait=1.0, start_up=2.0, walltime=5.0, slots=1))
    system.submit("p", 2)
    clock.run(lambda: len(seen) == 4)
    assert seen == ["3.0 connected p-0", "6.0 expired p-0", "8.0 connected p-1", "11.0 expired p-1"]
    assert system.node_seconds() == 10.0
    assert system.waits["p"] == pytest.approx(1.0 + 0.3 * 5.0)


def test_a_job_that_is_taken_back_never_had_a_node() -> None:
    system, clock, seen = batch(VirtualPool("p", queue_wait=1.0, start_up=2.0))
    system.submit("p", 1)
    system.end(system.jobs["p-0"])
    assert not clock.run(lambda: bool(seen))
    assert (system.node_seconds(), [job.state for job in system.over]) == (0.0, ["gone"])


def test_waits_are_drawn_from_the_seed() -> None:
    runs = [simulate_elastic(independent(40, 2.0), [VirtualPool(sigma=1.0)], seed=s) for s in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0].makespan != runs[2].makespan


# ---- what a controller is shown ----------------------------------------------------------------------------


def chain(length: int, count: int) -> TaskGraph:
    """Chains side by side; each task says that it takes a second."""
    return TaskGraph("chains", tuple(
        TaskSpec((f"c-{n}", i), "c", f"c-{n}", 1.0, 0, ((f"c-{n}", i - 1),) if i else (), 1.0)
        for n in range(count) for i in range(length)
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("graph", "profile"),
    [
        pytest.param(chain(3, 1), ((3.0, 1.0),), id="a chain is as long as it is, and narrow"),
        pytest.param(chain(1, 5), ((1.0, 5.0),), id="independent tasks are wide"),
        pytest.param(chain(2, 4), ((2.0, 4.0),), id="chains are as wide as there are"),
        pytest.param(independent(3, 9.0), ((0.5, 3.0),), id="tasks of unknown length are guessed"),
    ],
)
def test_the_remaining_work(graph: TaskGraph, profile: tuple[tuple[float, float], ...]) -> None:
    seen = []

    class Watching(Scaling):
        def decide(self, staff, scheduler):  # type: ignore[no-untyped-def]
            seen.append(staff.demands)
            return super().decide(staff, scheduler)

    simulate_elastic(graph, [VirtualPool()], Watching())
    (first,) = seen[0]
    assert [(round(s, 6), w) for s, w in first.profile] == list(profile)


# ---- phases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["informed", "stock"])
def test_a_phase_begins_when_the_one_before_is_done(policy: str) -> None:
    graph = iterated_gemm(nt=3, iterations=3)
    trace = simulate(graph, VirtualCluster.local(4), policy=policy)
    phase = {task.key: sum(n >= stop for stop in graph.stops) for n, task in enumerate(graph.tasks)}
    spans = [[s for s in trace.of("compute") if phase[s.key] == n] for n in range(4)]
    assert [len(some) for some in spans] == [27, 27, 27, 27]
    for before, after in pairwise(spans):
        assert max(s.stop for s in before) < min(s.start for s in after)


def test_phases_that_are_not_all_tasks_are_refused() -> None:
    graph = TaskGraph("odd", independent(3, 1.0).tasks, phases=(1, 1))
    with pytest.raises(ValueError, match="phases of 2 tasks, it has 3"):
        simulate(graph, VirtualCluster.local(1))


# ---- whatever happens --------------------------------------------------------------------------------------

# Left to itself, `builds` would draw what has a default as well.
pools = st.fixed_dictionaries(
    {
        "threads": st.integers(1, 3),
        "processes": st.integers(1, 2),
        "queue_wait": st.sampled_from([0.0, 0.5, 20.0]),
        "sigma": st.sampled_from([0.0, 1.0]),
        "start_up": st.sampled_from([0.1, 2.5]),
        "slots": st.sampled_from([1.0, 3.0, 1000.0]),
    }
).map(lambda facts: VirtualPool(**facts))


cases = given(graphs(), pools, st.sampled_from([0, 1, 4]), st.sampled_from([*OURS]), st.integers(0, 3))


@cases
@settings(max_examples=60, deadline=None)
def test_every_task_runs_once_whoever_comes_and_goes(
    graph: TaskGraph, pool: VirtualPool, at_start: int, policy: str, seed: int
) -> None:
    """Without a walltime no worker dies, and one that is drained, at the first tick, loses nothing."""
    longer = tuple(task._replace(seconds=20 * task.seconds) for task in graph.tasks)
    run = simulate_elastic(
        replace(graph, tasks=longer),
        [pool],
        pinned(4, resize={1: pool.processes}),
        at_start={pool.name: at_start},
        policy=policy,
        seed=seed,
        limit=1000.0,
    )
    assert sorted(task.key for task in run.trace.tasks) == sorted(task.key for task in graph.tasks)
    assert (run.recomputed, run.expired) == (0, 0)
    assert run.peak <= max(pool.slots, at_start)
