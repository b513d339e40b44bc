"""The scheduler plugin on real schedulers: it comes on, leaves nothing behind, and counts right."""

from __future__ import annotations

import asyncio
import gc
import importlib
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from distributed import Client, Event, Scheduler, Worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.stealing import WorkStealing
from tornado.httpclient import AsyncHTTPClient

import dask_ferro as ff
from dask_ferro.elastic.scheduler_rpc import ScalingRPC
from dask_ferro.errors import InputError
from dask_ferro.policy.stealing.informed import StealingParameters
from dask_ferro.scheduler import reach, upstream
from dask_ferro.scheduler.plugin import FerroScheduler, part_of, plugin_of, put_on, take_off
from dask_ferro.scheduler.scheduling import Scheduling
from dask_ferro.scheduler.settings import Settings
from dask_ferro.scheduler.stealing import Stealing
from tests.clusters import UNCHECKED, on_cluster, tuned
from tests.waiting import finished_async, opened, until, until_async

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
NO_STEALING = {"distributed.scheduler.work-stealing": False}


def _dependents(client, event, count, worker, **kwargs):
    """Tasks that wait for one blocked task on `worker`, where they would rather be."""

    def block(name):
        opened(name)

    blocker = client.submit(block, event, workers=[worker], key="blocker")
    kwargs = {"workers": [worker], "allow_other_workers": True, "pure": False, **kwargs}
    return blocker, [client.submit(lambda i: i, i, key=f"one-{i}", **kwargs) for i in range(count)]


@on_cluster(installed=True, parameters={"saturated": 0.0, "tick": 0.02})
async def test_messages_are_gathered_as_dask_does_while_the_loop_is_saturated(client, scheduler):
    await until_async(
        lambda: {s.interval for s in scheduler.stream_comms.values()} == {upstream.WORKER_SENDS},
        "all workers have Dask's interval",
    )


@on_cluster(protocol="tcp", host="127.0.0.1")
async def test_a_client_that_accepts_plain_values_alone_can_install(scheduler):
    """Within a process, nothing is serialized."""
    async with Client(scheduler.address, asynchronous=True, deserializers=["msgpack"]) as plain:
        for stealing in ("none", "none", "informed"):
            await ff.install(plain, bundles=True, stealing=stealing)
            assert part_of(scheduler, Scheduling).settings.stealing == stealing
        await ff.uninstall(plain)
    assert plugin_of(scheduler) is None


@on_cluster()
async def test_install_takes_over_and_uninstall_gives_stock_dask_back(client, scheduler):
    before = set(scheduler.handlers), len(scheduler.plugins)
    await ff.install(client)
    await ff.install(client)  # twice is once
    assert isinstance(scheduler.extensions["stealing"], Stealing)
    assert scheduler.stream_handlers["steal-response"].__self__ is scheduler.extensions["stealing"]
    assert [p for p in scheduler.plugins.values() if isinstance(p, FerroScheduler | WorkStealing)] == [
        plugin_of(scheduler)
    ]
    assert {s.interval for s in scheduler.stream_comms.values()} == {0.001}
    assert "ferro-worker" in scheduler.worker_plugins
    await ff.uninstall(client)
    await ff.uninstall(client)
    stock = scheduler.extensions["stealing"]
    assert type(stock) is WorkStealing
    assert scheduler.stream_handlers["steal-response"].__self__ is stock
    assert scheduler.periodic_callbacks["stealing"].callback == stock.balance
    assert "ferro-worker" not in scheduler.worker_plugins
    assert "decide_worker_non_rootish" not in vars(scheduler)
    assert "decide_worker_rootish_queuing_enabled" not in vars(scheduler)
    assert {s.interval for s in scheduler.stream_comms.values()} == {upstream.WORKER_SENDS}
    assert [name for name in map(str, scheduler.plugins) if "ferro" in name] == []
    assert (set(scheduler.handlers), len(scheduler.plugins)) == before
    assert await client.submit(lambda: 7) == 7


@on_cluster(roster=True)
async def test_no_plugin_lives_on_after_it_was_replaced_or_removed(client, scheduler, workers):
    """Dask keeps each handler that a client has called, with the object that it is a method of."""
    gone = [weakref.ref(part_of(scheduler, ScalingRPC))]
    for answer in (1, 2, 3):
        await ff.install(client, bundles=True, timeout=answer)
        await client.gather(client.map(abs, range(8), pure=False))
        await client.scheduler.ferro_roster()
        plugin = plugin_of(scheduler)
        ours = [plugin, *plugin.parts.values(), *(worker.plugins["ferro-worker"] for worker in workers)]
        gone += [weakref.ref(one) for one in [*ours, scheduler.extensions["stealing"]]]
        if answer > 1:
            await ff.uninstall(client)
    await client.run_on_scheduler(take_off, name=ScalingRPC.name)
    del ours, plugin

    def left():
        gc.collect()
        return [type(one).__name__ for ref in gone if (one := ref()) is not None]

    assert len(gone) > 12
    await until_async(lambda: not left(), "the end of all plugins", seen=left)


@on_cluster()
async def test_install_and_uninstall_in_the_middle_of_work_lose_nothing(client, scheduler):
    worker = next(iter(scheduler.workers))
    blocker, tasks = _dependents(client, "mid", 40, worker)
    await asyncio.sleep(0.05)
    for _ in range(3):
        await ff.install(client)
        await asyncio.sleep(0.02)
        await ff.uninstall(client)
    await ff.install(client)
    await Event("mid").set()
    assert await client.gather(tasks) == list(range(40))
    await blocker
    stealing = scheduler.extensions["stealing"]
    assert not stealing.in_flight
    assert not stealing.ledger.entries
    await ff.uninstall(client)


@on_cluster()
async def test_clients_that_install_and_uninstall_at_once_leave_one_stealer(client, scheduler):
    async with Client(scheduler.address, asynchronous=True) as other:
        await asyncio.gather(ff.install(client, timeout=1), ff.install(other, timeout=3))
        stealing = scheduler.extensions["stealing"]
        assert isinstance(stealing, Stealing)
        assert [p for p in scheduler.plugins.values() if isinstance(p, WorkStealing)] == []
        assert part_of(scheduler, Scheduling).stealing is stealing
        assert scheduler.periodic_callbacks["stealing"].callback == stealing._tick
        assert scheduler.stream_handlers["steal-response"] == stealing.move_task_confirm
        await asyncio.gather(ff.uninstall(client), ff.uninstall(other))
        stock = scheduler.extensions["stealing"]
        assert [p for p in scheduler.plugins.values() if isinstance(p, WorkStealing)] == [stock]
        assert type(stock) is WorkStealing
        assert scheduler.periodic_callbacks["stealing"].callback == stock.balance


@pytest.mark.parametrize("config", [{}, NO_STEALING], ids=["stock", "nobody is there for late answers"])
@on_cluster()
async def test_uninstall_in_mid_steal_loses_neither_the_task_nor_the_worker(client, scheduler, config):
    with tuned(shortest=0.0):
        await ff.install(client, stealing="informed")
    first = next(iter(scheduler.workers))
    stealing = scheduler.extensions["stealing"]
    blocker, tasks = _dependents(client, "mid-steal", 20, first)
    await until_async(lambda: stealing.in_flight, "a request", every=0)
    await ff.uninstall(client)
    await Event("mid-steal").set()
    assert await client.gather(tasks) == list(range(20))
    await blocker
    assert len(scheduler.workers) == 2


@on_cluster()
async def test_stock_dask_does_not_steal_while_other_settings_replace_the_first(
    client, scheduler, monkeypatch
):
    """Workers may take seconds to answer; until they have, what was installed goes on."""
    await ff.install(client)
    whose = []

    def watched(call):
        async def called(*arguments, **options):
            late = await call(*arguments, **options)
            whose.append(scheduler.extensions["stealing"].settings.stealing)
            return late

        return called

    for name in ("put_on", "take_off"):
        monkeypatch.setattr(reach, name, watched(getattr(reach, name)))
    await ff.install(client, stealing="none")
    await ff.uninstall(client)
    assert whose == ["none", "none"]  # they are asked once for the replacement, and once for the end
    assert type(scheduler.extensions["stealing"]) is WorkStealing


@on_cluster()
async def test_an_install_that_fails_leaves_stock_dask(client, scheduler):
    part = Scheduling(replace(Settings.configured(), tick=0))
    with pytest.raises(ValueError, match="positive"):
        await put_on(part, dask_scheduler=scheduler)
    assert plugin_of(scheduler) is None
    assert type(scheduler.extensions["stealing"]) is WorkStealing
    assert scheduler.periodic_callbacks["stealing"].callback == scheduler.extensions["stealing"].balance
    await ff.install(client)
    assert isinstance(scheduler.extensions["stealing"], Stealing)


@on_cluster(config=NO_STEALING)
async def test_stock_stealing_that_was_off_stays_off_afterwards(client, scheduler):
    assert "stealing" not in scheduler.extensions
    await ff.install(client)
    assert isinstance(scheduler.extensions["stealing"], Stealing)
    await ff.uninstall(client)
    assert "stealing" not in scheduler.extensions
    assert "stealing" not in scheduler.periodic_callbacks


@on_cluster(installed=True, parameters={"shortest": 0.0})
async def test_idle_workers_take_over_a_backlog_shorter_than_stock_dask_looks_at(client, scheduler):
    first, second = scheduler.workers
    blocker, tasks = _dependents(client, "backlog", 20, first)
    await finished_async(tasks)
    assert {ws.address for t in tasks for ws in scheduler.tasks[t.key].who_has} == {second}
    assert scheduler.extensions["stealing"].counts["confirmed"] >= 10
    await Event("backlog").set()
    await blocker


@on_cluster(resources={"GPU": 1}, installed=True, parameters={"shortest": 0.0})
async def test_resource_accounting_stays_exact_through_moves(client, scheduler):

    def work(i):
        time.sleep(0.01)
        return i

    where = {"workers": [next(iter(scheduler.workers))], "allow_other_workers": True}
    tasks = client.map(work, range(40), resources={"GPU": 1}, **where)
    assert await client.gather(tasks) == list(range(40))
    assert scheduler.extensions["stealing"].counts["confirmed"] > 0
    assert [dict(ws.used_resources) for ws in scheduler.workers.values()] == [{"GPU": 0}] * 2


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="unknown tresh"):
        Settings.configured(tresh=1)
    with pytest.raises(InputError, match="timeout='x'"):
        Settings.configured(timeout="x")
    with pytest.raises(InputError, match=r"wanted a distributed\.Client"):
        ff.install("tcp://localhost:8786")


@on_cluster(config={"distributed.scheduler.preload": ["dask_ferro.scheduler.preload"]})
async def test_by_configuration_the_plugin_is_on_from_the_start(client, scheduler):
    assert isinstance(scheduler.extensions["stealing"], Stealing)
    assert [t for t in scheduler.periodic_callbacks if t == "stealing"] == ["stealing"]
    assert scheduler.extensions["stealing"].settings.stealing == "informed"
    await ff.uninstall(client)
    assert type(scheduler.extensions["stealing"]) is WorkStealing


@on_cluster(installed=True, parameters={"shortest": 0.0})
async def test_dasks_own_stealing_page_and_metrics_go_on_working(client, scheduler):
    first = next(iter(scheduler.workers))
    blocker, tasks = _dependents(client, "metrics", 20, first)
    await finished_async(tasks)
    fetch = AsyncHTTPClient().fetch
    root = f"http://127.0.0.1:{scheduler.http_server.port}"
    assert (await fetch(f"{root}/stealing")).code == 200
    metrics = (await fetch(f"{root}/metrics")).body.decode()
    counts = [line.split() for line in metrics.splitlines() if line.startswith("dask_stealing_request_count")]
    assert sum(float(value) for name, value in counts if "_created" not in name) >= 10
    requests = [entry for _, entry in scheduler.get_events("stealing") if entry[0] == "request"]
    assert {len(line) for _, lines in requests for line in lines} == {8}
    await Event("metrics").set()
    await blocker


@on_cluster(installed=True, parameters={"shortest": 0.0, "threshold": 0.2})
async def test_the_threshold_of_a_thief_adapts_and_its_history_is_kept(client, scheduler):
    first, second = scheduler.workers
    blocker, tasks = _dependents(client, "adapts", 40, first)
    await finished_async(tasks)
    await Event("adapts").set()
    await blocker
    stealing = scheduler.extensions["stealing"]
    await client.submit(str)
    stealing.balance()
    # It follows the measured times, whatever these are on a busy machine.
    assert stealing.core.state.thresholds[second] != StealingParameters().threshold
    assert set(stealing.core.state.thresholds) == {second}


def _policy(dask_scheduler):
    return dask_scheduler.extensions["stealing"].settings.stealing


def test_by_a_real_preload():
    command = ["scheduler", "--port", "0", "--no-dashboard", "--scheduler-file"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scheduler.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *command, str(file),
             "--preload", str(PLUGINS / "ferro_scheduler.py")],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            until(lambda: process.poll() is not None or file.exists(), "the scheduler's file")
            assert process.poll() is None
            with Client(scheduler_file=str(file)) as client:
                assert client.run_on_scheduler(_policy) == "informed"
        finally:
            process.terminate()
            process.wait(20)


async def test_by_the_scheduler_options_of_dask_jobqueue():
    jobqueue = importlib.import_module("dask_jobqueue")

    options = {"preload": ["dask_ferro.scheduler.preload"], "dashboard_address": ":0"}
    async with jobqueue.SLURMCluster(
        cores=1, memory="1GB", processes=1, interface="lo", scheduler_options=options, asynchronous=True
    ) as cluster:
        assert isinstance(cluster.scheduler.extensions["stealing"], Stealing)


def test_our_local_cluster_has_it_from_the_start():
    settings = {"processes": False, "n_workers": 1, "dashboard_address": ":0"}
    with ff.LocalCluster(**settings) as cluster, Client(cluster) as client:
        assert client.run_on_scheduler(_policy) == "informed"
        assert client.submit(lambda: 1).result(timeout=60) == 1
    with ff.LocalCluster(**settings, scheduler_kwargs={"preload": []}) as cluster:
        assert type(cluster.scheduler.extensions["stealing"]) is WorkStealing


def test_the_type_of_scheduler_is_untouched():
    assert "ferro" not in repr(vars(Scheduler)).lower()


class Deepest(SchedulerPlugin):
    """The most tasks that a worker had at once."""

    name = "deepest"

    def __init__(self, scheduler):
        self.scheduler, self.most = scheduler, 0

    def transition(self, key, start, finish, *args, **kwargs):
        if finish == "processing":
            self.most = max(self.most, *(len(ws.processing) for ws in self.scheduler.workers.values()))


def _nothing(i):
    return i


ONE = {"distributed.scheduler.worker-saturation": 1.0}
# However long tasks take on a busy machine.
AHEAD = {"ahead": 60.0}


async def with_ahead(client, scheduler, placing=AHEAD, **options):
    """The plugin with parameters of placement, and the most tasks that a worker has at once."""
    with tuned(placing=placing):
        await ff.install(client, **options)
    scheduler.add_plugin(deepest := Deepest(scheduler))
    return deepest


@on_cluster(config=ONE)
@pytest.mark.parametrize(
    ("given", "placing", "most"),
    [
        pytest.param({}, AHEAD, 8, id="eight at a time"),
        pytest.param({}, AHEAD | {"ahead_tasks": 4}, 4, id="as many as a parameter says"),
        pytest.param({}, {"ahead": 0.0}, 1, id="one by one where that is switched off"),
        pytest.param({}, AHEAD | {"ahead_bytes": 1}, 1, id="one by one where their results are large"),
        pytest.param({"stealing": "none"}, AHEAD, 1, id="one by one where nothing is stolen"),
    ],
)
async def test_short_queued_tasks_are_sent(client, scheduler, given, placing, most):
    deepest = await with_ahead(client, scheduler, placing, **given)
    tasks = client.map(_nothing, range(400), pure=False)
    assert await client.gather(tasks) == list(range(400))
    assert deepest.most == most
    assert part_of(scheduler, Scheduling).stealing.records.counts["place"]["root"] == 400
    await ff.uninstall(client)
    deepest.most = 0
    await client.gather(client.map(_nothing, range(100), pure=False))
    assert deepest.most == 1


@on_cluster(config=ONE)
async def test_tasks_that_were_sent_behind_a_long_one_do_not_wait_for_it(client, scheduler):
    await with_ahead(client, scheduler)
    waiting, others = [], set()

    def work(i):
        if i == 150:
            opened("all-others")
        return i

    tasks = client.map(work, range(400), pure=False)
    await until_async(lambda: tasks[149].done(), "the task before the long one")
    await until_async(
        lambda: scheduler.tasks[tasks[150].key].processing_on is not None, "the long one to be sent"
    )
    waiting += [ts.key for ts in scheduler.tasks[tasks[150].key].processing_on.processing]
    others.update(task.key for i, task in enumerate(tasks) if i != 150)
    await finished_async([task for i, task in enumerate(tasks) if i != 150])
    assert others & set(waiting)
    await Event("all-others").set()
    assert await client.gather(tasks) == list(range(400))


@on_cluster(config=ONE)
async def test_several_tasks_at_a_time_leave_in_the_order_of_their_priorities(client, scheduler):
    deepest = await with_ahead(client, scheduler)
    order = []

    class Order(SchedulerPlugin):
        name = "order"

        def transition(self, key, start, finish, *args, **kwargs):
            if start == "queued" and finish == "processing":
                order.append(scheduler.tasks[key].priority)

    scheduler.add_plugin(Order())
    await client.gather(client.map(_nothing, range(300), pure=False))
    assert len(order) > 200
    assert order == sorted(order)
    assert deepest.most > 1


@on_cluster(config=ONE | UNCHECKED)
async def test_a_task_that_ends_its_workers_fails_alone(client, scheduler):
    """Those that were sent with it are blamed for one death, and not for the next ones."""
    deepest = await with_ahead(client, scheduler)
    kills, later = [], []

    async def die(address):
        kills.append(address)
        await scheduler.remove_worker(address, stimulus_id="died", expected=False)
        later.append(await Worker(scheduler.address, nthreads=1))

    class Deadly(SchedulerPlugin):
        name = "deadly"

        def transition(self, key, start, finish, *args, **kwargs):
            if finish == "processing" and key == tasks[100].key:
                address = scheduler.tasks[key].processing_on.address
                scheduler.loop.call_later(0.01, die, address)

    def work(i):
        if i == 100:
            opened("never")
        return i

    scheduler.add_plugin(Deadly())
    tasks = client.map(work, range(300), pure=False)
    await until_async(lambda: all(task.done() for task in tasks), "all tasks to end")
    assert [i for i, task in enumerate(tasks) if task.status == "error"] == [100]
    assert len(kills) == 4
    assert deepest.most > 1
    await Event("never").set()  # for the threads of those that it ended
    await asyncio.gather(*(worker.close() for worker in later))


@on_cluster(config=ONE)
async def test_an_error_of_ours_sends_tasks_one_by_one(client, scheduler, monkeypatch, caplog):
    deepest = await with_ahead(client, scheduler)

    def fail(*given):
        raise ValueError("ours")

    monkeypatch.setattr(part_of(scheduler, Scheduling).placing.candidates, "ahead", fail)
    assert await client.gather(client.map(_nothing, range(100), pure=False)) == list(range(100))
    assert (deepest.most, len(scheduler.workers)) == (1, 2)
    assert "dask_ferro sends no task ahead" in caplog.text
