"""Workers that leave: nothing is lost, nothing runs twice, and those that may not leave stay, and say why."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import asynccontextmanager
from math import inf

import dask
import psutil
import pytest
from dask.utils import parse_bytes
from distributed import Event, Status, Worker
from distributed.diagnostics.plugin import SchedulerPlugin

import dask_ferro as ff
from dask_ferro.elastic import evacuation
from dask_ferro.elastic.recompute import Recompute
from dask_ferro.elastic.scheduler_rpc import ScalingRPC
from dask_ferro.scheduler.plugin import part_of, put_on
from tests import clusters
from tests.clusters import running
from tests.waiting import finished, finished_async, opened, until_async

MEMORY = "distributed.worker.memory"
NO_PAUSE = {f"{MEMORY}.pause": False}  # workers in one process would pause for what another one holds
NO_SPILL = {**NO_PAUSE, f"{MEMORY}.spill": False}
MB = 2**20
RAN: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _nothing_ran():
    RAN.clear()


def ran(name, seconds=0.0, nbytes=0):
    """Count, take some time, and return some bytes."""
    RAN[name] += 1
    time.sleep(seconds)
    return bytes(nbytes)


def held_up(name, event):
    RAN[name] += 1
    opened(event)
    return name


async def occupied(client, worker, event, name="task"):
    """Let a worker run a task until the event is set; it may start anew elsewhere."""
    task = client.submit(held_up, name, event, **loosely(worker))
    await started(name)
    return task


async def let_end(client, event, task):
    await Event(event, client).set()
    return await task


def loosely(worker):
    return {"workers": [worker.address], "allow_other_workers": True}


def in_this_process(limit):
    """Return a memory limit that leaves a worker the room that it would have in a small process.

    All workers count what this process holds as theirs: 200 MB by itself, 1 GB after other tests.
    """
    others = max(psutil.Process().memory_info().rss - 200_000_000, 0)
    return limit and parse_bytes(limit) + int(others / 0.6)


@asynccontextmanager
async def workers(*limits, installed=False, config=None):
    """Open workers with these memory limits."""
    options = {"protocol": "tcp", "roster": True, "installed": installed}
    if config is None:
        limits = [in_this_process(limit) for limit in limits]
    named = {str(i): {"memory_limit": limit} for i, limit in enumerate(limits)}
    async with clusters.opened(named, config=NO_PAUSE | (config or {}), **options) as given:
        yield given


on_workers = clusters.plays(workers, "client", "scheduler", "workers")


def recomputed(scheduler):
    """Return the results that were computed more than once."""
    done = Counter(row.key for row in scheduler.transition_log if row[1:3] == ("processing", "memory"))
    return {key: count for key, count in done.items() if count > 1}


async def leave(client, *workers, seconds=None, must=False):
    addresses = [getattr(worker, "address", worker) for worker in workers]
    answer = await client.scheduler.ferro_leave(addresses=addresses, seconds=seconds, must=must)
    assert {*answer["left"], *answer["stayed"]} == set(addresses)
    return answer["stayed"]


async def leaving(client, scheduler, worker):
    """Ask a worker to leave, and return that request when it has begun to."""
    departure, state = asyncio.ensure_future(leave(client, worker)), scheduler.workers[worker.address]
    await until_async(
        lambda: state.status == Status.closing_gracefully, "the leave to begin", seen=lambda: state.status
    )
    return departure, state


async def sent_away(client, *workers, seconds):
    """Order workers to leave; return what is lost."""
    addresses = [worker.address for worker in workers]
    answer = await client.scheduler.ferro_leave(addresses=addresses, seconds=seconds, ordered=True)
    assert (sorted(answer["left"]), dict(answer["stayed"])) == (sorted(addresses), {})
    return answer["lost"]


async def started(name, count=1):
    await until_async(
        lambda: RAN[name] >= count, f"{count} starts of {name!r}", every=0.005, seen=lambda: dict(RAN)
    )


# ---- what leavers hold ----------------------------------------------------------------------------------


@pytest.mark.cluster
def test_four_to_one_loses_none_of_twenty_held_results_though_a_receiver_is_killed_meanwhile():
    """Stock: of 4 -> 1 with 20 held results, 15 are lost and computed again."""
    with running(4) as client:
        client.run_on_scheduler(put_on, part=ScalingRPC())
        *leavers, stays, killed = list(client.cluster.scheduler.workers)
        held = [client.submit(bytes, 3 * MB + i, workers=[leavers[i % 2]]) for i in range(20)]
        scattered = client.scatter(bytes(5000), workers=leavers[:1])
        finished(held)
        pid = client.cluster.scheduler.workers[killed].pid

        async def go():
            going = asyncio.ensure_future(client.cluster.scheduler_comm.ferro_leave(addresses=leavers))
            moving = part_of(client.cluster.scheduler, ScalingRPC).leaving.moving
            await until_async(lambda: moving.moves, "a move that has begun", every=0.001)
            os.kill(pid, signal.SIGKILL)
            return await going

        answer = client.sync(go)
        assert (sorted(answer["left"]), dict(answer["stayed"])) == (sorted(leavers), {})
        assert [len(value) for value in client.gather(held)] == [3 * MB + i for i in range(20)]
        assert len(client.gather(scattered)) == 5000
        assert stays in client.cluster.scheduler.workers
        assert recomputed(client.cluster.scheduler) == {}


# ---- what leavers run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [False, True], ids=["stock", "with the scheduler plugin"])
@on_workers("1GB", "1GB")
async def test_four_leaves_during_a_running_task_end_it_once_and_hand_back_what_waits(
    client, scheduler, workers, installed
):
    """Stock: four scale-downs during one task are four deaths, and a KilledWorker."""
    leaver, other = workers
    running = await occupied(client, leaver, "four", "running")
    waiting = [client.submit(ran, f"w{i}", **loosely(leaver)) for i in range(10)]
    await until_async(
        lambda: installed or len(leaver.state.tasks) >= 2, "tasks that wait at the leaver", every=0.005
    )
    going = [asyncio.ensure_future(leave(client, leaver)) for _ in range(4)]
    await finished_async(waiting)
    # Under the plugin they may have run elsewhere before the leaver was told to leave.
    await until_async(
        lambda: scheduler.workers[leaver.address].status == Status.closing_gracefully, "the leaver to be told"
    )
    assert (leaver.address in scheduler.workers, any(task.done() for task in going)) == (True, False)
    await Event("four", client).set()
    assert await asyncio.gather(*going) == [{}] * 4
    assert list(scheduler.workers) == [other.address]
    assert await running == "running"
    assert set(RAN.values()) == {1}
    assert scheduler.tasks[running.key].suspicious == 0
    claimed = getattr(scheduler.stream_handlers["steal-response"], "rest", None)
    assert claimed is None


@on_workers("1GB", "1GB")
async def test_when_the_time_is_over_running_tasks_start_elsewhere_and_nobody_is_blamed(
    client, scheduler, workers
):
    leaver, other = workers
    kept = client.submit(ran, "kept", workers=[leaver.address])
    running = await occupied(client, leaver, "late", "running")
    assert await leave(client, leaver, seconds=0.1) == {}
    await started("running", 2)
    assert await let_end(client, "late", running) == "running"
    await kept
    assert (RAN["running"], RAN["kept"]) == (2, 1)
    assert scheduler.tasks[running.key].suspicious == 0
    assert list(scheduler.workers) == [other.address]


@on_workers("1GB", "1GB")
async def test_a_later_call_may_leave_less_time(client, scheduler, workers):
    leaver, _ = workers
    running = await occupied(client, leaver, "less", "running")
    patient = asyncio.ensure_future(leave(client, leaver))
    await asyncio.sleep(0.05)
    assert await leave(client, leaver, seconds=0.0) == {}
    assert await patient == {}
    assert await let_end(client, "less", running) == "running"


@on_workers("1GB", "1GB")
async def test_installing_the_scheduler_plugin_meanwhile_loses_no_answer(client, scheduler, workers):
    leaver = workers[0]
    running = await occupied(client, leaver, "install", "running")
    waiting = [client.submit(ran, f"w{i}", **loosely(leaver)) for i in range(50)]
    going = asyncio.ensure_future(leave(client, leaver))
    for _ in range(2):
        await ff.install(client)
        await ff.uninstall(client)
    await finished_async(waiting)
    await Event("install", client).set()
    assert await going == {}
    await running
    assert set(RAN.values()) == {1}
    assert scheduler.stream_handlers["steal-response"].__self__ is scheduler.extensions["stealing"]


# ---- workers that may not leave ----------------------------------------------------------------------------------


class Counting:
    count = 0

    def add(self):
        self.count += 1
        return self.count


class Needing(SchedulerPlugin):
    name = "needing"

    def valid_workers_downscaling(self, scheduler, workers):
        return [ws for ws in workers if ws.name != "0"]


async def _results(client, workers):
    held = [client.submit(ran, str(w.name), nbytes=MB, workers=[w.address]) for w in workers]
    await finished_async(held)
    return held, workers, "no worker would remain to take over their results"


async def _too_much(client, workers):
    held = [client.submit(ran, str(i), nbytes=30 * MB, workers=[workers[0].address]) for i in range(9)]
    await finished_async(held)
    return held, workers[:1], "does not fit in the "


async def _actor(client, workers):
    counter = await client.submit(Counting, actor=True, workers=[workers[0].address])
    assert await counter.add() == 1
    return counter, workers[:1], "actors cannot move: Counting"


async def _bound(client, workers):
    task = client.submit(ran, "bound", seconds=0.3, workers=[workers[0].address])
    await started("bound")
    return task, workers[:1], "tasks may run nowhere else: ran"


async def _running(client, workers):
    task = client.submit(ran, "anywhere", seconds=0.3)
    await started("anywhere")
    return task, workers, "no worker would remain to run their tasks"


async def _needed(client, workers):
    await client.register_plugin(Needing())
    return None, workers[:1], "a scheduler plugin needs "


@pytest.mark.parametrize("seconds", [None, 3600.0], ids=["at any time", "within an hour"])
@pytest.mark.parametrize(
    "scene",
    [
        pytest.param(_results, id="all of those that hold something"),
        pytest.param(_too_much, id="one that holds more than the others have room for"),
        pytest.param(_actor, id="one with an actor"),
        pytest.param(_bound, id="one that alone may run a task"),
        pytest.param(_running, id="all while something is to be done"),
        pytest.param(_needed, id="one that a plugin needs"),
    ],
)
@on_workers(300 * MB, 300 * MB)
async def test_stays_and_takes_tasks_again(client, scheduler, workers, scene, seconds):
    kept, leavers, why = await scene(client, workers)
    stayed = await leave(client, *leavers, seconds=seconds)
    assert set(stayed) == {w.address for w in leavers}
    assert all(why in reason for reason in stayed.values())
    assert await client.submit(lambda: 7, workers=[leavers[0].address]) == 7
    assert {ws.status for ws in scheduler.workers.values()} == {Status.running}
    (event,) = [e for _, e in scheduler.get_events("ferro") if e["action"] == "retire_failed"]
    assert event["workers"] == sorted(stayed)
    assert set(RAN.values()) <= {1}
    del kept


@on_workers("1GB", "1GB")
async def test_without_results_and_tasks_all_may_leave_and_those_that_are_gone_have_left(
    client, scheduler, workers
):
    assert await leave(client, *workers, "tcp://127.0.0.1:1") == {}
    assert not scheduler.workers
    later = client.submit(lambda: 7)
    async with Worker(scheduler.address, nthreads=1):
        assert await later == 7


@on_workers("1GB", "1GB", "1GB")
async def test_those_of_the_same_moment_do_not_receive_from_each_other(client, scheduler, workers):
    first, second, third = workers
    held = [client.submit(ran, str(i), nbytes=MB, workers=[first.address]) for i in range(20)]
    await finished_async(held)
    assert await asyncio.gather(leave(client, first), leave(client, second)) == [{}, {}]
    assert (len(third.data), list(second.transfer_incoming_log)) == (20, [])
    events = [e for _, e in scheduler.get_events("ferro") if e["action"] == "retiring"]
    assert sorted(e["keys"] for e in events) == [0, 20]


# ---- workers that must leave -------------------------------------------------------------------------------------


@on_workers("4GB", "4GB", 300 * MB, config=NO_SPILL)
async def test_of_those_that_must_leave_as_much_moves_as_fits_and_nothing_runs_there(
    client, scheduler, workers
):
    """Both processes of a job are judged alike: the one without an actor stays as well."""
    leaver, second, other = workers
    counter = await client.submit(Counting, actor=True, workers=[leaver.address])
    scattered = await client.scatter(bytes(MB), workers=[leaver.address])
    held = [client.submit(ran, str(i), nbytes=(20 + i) * MB, workers=[leaver.address]) for i in range(16)]
    await finished_async(held)
    task = await occupied(client, leaver, "must")
    stayed = await leave(client, leaver, second, seconds=0.1, must=True)
    assert stayed == dict.fromkeys([leaver.address, second.address], "actors cannot move: " + counter.key)
    await started("task", 2)
    assert await let_end(client, "must", task) == "task"
    moved = sum(len(other.data.get(f.key, b"")) for f in held)
    assert 300 * MB - 36 * MB < moved < 300 * MB  # its limit, though 180 MB is where it begins to spill
    assert scattered.key in other.data
    assert {ws.name: ws.status.name for ws in scheduler.workers.values()} == {
        "0": "closing_gracefully",
        "1": "closing_gracefully",
        "2": "running",
    }
    assert scheduler.tasks[task.key].suspicious == 0
    # It is put off: they take tasks again.
    for seconds in (100, 500):
        await client.scheduler.ferro_roster(ends=dict.fromkeys("01", time.time() + seconds))
    assert await client.submit(lambda: 7, workers=[leaver.address]) == 7
    assert await leave(client, second) == {}
    assert max(RAN[str(i)] for i in range(16)) == 1


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        pytest.param(None, ["large", "dear", "small"], id="time is not bounded, as they are packed"),
        pytest.param(30.0, ["scattered", "dear", "small", "large"], id="time is bounded, what is worth most"),
    ],
)
@on_workers("1GB", "1GB")
async def test_of_leavers_is_fetched_first_where(client, scheduler, workers, seconds, wanted, monkeypatch):
    """Worth: the seconds of compute that would be spent again, by the byte."""

    fetched, copy_to = [], evacuation.upstream.copy_to

    def spy(scheduler, address, keys, stimulus_id):
        fetched.extend(keys)
        copy_to(scheduler, address, keys, stimulus_id)

    monkeypatch.setattr(evacuation.upstream, "copy_to", spy)
    leaver, _ = workers
    held = []
    for name, nbytes, takes in (("small", MB, 1.0), ("large", 9 * MB, 5.0), ("dear", 2 * MB, 60.0)):
        with dask.annotate(ferro={"seconds": takes}):
            held.append(client.submit(ran, name, nbytes=nbytes, workers=[leaver.address], key=name))
    if "scattered" in wanted:
        held.append((await client.scatter({"scattered": bytes(MB)}, workers=[leaver.address]))["scattered"])
    await finished_async(held)
    assert await leave(client, leaver, seconds=seconds) == {}
    assert fetched == wanted


@on_workers("1GB", "1GB")
async def test_a_result_stands_for_its_inputs_too_that_nobody_holds_any_more(client, scheduler, workers):
    with dask.annotate(ferro={"seconds": 8.0}):
        source = client.submit(ran, "source", key="source")
    with dask.annotate(ferro={"seconds": 1.0}):
        left, right = (client.submit(lambda _: 1, source, key=key) for key in ("left", "right"))
    scattered = await client.scatter(5)
    await finished_async([left, right])

    def seconds(key):
        return Recompute(scheduler).seconds(scheduler.tasks[key])

    assert seconds("left") == 1.0  # its input is held
    source.release()
    await until_async(lambda: scheduler.tasks["source"].state == "released", "the input to be gone")
    assert seconds("left") == seconds("right") == 1.0 + 8.0 / 2  # no second counts twice
    assert seconds(scattered.key) == inf  # no worker could compute it


@on_workers("1GB", "1GB")
async def test_when_the_cluster_ends_nobody_leaves_any_more(client, scheduler, workers):
    """Jobs are cancelled next, and wait for no answer that would come too late."""
    first, second = workers
    task = await occupied(client, first, "over")
    leaving = asyncio.ensure_future(leave(client, first, must=True))
    await until_async(lambda: part_of(scheduler, ScalingRPC).leaving.is_on, "somebody to leave")
    await client.scheduler.ferro_over()
    assert await leaving == {first.address: "leaving was stopped"}
    answer = await client.scheduler.ferro_leave(addresses=[second.address], must=True)
    assert (answer["stayed"], answer["over"]) == ({second.address: "the cluster ends"}, True)
    assert await let_end(client, "over", task) == "task"


@pytest.mark.parametrize("together", [False, True])
@on_workers("1GB", "1GB", "1GB")
async def test_the_last_of_those_that_must_leave_goes_on_until_another_comes(
    client, scheduler, workers, together
):
    """Their jobs were submitted together, and end together: a cluster whose workers take no tasks waits for nothing."""

    held = [client.submit(ran, f"{w.name}", nbytes=MB, workers=[w.address]) for w in workers]
    await finished_async(held)
    if together:
        stayed = set().union(
            *await asyncio.gather(*(leave(client, w, seconds=60.0, must=True) for w in workers))
        )
    else:
        stayed = set().union(*[await leave(client, w, seconds=60.0, must=True) for w in workers])
    (last,) = (worker for worker in workers if worker.address in stayed)
    assert [ws.status.name for ws in scheduler.workers.values()] == ["running"]
    assert {f.key for f in held} <= last.data.keys()
    assert await client.submit(lambda: 7) == 7
    async with Worker(scheduler.address, nthreads=1, name="successor") as successor:
        assert await leave(client, last, seconds=50.0, must=True) == {}
        assert {f.key for f in held} <= successor.data.keys()
        assert await client.gather(held) == [bytes(MB)] * len(held)
    assert not recomputed(scheduler)


@on_workers("1GB")
async def test_the_last_one_takes_no_tasks_at_its_very_end(client, scheduler, workers):
    held = client.submit(ran, "held", nbytes=MB)
    await finished_async([held])
    assert await leave(client, workers[0], seconds=0.1, must=True)
    assert [ws.status.name for ws in scheduler.workers.values()] == ["closing_gracefully"]


@on_workers("1GB", "1GB", "1GB")
async def test_who_must_leave_and_cannot_holds_nobody_up(client, scheduler, workers):
    first, second, third = workers
    held = [client.submit(ran, str(w.name), nbytes=MB, workers=[w.address]) for w in (first, second)]
    await finished_async(held)
    counter = await client.submit(Counting, actor=True, workers=[first.address])
    task = await occupied(client, first, "nobody")
    must = asyncio.ensure_future(leave(client, first, must=True))
    assert await leave(client, second) == {}
    await Event("nobody", client).set()
    assert list(await must) == [first.address]
    assert await task == "task"
    assert {f.key for f in held} <= third.data.keys()
    assert await counter.add() == 1


# ---- workers that are ordered to leave ----------------------------------------------------------------------------


@on_workers("4GB", 300 * MB, config=NO_SPILL)
async def test_on_an_order_what_fits_is_moved_and_the_rest_is_lost_and_told(client, scheduler, workers):
    """300 MB have room for 10 of 12 results of 27 MB; what is lost is computed again when it is asked for."""
    leaver, other = workers
    held = [client.submit(ran, str(i), nbytes=27 * MB, **loosely(leaver)) for i in range(12)]
    await finished_async(held)
    lost = await sent_away(client, leaver, seconds=30.0)
    moved = [f for f in held if f.key in other.data]
    count = len(held) - len(moved)
    assert 1 <= count <= 4
    assert (lost["results"], lost["for_good"]) == (count, 0)
    assert count * 27 * MB <= lost["nbytes"] <= count * 28 * MB
    assert [ws.name for ws in scheduler.workers.values()] == ["1"]
    del moved
    (event,) = [e for _, e in scheduler.get_events("ferro") if e["action"] == "retired"]
    assert (event["results"], event["nbytes"]) == (count, lost["nbytes"])
    for future in held[:-1]:
        future.release()  # room for one
    assert len(await held[-1]) == 27 * MB


@on_workers("1GB", "1GB")
async def test_on_an_order_running_tasks_have_their_time_and_then_start_elsewhere(client, scheduler, workers):
    leaver, _ = workers
    short = client.submit(ran, "short", 0.2, **loosely(leaver))
    await started("short")
    task = client.submit(held_up, "task", "order", **loosely(leaver))
    await asyncio.wait_for(short, 30)
    await started("task")
    assert (await sent_away(client, leaver, seconds=0.3))["results"] == 0
    await started("task", 2)
    assert await let_end(client, "order", task) == "task"
    assert await short == b""
    assert (RAN["short"], scheduler.tasks[task.key].suspicious) == (1, 0)


@on_workers("1GB", "1GB")
async def test_an_order_to_all_is_obeyed_at_once(client, scheduler, workers):
    """No worker stays that could take data: neither the time nor the running task is waited for."""
    one, other = workers
    held = client.submit(ran, "held", nbytes=MB)
    await held
    copied = await client.scatter(bytes(MB), broadcast=True)
    counter = await client.submit(Counting, actor=True, workers=[one.address])
    task = client.submit(held_up, "task", "all")
    await started("task")
    began = time.monotonic()
    lost = await sent_away(client, one, other, seconds=3600.0)
    assert time.monotonic() - began < 60.0  # of 3600
    assert (lost["results"], lost["for_good"]) == (3, 2)  # of two copies one result, scattered; the actor
    assert scheduler.workers == {}
    async with Worker(scheduler.address, nthreads=1, memory_limit=0):
        await Event("all", client).set()
        assert (await task, len(await held)) == ("task", MB)
    assert (RAN["task"], RAN["held"], scheduler.tasks[task.key].suspicious) == (2, 2, 0)
    del copied, counter


@on_workers("1GB", "1GB")
async def test_an_order_overtakes_a_leave(client, scheduler, workers):
    leaver, _ = workers
    task = await occupied(client, leaver, "overtaken")
    departure, _ = await leaving(client, scheduler, leaver)
    assert (await sent_away(client, leaver, seconds=0.1))["results"] == 0
    assert await departure == {}
    await started("task", 2)
    assert await let_end(client, "overtaken", task) == "task"


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([{"must": True, "ordered": True}], id="both in one request"),
        pytest.param([{"must": True}, {"ordered": True}], id="the order comes later"),
        pytest.param([{"ordered": True}, {"must": True}], id="the order comes first"),
    ],
)
@on_workers("1GB", "1GB")
async def test_an_order_to_a_worker_that_must_leave_is_obeyed_and_its_loss_reported(
    client, scheduler, workers, requests
):
    """Its job ends soon, and nothing could move the actor; the caller of an order ends the job in any case."""
    leaver, _ = workers
    counter = await client.submit(Counting, actor=True, workers=[leaver.address])
    task = await occupied(client, leaver, "both")

    def asked(seconds, **how):
        answer = client.scheduler.ferro_leave(addresses=[leaver.address], seconds=seconds, **how)
        return asyncio.ensure_future(answer)

    going = [asked(60.0, **how) for how in requests[:-1]]
    if going:
        state = scheduler.workers[leaver.address]
        await until_async(lambda: state.status == Status.closing_gracefully, "the leave to begin")
    answers = await asyncio.gather(*going, asked(0.1, **requests[-1]))
    assert await let_end(client, "both", task) == "task"
    for answer in answers:
        assert (list(answer["left"]), answer["stayed"]) == ([leaver.address], {})
        assert (answer["lost"]["results"], answer["lost"]["for_good"]) == (1, 1)
    del counter


# ---- all at once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [False, True], ids=["stock", "with the scheduler plugin"])
@on_workers("1GB", "1GB", "1GB")
async def test_while_workers_come_and_go_a_graph_is_computed_once_and_right(
    client, scheduler, workers, installed
):
    layer = client.map(count_one, range(60), key=[f"a{i}" for i in range(60)])
    for depth in range(4):
        pairs = zip(layer, layer[1:] + layer[:1], strict=True)
        layer = [client.submit(count_one, *pair, key=f"{depth}-{i}") for i, pair in enumerate(pairs)]
    for turn in range(6):
        gone = workers[turn : turn + 2]
        workers.append(await Worker(scheduler.address, nthreads=1, memory_limit="1GB"))
        await asyncio.gather(*(leave(client, w) for w in gone))
        workers.append(await Worker(scheduler.address, nthreads=1, memory_limit="1GB"))
    assert sum(await client.gather(layer)) == sum(range(60)) * 2**4
    assert set(RAN.values()) == {1}
    assert len(RAN) == 300
    assert recomputed(scheduler) == {}


def count_one(*parts):
    from distributed import get_worker

    RAN[get_worker().get_current_task()] += 1
    time.sleep(0.01)
    return sum(parts)
