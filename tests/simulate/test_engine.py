"""The simulator's mechanics: what takes which time, and what happens when workers come, stop and go."""

from dataclasses import replace

import pytest
from simulated.contenders import POLICIES, STOCK, simulate
from simulated.generators import build

from dask_ferro.policy.estimates import Link
from dask_ferro.policy.placement import PlacementParameters
from dask_ferro.policy.scheduling_core import SchedulingSettings
from dask_ferro.simulate.clock import Clock, Cores, Line, Process
from dask_ferro.simulate.cluster import Change, VirtualCluster, VirtualWorker
from dask_ferro.simulate.engine import StuckError
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from dask_ferro.simulate.virtual_tasks import Roots, depth_first, jobs_of

NO_OVERHEAD = dict.fromkeys(
    ("wire", "to_worker", "to_scheduler", "per_result", "per_send", "per_step", "per_call", "per_submitted",
     "before", "after"), 0.0,
)  # fmt: skip
# Two workers, and six that join when all there is lies with those.
LATE = VirtualCluster.local(8, changes=[Change(1.0, "join", f"w{i:05d}") for i in range(2, 8)])


def cluster(*threads, changes=(), **costs):
    workers = tuple(VirtualWorker(f"w{i}", n) for i, n in enumerate(threads))
    return VirtualCluster(workers, tuple(changes), **costs)


def graph(*tasks, pinned=""):
    return TaskGraph("test", tuple(tasks), pinned)


def task(key, seconds, *after, nbytes=0, group=None, annotated=None):
    return TaskSpec(key, key.split("-")[0], group or key, seconds, nbytes, after, annotated)


def independent(count, seconds, name="inc"):
    return graph(*(task(f"{name}-{i}", seconds, group=name) for i in range(count)))


def took(graph, cluster, policy="informed", **options):
    return simulate(graph, cluster, policy=policy, **options).counts["elapsed"]


def computed(trace):
    return [span.key for span in trace.of("compute")]


# ---- time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("tasks", "threads", "seconds"),
    [
        pytest.param([task("a", 1.0)], (1,), 1.0, id="one task takes its seconds"),
        pytest.param([task("a", 1.0), task("b", 2.0, "a"), task("c", 3.0, "b")], (1, 1), 6.0, id="a chain is a sum"),
        pytest.param([task("a", 1.0), task("b", 1.0), task("c", 1.0)], (3,), 1.0, id="threads run side by side"),
        pytest.param([task("a", 1.0), task("b", 1.0), task("c", 1.0)], (1, 1, 1), 1.0, id="workers run side by side"),
    ],
)  # fmt: skip
def test_without_costs_time_is_the_tasks_seconds(policy, tasks, threads, seconds):
    trace = simulate(graph(*tasks), cluster(*threads, **NO_OVERHEAD), policy=policy)
    assert trace.counts["elapsed"] == pytest.approx(seconds)
    assert sorted(computed(trace)) == sorted(t.key for t in tasks)


def test_a_worker_of_speed_two_takes_half_of_the_seconds():
    fast = VirtualCluster((VirtualWorker("w", speed=2.0),), **NO_OVERHEAD)
    assert took(graph(task("a", 1.0)), fast) == pytest.approx(0.5)


def test_a_hop_costs_two_wires_the_scheduler_and_the_worker():
    costs = {"wire": 0.25, "per_result": 0.03, "per_send": 0.01, "before": 0.002, "after": 0.001}
    one = cluster(1, to_worker=0.0, to_scheduler=0.0, **costs)
    trace = simulate(graph(task("a", 1.0), task("b", 1.0, "a")), one)
    first, second = trace.of("compute")
    assert second.start - first.stop == pytest.approx(0.001 + 0.25 + 0.03 + 0.01 + 0.25 + 0.002)


def test_a_fetch_costs_latency_and_bytes_over_bandwidth():
    roots = [task("a", 1.0, nbytes=100), task("b", 1.0, nbytes=100)]
    link = Link(0.5, 100.0)
    two = cluster(1, 1, same_host=link, **NO_OVERHEAD)
    trace = simulate(graph(*roots, task("c", 1.0, "a", "b")), two, policy="none")
    (moved,) = trace.of("transfer")
    assert moved.seconds == pytest.approx(0.5 + 100 / 100.0)
    assert trace.counts == trace.counts | {"bytes_moved": 100.0, "elapsed": pytest.approx(1.0 + 1.5 + 1.0)}


def test_two_fetches_into_one_worker_share_its_bandwidth():
    roots = [task(f"{name}", 1.0, nbytes=100) for name in "abc"]
    three = cluster(1, 1, 1, same_host=Link(0.0, 100.0), **NO_OVERHEAD)
    trace = simulate(graph(*roots, task("d", 1.0, *"abc")), three, policy="none")
    assert sorted(span.stop for span in trace.of("transfer")) == pytest.approx([2.0, 3.0])


@pytest.mark.parametrize(
    ("sent", "arrived"),
    [
        pytest.param([0.0], [0.1], id="the first leaves at once"),
        pytest.param([0.0, 1.0, 2.0, 5.0], [0.1, 5.1, 5.1, 5.1], id="the next ones are gathered"),
        pytest.param([0.0, 1.0, 6.0], [0.1, 5.1, 10.1], id="the interval counts from the last batch"),
        pytest.param([0.0, 7.0], [0.1, 7.1], id="after a pause the first leaves at once again"),
    ],
)
def test_messages_leave_in_batches(sent, arrived):
    line = Line(5.0, 0.1)
    assert [line.arrives(now) for now in sent] == pytest.approx(arrived)


@pytest.mark.parametrize(
    ("count", "ends"),
    [
        pytest.param(1, [1.0, 2.0, 3.0, 4.0], id="one core: one after the other"),
        pytest.param(2, [1.0, 1.0, 2.0, 2.0], id="two cores: two at a time"),
        pytest.param(None, [1.0] * 4, id="not counted: nobody waits"),
    ],
)
def test_processes_wait_for_a_core(count, ends):
    clock, seen = Clock(), []
    cores = Cores(clock, count or 4)
    for _ in range(4):
        Process(clock, cores).run(1.0, lambda: seen.append(clock.now))
    clock.run(lambda: len(seen) == 4)
    assert seen == pytest.approx(ends)


def test_a_process_keeps_its_core_until_it_is_idle_and_does_one_thing_at_a_time():
    clock, seen = Clock(), []
    cores = Cores(clock, 1)
    first, second = Process(clock, cores), Process(clock, cores)
    first.run(1.0, seen.append, "first")
    second.run(1.0, seen.append, "second")
    first.run(1.0, seen.append, "first again")
    clock.run(lambda: len(seen) == 3)
    assert (seen, clock.now) == (["first", "first again", "second"], 3.0)


def test_what_idle_processes_take_makes_all_last_longer_and_chance_keeps_the_mean():
    assert Cores(Clock(), 2, taken=0.2).lasts(1.0) == pytest.approx(1.25)
    cores = Cores(Clock(), 2, spread=0.7)
    drawn = [cores.lasts(1.0) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(1.0, abs=0.03)
    assert sorted(drawn)[18_000] / sorted(drawn)[10_000] == pytest.approx(2.5, abs=0.1)


@pytest.mark.parametrize("policy", ["informed", "stock"])
def test_on_few_cores_short_tasks_wait_for_them_and_long_ones_do_not(policy):
    short, long = build("xlarge-wide"), build("balanced-roots")
    free, two, one = (VirtualCluster.local(8, cores=cores) for cores in (None, 2, 1))
    assert took(long, two, policy) < 1.05 * took(long, free, policy)
    if policy == "informed":  # stock leaves all on one worker, which has a core
        assert took(short, one) > 1.5 * took(short, two) > 2.0 * took(short, free)
        assert took(short, two) > 641 * 1.5e-3 / 2  # measured: no task took all processes less CPU than that


@pytest.mark.parametrize("policy", ["none", "stock-none"])
def test_what_was_measured_before_is_known_from_the_start(policy):
    tasks = graph(task("long-0", 1.0), *(task(f"brief-{i}", 0.2) for i in range(4)))
    two = cluster(1, 1, **NO_OVERHEAD)
    assert took(tasks, two, policy) == pytest.approx(1.4)
    assert took(tasks, two, policy, known={"long": 1.0, "brief": 0.2}) == pytest.approx(1.0)


def test_short_queued_tasks_are_sent_several_at_a_time():
    """Fewer messages, so that a flood of tasks that do nothing ends sooner on few cores; long ones go one by one."""
    local = VirtualCluster.local(4, cores=2)
    one_by_one = SchedulingSettings(placement=PlacementParameters(ahead=0.0))

    def run(seconds, rules):
        return simulate(independent(400, seconds), local, rules=rules)

    many, each = run(0.0, SchedulingSettings()), run(0.0, one_by_one)
    assert many.counts["batches"] < 0.65 * each.counts["batches"]
    assert many.counts["elapsed"] < 0.9 * each.counts["elapsed"]
    assert run(0.02, SchedulingSettings()).counts == run(0.02, one_by_one).counts


def test_messages_to_a_worker_that_has_plenty_are_gathered():
    local = VirtualCluster.local(8)
    assert took(build("chains"), local) > took(build("chains"), replace(local, to_worker=0.001))


def test_equal_times_keep_the_order_in_which_they_were_asked_for():
    clock, seen = Clock(), []
    for name in "abc":
        clock.at(1.0, seen.append, name)
    clock.at(0.5, seen.append, "first")
    clock.run(lambda: len(seen) == 4)
    assert seen == ["first", "a", "b", "c"]


# ---- as Dask decides ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "threads", "deps", "rootish"),
    [
        pytest.param(17, 8, 0, True, id="more than twice the threads"),
        pytest.param(16, 8, 0, False, id="twice the threads is not more"),
        pytest.param(17, 8, 4, True, id="four dependencies are few"),
        pytest.param(17, 8, 5, False, id="five are not"),
    ],
)
def test_rootish_is_what_dask_takes_for_it(count, threads, deps, rootish):
    before = [task(f"dep-{i}", 1.0, group="dep") for i in range(deps)]
    names = tuple(t.key for t in before)
    jobs = jobs_of(graph(*before, *(task(f"inc-{i}", 1.0, *names, group="inc") for i in range(count))))
    assert Roots(jobs).has(jobs[-1], threads) is rootish


def test_a_queued_task_goes_where_a_slot_is_free():
    trace = simulate(independent(40, 1.0), cluster(1, 1, 1, 1, **NO_OVERHEAD), policy="none")
    assert set(trace.busy.values()) == {10.0}


def test_queued_tasks_leave_by_priority():
    trace = simulate(independent(12, 1.0), cluster(1, **NO_OVERHEAD), policy="stock")
    assert computed(trace) == [f"inc-{i}" for i in range(12)]


def test_stock_piles_dependents_on_the_holder_and_ours_does_not():
    tree, local = build("cholesky"), VirtualCluster.local(8)
    policies = ("stock-none", "stock", "informed")
    none, stock, ours = (took(tree, local, policy) / tree.lower_bound(8) for policy in policies)
    assert none > 6 > 3 > stock > 1.8 > 1.4 > ours


def test_depth_first_finishes_what_it_began():
    jobs = jobs_of(graph(task("a", 1.0), task("b", 1.0), task("a2", 1.0, "a"), task("b2", 1.0, "b")))
    place = depth_first(jobs)
    assert [jobs[number].spec.key for number in sorted(place, key=place.__getitem__)] == [
        "a", "a2", "b", "b2",
    ]  # fmt: skip


def test_a_given_order_is_the_priority():
    names = [f"inc-{i}" for i in range(12)]
    order = {key: -i for i, key in enumerate(names)}
    trace = simulate(independent(12, 1.0), cluster(1, **NO_OVERHEAD), policy="stock", order=order)
    assert computed(trace) == names[::-1]


# ---- stealing ----------------------------------------------------------------------------------------------


def hoard(count, seconds=0.1):
    """Tasks that all read what one worker has, too big to be read elsewhere for nothing."""
    return graph(
        *(task(f"root-{i}", 0.001, nbytes=1000, group="root") for i in range(6)),
        *(task(f"use-{i}", seconds, f"root-{i % 6}", group="use") for i in range(count)),
        pinned="one",
    )


def test_stock_steals_what_its_placement_hoards():
    stock = simulate(hoard(80), VirtualCluster.local(4), policy="stock")
    none = simulate(hoard(80), VirtualCluster.local(4), policy="stock-none")
    assert none.busy["w00000"] == pytest.approx(sum(none.busy.values()))
    assert stock.counts["confirmed"] > 10
    assert stock.makespan < 0.7 * none.makespan


@pytest.mark.parametrize("policy", ["informed", "last-victim"])
def test_who_joins_late_is_given_work_by_stealing(policy):
    with_, without = (simulate(hoard(200), LATE, policy=p) for p in (policy, "none"))
    assert with_.counts["confirmed"] >= 40
    assert with_.makespan < 0.6 * without.makespan
    steals = list(with_.of("steal"))
    assert len(steals) <= with_.counts["confirmed"]
    assert all(span.source != span.worker and span.seconds > 0 for span in steals)


def test_every_request_ends_in_one_way():
    counts = simulate(hoard(200, 0.02), LATE).counts
    ended = counts["confirmed"] + counts["refused"] + counts["stale"]
    assert 0 < ended <= counts["requests"] <= ended + 2


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_stolen_among_balanced_roots(policy):
    assert simulate(build("balanced-roots"), VirtualCluster.local(8), policy=policy).counts["requests"] == 0


# ---- workers that come, stop and go ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_what_only_a_killed_worker_held_is_computed_again(policy):
    chain = graph(*(task(f"c-{i}", 1.0, *([f"c-{i - 1}"] if i else [])) for i in range(4)))
    # Both are killed in turn, so that wherever the chain stands it is lost once.
    changes = [Change(2.5, "kill", "w0"), Change(2.5, "join", "w2"), Change(2.6, "kill", "w1")]
    trace = simulate(chain, cluster(1, 1, 1, changes=changes, **NO_OVERHEAD), policy=policy)
    assert [t.key for t in trace.tasks] == ["c-0", "c-1", "c-2", "c-3"]
    assert computed(trace) == ["c-0", "c-1", "c-0", "c-1", "c-2", "c-3"]
    lost = 2.5 if policy in STOCK else 2.6  # where the chain began: stock Dask's on the first worker
    assert trace.counts["elapsed"] == pytest.approx(lost + 4.0, abs=0.02)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_paused_worker_starts_nothing(policy):
    changes = [Change(2.5, "pause", "w0"), Change(20.0, "resume", "w0")]
    trace = simulate(independent(40, 1.0), cluster(1, 1, changes=changes, **NO_OVERHEAD), policy=policy)
    starts = [span.start for span in trace.of("compute") if span.worker == "w0"]
    assert not [start for start in starts if 2.5 <= start < 20.0]
    assert len({span.key for span in trace.of("compute")}) == 40


def test_who_joins_is_given_what_is_queued():
    changes = [Change(10.0, "join", "w1")]
    trace = simulate(independent(40, 1.0), cluster(1, 1, changes=changes, **NO_OVERHEAD), policy="none")
    assert trace.counts["elapsed"] == pytest.approx(25.0)


def test_a_cluster_without_workers_is_stuck():
    with pytest.raises(StuckError, match=r"3 tasks are left, 'inc-0' among them"):
        simulate(independent(3, 1.0), cluster(1, changes=[Change(0.5, "kill", "w0")]))


# ---- what it refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: simulate(independent(1, 1.0), cluster(1), policy="best"), "policy: got 'best'",
                     id="an unknown policy"),
        pytest.param(lambda: simulate(graph(task("a", 1.0, "b")), cluster(1)),
                     "'a' is listed before its dependency 'b'", id="a task before its dependency"),
        pytest.param(lambda: simulate(graph(task("a", 1.0), task("a", 1.0)), cluster(1)), "'a' occurs twice",
                     id="a key that is there twice"),
        pytest.param(lambda: cluster(1, changes=[Change(1.0, "kill", "w9")]), "'w9', which is no worker",
                     id="a change of nobody"),
        pytest.param(lambda: cluster(1, changes=[Change(1.0, "join", "w0")]), "no worker is there",
                     id="nobody at the start"),
        pytest.param(lambda: cluster(0), "wanted threads", id="a worker without threads"),
        pytest.param(lambda: VirtualCluster((VirtualWorker("a"),) * 2), "one address", id="two of one name"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_set_of_wide_graphs_reaches_the_simulation():
    seen = []

    def attach(site):
        seen.append(site.scheduler.decider)

    rules = SchedulingSettings(placement=PlacementParameters(wide=1.0))
    simulate(hoard(8), VirtualCluster.local(2), rules=rules, attach=attach)
    (decider,) = seen
    assert decider.candidates.placement.wide == 1.0


def test_steps_that_share_no_time_with_their_events_come_to_an_end():
    rules = SchedulingSettings(coalesce=0.0)
    trace = simulate(hoard(40), replace(LATE, per_step=0.0), policy="informed", rules=rules)
    assert len({span.key for span in trace.of("compute")}) == len(trace.tasks)
