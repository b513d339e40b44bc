"""The roster on real schedulers: the workers, the work that is left, and when workers end."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from math import inf, nan

import dask
import pytest
from dask._task_spec import Task, TaskRef
from distributed import Event, Scheduler, Status, Worker, rpc, secede
from distributed.stealing import WorkStealing
from hypothesis import given, settings
from hypothesis import strategies as st

import dask_ferro as ff
from dask_ferro.elastic import scheduler_rpc
from dask_ferro.elastic.remaining_work import Demands
from dask_ferro.elastic.scheduler_rpc import ScalingRPC
from dask_ferro.policy.estimates import Speed
from dask_ferro.policy.scaling.work_profile import ProjectedSpan, profile, schedule
from dask_ferro.scheduler.plugin import NAME, part_of, take_off
from dask_ferro.scheduler.scheduler_calls import RosterAnswer, WorkerRow
from tests import clusters
from tests.waiting import finished_async, opened, until_async

on_cluster = partial(clusters.on_cluster, roster=True)


async def busy(client, cluster):
    """Let every worker run a task until the event is set."""
    event = Event("roster", client=client)
    addresses = list(cluster.scheduler.workers)
    tasks = [client.submit(hold, "roster", a, workers=[a], pure=False) for a in addresses]
    await until_async(  # a heartbeat reports what runs
        lambda: all(ws.executing for ws in cluster.scheduler.workers.values()),
        "a task that runs on each worker",
    )
    return event, tasks


async def submitted(scheduler, count):
    """Wait until the scheduler has as many tasks."""
    await until_async(
        lambda: len(scheduler.tasks) >= count, f"{count} tasks", seen=lambda: len(scheduler.tasks)
    )


def hold(name, value):
    opened(name)
    return value


def annotated(seconds, **more):
    return dask.annotate(ferro={"seconds": seconds}, **more)


# ---- profiles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        pytest.param([], [], id="nothing to do is an empty profile"),
        pytest.param([ProjectedSpan(0, 0.5)] * 300, [(0.5, 300.0)], id="300 alike are one step"),
        pytest.param(
            [ProjectedSpan(0, 1), ProjectedSpan(1, 3)], [(3.0, 1.0)], id="a chain is as long as its parts"
        ),
        pytest.param(
            [ProjectedSpan(0, 2), ProjectedSpan(0, 1, 9)],
            [(1.0, 10.0), (1.0, 1.0)],
            id="a long task outlasts nine short ones",
        ),
        pytest.param(
            [ProjectedSpan(2, 3, 4)], [(2.0, 0.0), (1.0, 4.0)], id="what comes later has nothing to do now"
        ),
        pytest.param(
            [ProjectedSpan(0, 0.1 + 0.2), ProjectedSpan(0, 0.3)], [(0.3, 2.0)], id="rounding makes no steps"
        ),
    ],
)
def test_a_profile_is_how_wide_for_how_long(spans, wanted):
    found = profile(spans)
    assert [(pytest.approx(seconds), width) for seconds, width in wanted] == found


@st.composite
def graphs(draw):
    """Tasks by number with their seconds and the earlier ones that they wait for."""
    count = draw(st.integers(1, 200))
    seconds = draw(st.lists(st.sampled_from([0.001, 0.01, 0.5, 1.0, 60.0]), min_size=count, max_size=count))
    waits = [draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set() for i in range(count)]
    return seconds, waits


@settings(max_examples=50)
@given(graphs())
def test_a_profile_has_the_graphs_work_and_its_critical_path(graph):
    seconds, waits = graph
    dependents = {i: [j for j, needed in enumerate(waits) if i in needed] for i in range(len(seconds))}
    ready = [i for i, needed in enumerate(waits) if not needed]
    spans = schedule(ready, dependents.__getitem__, lambda i: len(waits[i]), seconds.__getitem__)
    path = []
    for i, needed in enumerate(waits):
        path.append(seconds[i] + max((path[j] for j in needed), default=0.0))
    steps = profile(spans.values())
    assert len(steps) <= 64
    assert sum(s for s, _ in steps) == pytest.approx(max(path), abs=1e-4)
    assert sum(s * w for s, w in steps) == pytest.approx(sum(seconds), abs=1e-2)
    assert all(s > 0 and w >= 0 for s, w in steps)


# ---- the rows -------------------------------------------------------------------------------------------


class Clock:
    """The roster's monotonic clock, which the test may put ahead."""

    ahead = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(scheduler_rpc, "monotonic", made)
    return made


@on_cluster()
async def test_a_row_tells_what_a_worker_holds_alone_and_how_long_it_was_idle(client, cluster, clock):
    one, two = sorted(cluster.scheduler.workers)
    alone = client.submit(bytes, 5000, workers=[one])
    shared = client.submit(bytes, 7000, workers=[one])
    used = client.submit(len, shared, workers=[two])
    await finished_async([alone, shared, used])
    clock.ahead += 300.0
    facts = await cluster.scheduler_comm.ferro_roster()
    row, other = facts["workers"][one], facts["workers"][two]
    assert (facts.keys(), row.keys()) == (RosterAnswer.__required_keys__, WorkerRow.__required_keys__)
    tasks = cluster.scheduler.tasks
    sizes = {f.key: tasks[f.key].nbytes for f in (alone, shared, used)}
    assert {ws.address for ws in tasks[shared.key].who_has} == {one, two}
    assert (row["nbytes"], row["unique"]) == (sizes[alone.key] + sizes[shared.key], sizes[alone.key])
    assert other["unique"] == sizes[used.key]
    assert (row["threads"], row["status"]) == (1, "running")
    assert 300.0 <= row["idle_for"] < 400.0
    assert (row["device"], row["resources"], row["ends_in"]) == ("cpu", {}, None)
    assert 0 < row["free"] < 0.6 * cluster.scheduler.workers[one].memory_limit
    assert facts["demands"] == []


@on_cluster(config={"distributed.worker.memory.pause": False})
async def test_a_row_tells_for_how_long_a_worker_has_paused(client, cluster, clock):
    scheduler, (one, two) = cluster.scheduler, cluster.scheduler.workers
    told = part_of(scheduler, ScalingRPC).roster

    def paused():
        return {address: row["paused_for"] for address, row in told()["workers"].items()}

    assert paused() == {one: 0.0, two: 0.0}
    cluster.workers[0].status = Status.paused
    await until_async(lambda: scheduler.workers[one].status == Status.paused, "word of the pause")
    assert paused() == {one: 0.0, two: 0.0}
    clock.ahead += 300.0
    assert 300.0 <= paused()[one] < 400.0
    assert paused()[two] == 0.0
    cluster.workers[0].status = Status.running
    await until_async(lambda: scheduler.workers[one].status == Status.running, "word of its end")
    assert paused()[one] == 0.0


@on_cluster()
async def test_demands_are_apart_by_what_their_workers_must_have(client, cluster):
    event, held = await busy(client, cluster)
    address = next(iter(cluster.scheduler.workers))
    with annotated(0.5):
        anywhere = client.map(hold, ["roster"] * 300, range(300))
    with annotated(2.0, resources={"GPU": 1}):
        gpu = client.map(hold, ["roster"] * 3, range(3), pure=False)
    with annotated(9.0):
        bound = client.submit(hold, "roster", 0, workers=[address], pure=False)
        loose = client.submit(hold, "roster", 0, workers=[address], allow_other_workers=True, pure=False)
    await submitted(cluster.scheduler, 307)
    facts = part_of(cluster.scheduler, ScalingRPC).roster()
    rows = {(*d["resources"], d["workers"] is not None): d for d in facts["demands"]}
    assert set(rows) == {(False,), (True,), ("GPU", False)}
    assert rows[False,]["profile"] == [(0.5, 301.0), (8.5, 1.0)]
    assert (rows[False,]["longest"], rows[False,]["device"]) == (9.0, None)
    assert rows["GPU", False]["profile"] == [(2.0, 3.0)]
    assert (rows["GPU", False]["device"], rows["GPU", False]["resources"]) == ("gpu", {"GPU": 1})
    assert rows[True,]["workers"] == sorted(cluster.scheduler.workers)
    assert rows[True,]["longest"] == 9.0
    await event.set()
    await client.gather([*held, *anywhere, bound, loose])
    del gpu


@on_cluster()
async def test_a_demand_knows_the_whole_graph_and_what_has_run(client, cluster):
    event, held = await busy(client, cluster)
    graph = {("a", i): Task(("a", i), hold, "roster", i) for i in range(4)}
    graph |= {("b", i): Task(("b", i), int, TaskRef(("a", i))) for i in range(4)}
    graph["c"] = Task("c", max, *(TaskRef(("b", i)) for i in range(4)))
    with annotated(1.0):
        last = client.get(graph, "c", sync=False)
    await submitted(cluster.scheduler, 11)
    demands = part_of(cluster.scheduler, ScalingRPC).roster()["demands"]
    (bound, free) = sorted(demands, key=lambda demand: demand["workers"] is None)
    assert free["profile"] == [(2.0, 4.0), (1.0, 1.0)]
    # Nobody knows what `hold` takes: at least as long again as the two have run.
    assert bound["longest"] > 0.2
    await event.set()
    assert await last == 3
    await client.gather(held)


@pytest.mark.parametrize("installed", [False, True], ids=["stock", "with the scheduler plugin"])
@on_cluster()
async def test_a_sample_of_a_large_graph_has_about_its_work_and_depth(client, cluster, installed):
    event, held = await busy(client, cluster)
    graph = {}
    for chain in range(200):
        for step in range(10):
            key = (f"step-{step}", chain)
            before = TaskRef((f"step-{step - 1}", chain)) if step else 0
            graph[key] = Task(key, int, before)
    with annotated(0.1):
        last = client.get(graph, [("step-9", chain) for chain in range(200)], sync=False)
    await submitted(cluster.scheduler, 2002)
    rows = {}
    for exact in (20_000, 400):
        (row,) = [d for d in Demands(cluster.scheduler, exact).rows() if d["workers"] is None]
        rows[exact] = row["profile"]
    seconds = {exact: sum(s for s, _ in steps) for exact, steps in rows.items()}
    work = {exact: sum(s * w for s, w in steps) for exact, steps in rows.items()}
    assert seconds[20_000] == pytest.approx(1.0)
    assert seconds[400] == pytest.approx(1.0, rel=0.1)
    assert work[20_000] == pytest.approx(200.0)
    assert work[400] == pytest.approx(200.0, rel=0.15)
    assert rows[400][0][1] == pytest.approx(200.0, rel=0.3)
    await event.set()
    await client.gather([*last, *held])


@pytest.mark.parametrize("installed", [False, True], ids=["stock", "with the scheduler plugin"])
@on_cluster(workers=1)
async def test_the_longest_task_is_a_whole_one_however_long_it_has_run(client, cluster, installed):
    """A fresh job would start it over.  "No job has the time for tasks of 599 s" was told of one of 600 s."""
    with annotated(600.0):
        task = client.submit(hold, "roster", 0)
    (row,) = await until_async(
        lambda: (rows := Demands(cluster.scheduler).rows()) and rows[0]["profile"][0][0] < 600.0 and rows,
        "a part of the task to have run",
    )
    assert row["longest"] == 600.0
    await Event("roster", client=client).set()
    await task


@pytest.mark.parametrize("installed", [False, True], ids=["stock", "with the scheduler plugin"])
@on_cluster()
async def test_a_required_device_class_is_a_need_where_somebody_honours_it(client, cluster, installed):
    event, held = await busy(client, cluster)
    with annotated(2.0), ff.require_device("gpu"):
        required = client.map(hold, ["roster"] * 3, range(3), pure=False)
    with annotated(2.0):
        free = client.submit(hold, "roster", 0, pure=False)
    await submitted(cluster.scheduler, 6)
    rows = {d["device"]: d for d in Demands(cluster.scheduler).rows() if d["workers"] is None}
    if installed:
        assert rows["gpu"]["resources"] == {}
    wanted = {"gpu": [(2.0, 3.0)], None: [(2.0, 1.0)]} if installed else {None: [(2.0, 4.0)]}
    assert {device: row["profile"] for device, row in rows.items()} == wanted
    await event.set()
    await client.gather([*held, free])
    del required


@pytest.mark.parametrize("installed", [False, True], ids=["stock", "with the scheduler plugin"])
@on_cluster()
async def test_the_demand_reads_annotations_as_placement_does(client, cluster, installed):
    """Operations count where a device's speed is known; what makes no sense says nothing."""

    if installed:
        durations = cluster.scheduler.extensions["stealing"].ledger.durations
        durations.speeds["cpu"] = Speed(1e9, 1e9)
    without = [{"seconds": value} for value in (nan, inf, -1.0)]
    tasks = []
    for number, told in enumerate([{"flops": 3e9}, {"seconds": 4.0, "bytes": 2e9}, *without]):
        with dask.annotate(ferro=told):
            tasks.append(client.submit(hold, "roster", number, resources={f"none-{number}": 1}))
    await until_async(
        lambda: len(cluster.scheduler.unrunnable) >= len(tasks), "all tasks to be without a worker"
    )
    found = {next(iter(d["resources"])): d for d in Demands(cluster.scheduler).rows()}
    known = [3.0, 2.0] if installed else [0.5, 4.0]
    for number, seconds in enumerate([*known, 0.5, 0.5, 0.5]):
        row = found[f"none-{number}"]
        assert (row["profile"], row["longest"]) == ([(seconds, 1.0)], seconds)


@on_cluster(installed=True)
async def test_other_device_classes_run_a_demand_as_much_faster_as_their_operations_say(client, cluster):
    ledger = cluster.scheduler.extensions["stealing"].ledger
    with dask.annotate(ferro={"flops": 4e9}):
        task = client.submit(hold, "roster", 0, resources={"none": 1})
    await until_async(lambda: cluster.scheduler.unrunnable, "a task without a worker")
    ledger.durations.speeds.update({"cpu": Speed(1e9, 1e9), "gpu": Speed(8e9, 8e9)})
    ledger.set_device(next(iter(ledger.rows)), "gpu")  # until it says itself what it is
    (row,) = Demands(cluster.scheduler).rows()
    assert (row["profile"], row["speeds"]) == ([(4.0, 1.0)], {"gpu": 8.0})
    del task


def seceding(number):
    secede()
    opened("coordinators")
    return number


@pytest.mark.parametrize("installed", [False, True], ids=["stock", "with the scheduler plugin"])
@on_cluster()
async def test_tasks_that_seceded_are_no_work_but_keep_their_workers_busy(client, cluster, installed):
    """Stock Dask counts them as no work either."""
    scheduler = cluster.scheduler
    away = [client.submit(seceding, number, pure=False) for number in range(6)]
    await until_async(
        lambda: sum(len(ws.long_running) for ws in scheduler.workers.values()) >= 6, "six that seceded"
    )
    assert Demands(scheduler).rows() == []
    facts = part_of(scheduler, ScalingRPC).roster()
    holders = {a for a, ws in scheduler.workers.items() if ws.long_running}
    assert {facts["workers"][address]["idle_for"] for address in holders} == {0.0}
    with annotated(2.0):
        after = client.submit(sum, away)
    await until_async(lambda: "sum" in scheduler.task_prefixes, "the sum to be submitted")
    (row,) = Demands(scheduler).rows()  # later, but it comes
    assert row["profile"][0][1] == 0.0
    assert row["profile"][-1] == pytest.approx((2.0, 1.0))
    event, held = await busy(client, cluster)
    with annotated(0.1):
        others = client.map(hold, ["roster"] * 40, range(40))
    await submitted(scheduler, 49)
    (sample,) = [d for d in Demands(scheduler, 20).rows() if d["workers"] is None]
    assert sample["profile"][0][1] * 0.1 == pytest.approx(4.0, rel=0.15)
    await event.set()
    await Event("coordinators").set()
    assert await after == 15
    await client.gather([*held, *others])


@on_cluster(workers=1)
async def test_what_is_costly_is_told_from_memory_until_it_has_changed_much(client, cluster, monkeypatch):
    roster = part_of(cluster.scheduler, ScalingRPC)
    calls, sizes = [], {100: 1, 150: 1, 200: 1, 201: 2, 101: 2, 99: 3, 1: 4}

    def costly():
        calls.append(time.sleep(0.02))
        return [len(calls)]

    monkeypatch.setattr(scheduler_rpc, "_SHARE", 1e6)
    monkeypatch.setattr(roster, "_until", 0.0)
    monkeypatch.setattr(roster._demands, "rows", costly)
    found = {}
    for size in sizes:
        monkeypatch.setattr(roster._demands, "remaining", lambda size=size: size)
        found[size] = roster.roster()["demands"][0]
    assert found == sizes


# ---- ends -----------------------------------------------------------------------------------------------


def about(seconds):
    """Seconds that a loaded machine may be off by some."""
    return pytest.approx(seconds, abs=4)


@pytest.mark.parametrize("installed", [False, True], ids=["stock", "with the scheduler plugin"])
@on_cluster()
async def test_ends_are_kept_by_name_for_workers_that_come_later_too(client, cluster, installed):
    """Of the last seconds a tenth, at most five, is for moving what a worker holds; the earliest end counts."""

    scheduler = cluster.scheduler
    now = time.time()
    roster, ends = cluster.scheduler_comm.ferro_roster, cluster.scheduler_comm.ferro_ends
    await roster(ends={"0": now + 100, "late": now + 50}, fresh=200.0)
    if installed:
        await ff.install(client)
    async with Worker(scheduler.address, name="late", nthreads=1):
        left = {str(row["name"]): row["ends_in"] for row in (await roster())["workers"].values()}
        assert left == {"0": about(95), "1": None, "late": about(45)}
        if installed:
            ledger = scheduler.extensions["stealing"].ledger
            names = {str(ws.name): address for address, ws in scheduler.workers.items()}
            known = {name: ledger.worker(address, now).ends_in for name, address in names.items()}
            assert known == {"0": about(95), "1": inf, "late": about(45)}
            assert ledger.fresh == 195.0
            await ends(ends={"0": now + 20})
            assert ledger.worker(names["0"], now).ends_in == about(18)
            await ends(ends={"0": now + 600})
            assert ledger.worker(names["0"], now).ends_in == about(95)
            await roster(ends={"0": None}, fresh=0.0)
            assert ledger.worker(names["0"], now).ends_in == about(595)
            await client.run_on_scheduler(take_off, name=ScalingRPC.name)
            assert (dict(ledger.ends), ledger.fresh) == ({}, 0.0)


@on_cluster()
async def test_ends_are_forgotten_with_their_workers_or_when_they_have_passed(client, cluster):
    roster = part_of(cluster.scheduler, ScalingRPC)
    now = time.time()
    await cluster.scheduler_comm.ferro_ends(ends={"0": now + 100, "passed": now - 1, "next": now + 50})
    await cluster.scheduler_comm.ferro_ends(ends={"1": now + 100})
    assert list(roster._own_ends) == ["0", "next", "1"]  # the one that has passed is gone
    (address,) = (a for a, ws in cluster.scheduler.workers.items() if ws.name == 0)
    await cluster.scheduler.remove_worker(address, stimulus_id="died")
    assert list(roster._own_ends) == ["next", "1"]  # one that a nanny starts again tells its own
    await cluster.scheduler_comm.ferro_roster(ends={"0": now - 1, "1": now - 1, "2": now + 60})
    await cluster.scheduler_comm.ferro_roster(ends={"3": None})
    assert list(roster._site_ends) == ["1", "2"]  # who is there has its end until it is gone


@on_cluster(workers=1)
async def test_what_is_reserved_of_a_workers_last_seconds_does_not_shrink_with_them(client, cluster):
    roster, now = cluster.scheduler_comm.ferro_roster, time.time()
    await roster(ends={"0": now + 10})
    await asyncio.sleep(2)
    for at in (10.0, 10.5):
        (row,) = (await roster(ends={"0": now + at}))["workers"].values()
        assert time.time() + row["ends_in"] == pytest.approx(now + 9, abs=0.3)


# ---- on and off -----------------------------------------------------------------------------------------


@on_cluster()
async def test_it_comes_on_once_and_leaves_nothing_behind(client, cluster):
    scheduler = cluster.scheduler
    own = {"ferro_roster", "ferro_leave", "ferro_ends"}
    first = part_of(scheduler, ScalingRPC)
    await scheduler_rpc.register(cluster.scheduler_comm)
    assert part_of(scheduler, ScalingRPC) is first
    assert own <= set(scheduler.handlers)
    await client.run_on_scheduler(take_off, name=ScalingRPC.name)
    assert not own & set(scheduler.handlers)
    assert NAME not in scheduler.plugins
    assert await client.submit(lambda: 7) == 7


async def test_an_error_of_its_start_reaches_the_caller(monkeypatch):
    def fails(roster, scheduler):
        raise ZeroDivisionError("at the start")

    monkeypatch.setattr(ScalingRPC, "start", fails)
    async with Scheduler(port=0, dashboard_address=":0") as scheduler, rpc(scheduler.address) as calls:
        with pytest.raises(ZeroDivisionError, match="at the start"):
            await scheduler_rpc.register(calls)
        assert NAME not in scheduler.plugins


@on_cluster(installed=True)
async def test_it_goes_on_where_stealing_and_placement_are_taken_off(client, cluster):
    roster = part_of(cluster.scheduler, ScalingRPC)
    await ff.uninstall(client)
    assert type(cluster.scheduler.extensions["stealing"]) is WorkStealing
    assert part_of(cluster.scheduler, ScalingRPC) is roster
    assert set((await cluster.scheduler_comm.ferro_roster())["workers"]) == set(cluster.scheduler.workers)
