"""`ff.profile` on real clusters: what a block's recording holds, what it leaves behind, and the tape of its ops."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster, Worker

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.errors import InputError
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.worker import task
from dask_ferro.observe import op_recorder, tracing
from dask_ferro.observe.tracing import Tracing
from dask_ferro.policy.events import StealCompleted
from dask_ferro.scheduler.log import Log
from dask_ferro.scheduler.plugin import part_of
from dask_ferro.scheduler.scheduling import Scheduling
from dask_ferro.trace import Trace
from dask_ferro.views.chrome import chrome
from tests.clusters import running
from tests.graph.pipeline.nets import mlp as mlp_net
from tests.graphs import mlp
from tests.lower.ranks.runs import workers_of
from tests.waiting import BOUND_S, until

MLP = mlp().SerializeToString()
X = np.linspace(-1, 1, 40 * 6, dtype="f4").reshape(40, 6)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two workers of one thread in this process, with the plugin on."""
    with running(2, processes=False) as client:
        ff.install(client)
        yield client
        ff.uninstall(client)


def slept(seconds: float, *inputs: Any) -> bytes:
    time.sleep(seconds)
    return bytes(1000)


def divided(a: int, b: int) -> float:
    return a / b


def measured(dask_scheduler: Any = None) -> float:
    """Seconds of computation as Dask itself adds them up."""
    return sum(p.all_durations["compute"] for p in dask_scheduler.task_prefixes.values())


def reinstall(client: Client) -> None:
    ff.uninstall(client)
    ff.install(client)


@pytest.fixture
def nothing_stays(client: Client) -> Iterator[None]:
    """After the test neither the scheduler nor a worker records."""
    plugins, wanted = set(client.cluster.scheduler.worker_plugins), dict(records_of(client).recordings)
    yield
    until(lambda: task._listener is None, "the workers to listen no more", seen=lambda: task._listener)
    assert records_of(client).recordings == wanted
    assert set(client.cluster.scheduler.worker_plugins) == plugins


def records_of(client: Client) -> Log:
    return part_of(client.cluster.scheduler, Scheduling).stealing.records


# ---- what a recording holds --------------------------------------------------------------------------------


def test_a_block_is_recorded_and_nothing_before_or_after_it(client: Client) -> None:
    client.submit(slept, 0.01, key="before-0").result(timeout=60)
    with ff.profile(client) as t:
        a = client.submit(slept, 0.01, key="within-0")
        client.submit(slept, 0.01, a, key="within-1").result(timeout=60)
    client.submit(slept, 0.01, key="after-0").result(timeout=60)
    assert [(k.key, k.prefix, k.dependencies, k.nbytes) for k in t.trace.tasks] == [
        ("within-0", "within", (), 1000),
        ("within-1", "within", ("within-0",), 1000),
    ]
    assert set(t.trace.workers.values()) == {1}
    assert t.summary()["tasks"] == 2
    assert t.summary()["critical_path"] == pytest.approx(t.trace.busy_seconds)
    assert t.summary()["elapsed"] >= t.trace.makespan
    assert "dropped" not in t.summary()


def test_tasks_carry_their_place_by_priority(client: Client) -> None:
    with ff.profile(client) as t:
        futures = [client.submit(slept, 0.005, i, key=f"p-{i}", priority=i) for i in range(3)]
        client.gather(futures)
    assert {k.key: k.order for k in t.trace.tasks} == {"p-2": 0, "p-1": 1, "p-0": 2}


def test_recording_is_on_for_the_block_alone(client: Client) -> None:
    records = records_of(client)
    seen = [len(records.recordings)]
    with ff.profile(client):
        seen.append(len(records.recordings))
        with ff.profile(client):
            seen.append(len(records.recordings))
        seen.append(len(records.recordings))
    assert [*seen, len(records.recordings)] == [0, 1, 2, 1, 0]


def test_a_trace_within_another_is_a_part_of_it(client: Client) -> None:
    with ff.profile(client) as outer:
        client.submit(slept, 0.005, key="outer-0").result(timeout=60)
        with ff.profile(client, tasks=10) as inner:
            client.submit(slept, 0.005, key="inner-0").result(timeout=60)
    assert [k.key for k in inner.trace.tasks] == ["inner-0"]
    assert [k.key for k in outer.trace.tasks] == ["outer-0", "inner-0"]


def test_what_does_not_fit_is_counted(client: Client) -> None:
    with ff.profile(client, tasks=4) as t:
        for i in range(10):
            client.submit(slept, 0.0, key=f"many-{i}").result(timeout=60)
    assert [k.key for k in t.trace.tasks] == [f"many-{i}" for i in range(6, 10)]
    assert t.trace.counts["dropped"] == 6


def stolen(key: str, requested: float) -> StealCompleted:
    return StealCompleted(key, "v", "t", requested, 1.0)


def test_steals_that_do_not_fit_are_counted_too(client: Client) -> None:
    with ff.profile(client, tasks=4) as t:
        for i in range(7):
            records_of(client).stolen.append(stolen(f"s-{i}", time.time()))
    assert t.trace.counts["dropped_steals"] == 3


def test_counts_are_the_blocks_own(client: Client) -> None:
    stealing = part_of(client.cluster.scheduler, Scheduling).stealing
    stealing.counts["seconds_worked"] += 5.0
    with ff.profile(client) as t:
        stealing.counts["seconds_worked"] += 0.25
    assert t.trace.counts["seconds_worked"] == 0.25


def test_an_asynchronous_client_records_too() -> None:
    async def run() -> Tracing:
        async with (
            LocalCluster(n_workers=1, processes=False, asynchronous=True, dashboard_address=":0") as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await ff.install(client)
            with pytest.raises(InputError, match="async with"), ff.profile(client):
                pass
            async with ff.profile(client) as t:
                await client.submit(slept, 0.01, key="one-0")
            await ff.uninstall(client)
            return t

    assert [k.key for k in asyncio.run(run()).trace.tasks] == ["one-0"]


# ---- what it says when it cannot ---------------------------------------------------------------------------


def test_a_block_that_fails_keeps_its_error_and_its_trace(client: Client) -> None:
    t = ff.profile(client)
    with pytest.raises(ZeroDivisionError), t:
        client.submit(divided, 1, 0, key="then-0").result(timeout=60)
    assert t.trace.tasks == ()  # what fails finishes nothing
    assert records_of(client).recordings == {}


def test_without_the_plugin_it_says_so(client: Client) -> None:
    ff.uninstall(client)
    try:
        with pytest.raises(InputError, match=r"not installed.*ff\.install"), ff.profile(client):
            pass
    finally:
        ff.install(client)


def test_a_plugin_that_left_meanwhile_is_told(client: Client) -> None:
    t = ff.profile(client)
    with pytest.raises(InputError, match="taken off"), t:
        reinstall(client)
    with pytest.raises(InputError, match="after the with block"):
        _ = t.trace


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"tasks": 0}, "tasks=0", id="no tasks are no recording"),
        pytest.param({"tasks": 2.5}, r"tasks=2\.5", id="half a task is none"),
    ],
)
def test_wrong_arguments_are_refused(client: Client, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ff.profile(client, **arguments)


def test_something_else_than_a_client_is_refused() -> None:
    with pytest.raises(InputError, match=r"got str, wanted a distributed\.Client"):
        ff.profile("tcp://host:8786")


def test_the_function_is_what_the_package_has_beside_the_module_of_its_name() -> None:
    assert ff.profile is tracing.profile
    assert sys.modules["dask_ferro.trace"].Trace is Trace


# ---- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        pytest.param("run.json", b'{"traceEvents":', id="text"),
        pytest.param("run.json.gz", b"\x1f\x8b", id="compressed"),
    ],
)
def test_a_file_for_chrome_is_whole(client: Client, tmp_path: Path, name: str, begins: bytes) -> None:
    with ff.profile(client) as t:
        client.submit(slept, 0.0, key="file-0").result(timeout=60)
    t.to_chrome(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_saved_trace_is_the_trace(client: Client, tmp_path: Path) -> None:
    with ff.profile(client) as t:
        client.submit(slept, 0.0, key="saved-0").result(timeout=60)
    t.save(tmp_path / "run.ferrotrace")
    assert Trace.load(tmp_path / "run.ferrotrace") == t.trace


def test_chromes_spans_add_up_to_what_dask_measured(client: Client) -> None:
    before = client.run_on_scheduler(measured)
    with ff.profile(client) as t:
        client.gather(client.map(slept, [0.02] * 12, pure=False))
    drawn = sum(e["dur"] for e in chrome(t.trace)["traceEvents"] if e.get("cat") == "compute") * 1e-6
    assert drawn == pytest.approx(client.run_on_scheduler(measured) - before, rel=0.02)


# ---- the tape ----------------------------------------------------------------------------------------------


def ops_of(trace: Trace) -> list[tuple[str, int, str]]:
    return [(s.prefix, s.nbytes, s.source.partition("/")[0]) for s in trace.of("op")]


def test_a_session_is_one_op_within_its_task(client: Client) -> None:
    y = ff.from_onnx(MLP)(X)
    with ff.profile(client, ops=True) as t:
        y.compute()
    # A second task, of Dask, makes one array of the chunks.
    (op,), (run, joined) = t.trace.of("op"), t.trace.of("compute")
    assert (op.prefix, op.source.partition("/")[0]) == (f"{len(mlp().graph.node)} nodes", "onnxruntime")
    assert (op.key, op.worker, op.lane) == (run.key, run.worker, run.lane)
    assert run.start <= op.start <= op.stop <= run.stop
    # Ops are parts of it, and not counted again.
    assert t.trace.busy_seconds == pytest.approx(run.seconds + joined.seconds)


def test_array_ops_are_told_one_by_one(client: Client) -> None:
    sleeps = ff.testing.build("wide", branches=2, length=3)
    y = ff.from_onnx(sleeps, granularity="model")(np.ones(256, "f4"))
    with ff.profile(client, ops=True) as t:
        y.compute()
    assert ops_of(t.trace) == [("Sleep", 1024, "array")] * 6


def test_tasks_in_bundles_are_told_one_by_one(client: Client) -> None:
    def chain(length: int) -> Any:
        value = dask.delayed(divided, pure=False)(8, 1)
        for _ in range(length - 1):
            value = dask.delayed(divided, pure=False)(value, 1)
        return value

    with dask.config.set({"ferro.bundle.costs": None}), ff.bundle_tasks(client=client):
        # What was never measured is by itself.
        assert client.compute(chain(3)).result(BOUND_S) == 8
        with ff.profile(client, ops=True) as t:
            assert client.compute(chain(3)).result(BOUND_S) == 8
    ops, (run,) = list(t.trace.of("op")), t.trace.of("compute")
    assert [(op.prefix, op.key, op.source.partition("/")[0]) for op in ops] == [
        ("divided", run.key, "dask")
    ] * 3
    assert all(run.start - 1e-3 <= op.start <= op.stop <= run.stop + 1e-3 for op in ops)


def test_without_ops_nothing_listens(client: Client) -> None:
    with ff.profile(client) as t:
        assert task._listener is None
        ff.from_onnx(MLP)(X).compute()
    assert ops_of(t.trace) == []


@pytest.mark.usefixtures("nothing_stays")
def test_nobody_listens_when_the_block_has_ended(client: Client) -> None:
    with ff.profile(client, ops=True):
        assert task._listener is not None
    assert task._listener is None


@pytest.mark.usefixtures("nothing_stays")
def test_a_recording_that_cannot_begin_leaves_nothing_on(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: op_recorder.TapePlugin, worker: Worker) -> None:
        raise OSError("on purpose")

    monkeypatch.setattr(op_recorder.TapePlugin, "setup", failing)
    with pytest.raises(OSError, match="on purpose"), ff.profile(client, ops=True):
        pass


@pytest.mark.usefixtures("nothing_stays")
def test_ops_that_cannot_be_fetched_leave_nothing_on(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(self: Tracing, *begun: object) -> None:
        raise OSError("on purpose")

    monkeypatch.setattr(Tracing, "_ops", failing)
    with pytest.raises(OSError, match="on purpose"), ff.profile(client, ops=True):
        pass
    assert task._listener is None


def test_ops_beyond_what_a_tape_or_a_trace_has_room_for_are_counted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps = ff.testing.build("wide", branches=2, length=3)
    y = ff.from_onnx(sleeps, granularity="model")(np.ones(256, "f4"))
    monkeypatch.setattr(op_recorder, "_tape", op_recorder.Tape(length=4))
    with ff.profile(client, ops=True) as t:
        y.compute()
    assert (len(ops_of(t.trace)), t.trace.counts["dropped_ops"]) == (4, 2)
    monkeypatch.setattr(tracing, "_OPS", 2)
    with ff.profile(client, ops=True) as t:
        y.compute(workers=[min(client.cluster.scheduler.workers)])
    assert (len(ops_of(t.trace)), t.trace.counts["dropped_ops"]) in {(1, 5), (2, 4)}


@pytest.mark.usefixtures("nothing_stays")
def test_a_client_that_goes_within_the_block_leaves_nothing_on(client: Client) -> None:
    with Client(client.cluster.scheduler.address) as other:
        recording = ff.profile(other, ops=True)
        recording.__enter__()
        assert len(records_of(client).recordings) == 1


def test_a_worker_that_joins_within_the_block_has_a_tape(client: Client) -> None:
    async def join() -> Worker:
        return await Worker(client.cluster.scheduler.address, nthreads=1, name="late", dashboard_address=":0")

    with ff.profile(client, ops=True) as t:
        late = client.cluster.sync(join)
        ff.from_onnx(MLP)(X).compute(workers=["late"])
    client.cluster.sync(late.close)
    assert {s.worker for s in t.trace.of("op")} == {late.address}


# ---- the tape of instructions ------------------------------------------------------------------------------


def column_row() -> Ranks:
    """Two layers, the first split by columns and the second by rows, on two ranks."""
    x = ft.input("x", (8, 16), np.float64)
    w1, w2 = (ft.asarray(np.full(shape, 0.1), name=n) for n, shape in (("w1", (16, 32)), ("w2", (32, 4))))
    with ft.region("first"):
        h = ft.nn.relu(x @ w1)
    with ft.region("second"):
        y = h @ w2
    plan = {
        "first": {"shard": {"w1": 1}, "workers": [0, 1]},
        "second": {"shard": {"w2": 0}, "workers": [0, 1]},
    }
    return Ranks.of(ff.apply_plan(y, plan))


def test_the_tape_of_a_sharded_graph_has_each_op_where_ops_are_recorded(client: Client) -> None:
    y = column_row()({"x": np.ones((8, 16))})["y"]
    with ff.profile(client, ops=True) as run:
        y.compute()
    ops = {"MatMul", "Relu"}
    found = {w: [(r.op, r.region, r.placement) for r in ff.list_instructions(run) if r.worker == w and r.op in ops]
             for w in run.trace.workers}  # fmt: skip
    wanted = [("MatMul", "first", "S(1)"), ("Relu", "first", "S(1)"), ("MatMul", "second", "P")]
    assert list(found.values()) == [wanted] * 2


def check_tape_of_a_pipeline(client: Client) -> None:
    """Run two stages of two layers on two micro-batches, and look at where each layer ran."""
    net = mlp_net(layers=4)
    step = ff.parallelize(
        net.loss, params=net.params, stages=[("layer0", "layer1"), ("layer2", "layer3")], micro_batches=2
    )
    with ff.profile(client, ops=True) as run:
        step(net.batch(6)).compute()
    found = ff.list_instructions(run)
    first, second = workers_of(client)
    rows = [row for row in found if row.op in ("forward", "backward")]
    assert sorted((row.op, row.worker) for row in rows) == sorted(
        (op, worker) for op in ("forward", "backward") for worker in (first, second) for _ in range(2)
    )
    regions = {(row.op, row.worker): row.region for row in rows}
    assert regions["forward", first] == "layer0; layer1"
    assert regions["backward", first] == "layer1 backward; layer0 backward"


def test_the_tape_of_a_pipeline_has_what_ran_in_its_flow(client: Client) -> None:
    check_tape_of_a_pipeline(client)


def test_the_tape_of_a_graph_in_one_piece_has_its_regions(client: Client) -> None:
    with ft.region("scores"):
        y = ft.nn.softmax(ft.input("x", ("N", 6)))
    with ff.profile(client) as run:
        y.compute({"x": X})
    assert [
        (row.region, row.stage, row.nbytes) for row in ff.list_instructions(run) if "softmax" in row.op
    ] == [("scores", None, X.nbytes)]


def test_a_tape_is_there_when_the_block_has_ended(client: Client) -> None:
    with ff.profile(client) as run, pytest.raises(InputError, match="available after the with block"):
        ff.list_instructions(run)


@pytest.mark.cluster
def test_processes_have_tapes_of_their_own() -> None:
    with running(2, kind=ff.LocalCluster) as client:
        y = ff.from_onnx(MLP)(X, batch_size=5)
        with ff.profile(client, ops=True) as t:
            y.compute()
    *runs, _joined = t.trace.tasks
    assert len(runs) == 8
    assert {s.key for s in t.trace.of("op")} == {k.key for k in runs}
    assert {s.worker for s in t.trace.of("op")} == {s.worker for s in t.trace.of("compute")}


@pytest.mark.cluster
def test_processes_tell_regions() -> None:
    with running(2, kind=ff.LocalCluster) as client:
        check_tape_of_a_pipeline(client)
        y = column_row()({"x": np.ones((8, 16))})["y"]
        with ff.profile(client, ops=True) as run:
            y.compute()
    found = {(r.op, r.region, r.placement) for r in ff.list_instructions(run)}
    assert found >= {("MatMul", "first", "S(1)"), ("MatMul", "second", "P")}
