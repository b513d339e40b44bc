"""How far a computation is: counts on real schedulers, rates of given counts, and what is shown of them."""

from __future__ import annotations

import gc
import importlib.util
import threading
import time
from types import SimpleNamespace

import dask
import pytest
from distributed import Client, Event, LocalCluster

import dask_ferro as ff
from dask_ferro.errors import InputError
from dask_ferro.local.progress import Pace, Progress, _Tasks, follow, ops_of
from dask_ferro.lower.signature import synthetic
from dask_ferro.views.progress import progress, words
from tests.clusters import running
from tests.waiting import finished, opened, until


@pytest.fixture(scope="module")
def client():
    with running(2, processes=False) as client:
        yield client


def tiny():
    """A model of 12 ops, on its inputs; it takes 20 ms."""
    model = ff.from_onnx(ff.testing.build("imbalanced", long=2, short=10, long_s=0.01, short_s=0.001))
    return model, model(synthetic(model._opened.signature, None))


def followers():
    """The counts that the schedulers of this process keep."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is _Tasks]


def looked(client, following, status):
    """The first progress of a status."""

    async def look():
        async for seen in following:
            if seen.status == status:
                return seen
        return None

    return client.sync(look)


def ended(client, futures):
    """The last progress of some futures."""
    return looked(client, follow(client, futures, interval=0.01), "finished")


def gate(name, i):
    opened(name)
    return i


def test_bundles_and_ops_of_a_model_are_counted(client):
    model, lazy = tiny()
    seen = ended(client, [client.compute(lazy)])
    nodes = sum(model.ops.values())
    assert (seen.bundles, seen.ops) == ((len(model.bundles),) * 2, (nodes, nodes))
    assert (seen.failed, seen.remaining) == (0, 0.0)
    until(lambda: not followers(), "the end of the counts")


def test_what_was_done_before_counts_as_done(client):
    first = client.submit(gate, "open-1", 1, key="first")
    last = client.submit(lambda value: gate("open-2", value), first, key="last")
    Event("open-1", client=client).set()
    finished(first)
    following = follow(client, [last], interval=0.01)
    seen = looked(client, following, "running")
    assert (seen.tasks, seen.bundles, seen.ops) == ((1, 2), (0, 0), (0, 0))
    Event("open-2", client=client).set()
    assert last.result(timeout=60) == 1
    assert looked(client, following, "finished").tasks == (2, 2)
    assert looked(client, following, "finished") is None  # not counted any more


def test_failures_are_told_and_do_not_end_it(client):
    def bad(i):
        if i == 1:
            raise ValueError("on purpose")
        return i

    bads = client.map(bad, range(3), pure=False)
    after = client.submit(sum, bads)
    fine = client.submit(gate, "fine", 7, key="fine")
    finished([*bads, after])
    following = follow(client, [after, fine], interval=0.01)
    seen = looked(client, following, "running")
    assert (seen.tasks, seen.failed) == ((2, 5), 2)
    Event("fine", client=client).set()
    seen = looked(client, following, "finished")
    assert (seen.tasks, seen.failed) == ((3, 5), 2)


def test_cancelled_tasks_end_it(client):
    future = client.submit(gate, "never", 1, key="cancelled")
    following = follow(client, [future], interval=0.01)
    assert looked(client, following, "running").tasks == (0, 1)
    future.cancel()
    seen = looked(client, following, "finished")
    Event("never", client=client).set()
    assert (seen.tasks[0], seen.failed) == (0, seen.tasks[1])


def test_those_that_were_cancelled_before_do_not_hold_up_the_others(client):
    fine, gone = (client.submit(gate, "others", i, key=f"others-{i}") for i in range(2))
    tasks = client.cluster.scheduler.tasks
    until(lambda: "others-1" in tasks, "the task that will be cancelled")  # else its absence says nothing
    gone.cancel()
    Event("others", client=client).set()
    until(lambda: "others-1" not in tasks, "the end of the cancelled task")
    seen = ended(client, [fine, gone])
    assert (seen.tasks, seen.failed) == ((1, 1), 0)  # the other one never was the scheduler's
    seen = ended(client, [gone])
    assert (seen.tasks, seen.failed) == ((0, 0), 0)


def test_nothing_stays_behind_when_the_reader_goes(client):
    future = client.submit(gate, "stay", 1, key="stay")
    following = follow(client, [future], interval=0.01)
    looked(client, following, "running")
    assert len(followers()) == 1
    client.sync(following.aclose)
    until(lambda: not followers(), "the end of the counts")
    Event("stay", client=client).set()
    assert future.result(timeout=60) == 1


def test_fused_bundles_count_their_ops():
    from dask._task_spec import Task, TaskRef

    from dask_ferro.lower.worker.task import run_bundle

    ref = SimpleNamespace(engines=(("array", 3), ("onnxruntime", 2)))
    one = Task("a", run_bundle, "model", ref)
    two = Task("b", run_bundle, "model", ref, TaskRef("a"))
    assert [ops_of(spec) for spec in (one, Task.fuse(one, two), Task("c", abs, -1), None)] == [5, 10, 0, 0]


def counts(elapsed, tasks, ops, seconds, left, status="running"):
    return {
        "status": status,
        "elapsed": elapsed,
        "done": [tasks, tasks, ops],
        "all": [100, 100, 1000],
        "failed": 0,
        "seconds": seconds,
        "left_seconds": left,
    }


@pytest.mark.parametrize(
    ("looks", "wanted"),
    [
        pytest.param([counts(0.0, 0, 0, 0.0, None)], (0.0, None), id="nothing is known before something is done"),
        pytest.param([counts(0.0, 0, 0, 0.0, 8.0), counts(2.0, 10, 100, 4.0, 6.0)], (50.0, 3.0),
            id="two threads work, so six seconds of tasks take three"),
        pytest.param([counts(0.0, 0, 0, 0.0, 99.0), counts(20.0, 10, 100, 20.0, 90.0),
            counts(25.0, 60, 600, 70.0, 40.0)], (100.0, 4.0), id="rates are those of the last seconds"),
        pytest.param([counts(0.0, 0, 0, 0.0, 9.0), counts(5.0, 10, 100, 10.0, 8.0), counts(20.0, 10, 100, 10.0, 8.0)],
            (5.0, 16.0), id="of all of it while one long task runs"),
        pytest.param([counts(0.0, 0, 0, 0.0, 9.0), counts(20.0, 100, 1000, 9.0, 0.0, "finished")], (50.0, 0.0),
            id="at the end of all of it"),
        pytest.param([counts(0.0, 0, 0, 0.0, None, "waiting"), counts(1.0, 50, 500, 0.0, 9.0),
            counts(2.0, 60, 600, 1.0, 8.0)], (100.0, 8.0), id="what was done before it was looked at is no speed"),
    ],
)  # fmt: skip
def test_pace(looks, wanted):
    pace = Pace()
    for look in looks:
        seen = pace(look, look["status"] == "finished")
    assert (seen.ops_per_s, seen.remaining) == pytest.approx(wanted)


RUNNING = Progress("running", 2.0, (13, 65), (12, 64), (340, 1280), 0, 1234.0, 6.0, 3.21)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        pytest.param(RUNNING, "bundles 12/64  ops 340/1.28 k  1.23 k ops/s  3.21 s left", id="bundles and ops"),
        pytest.param(RUNNING._replace(bundles=(0, 0), remaining=None), "tasks 13/65  6 tasks/s  - left",
            id="tasks without"),
        pytest.param(RUNNING._replace(status="finished", failed=2),
            "bundles 12/64  ops 340/1.28 k  1.23 k ops/s  2 failed  in 2 s", id="the end, with failures"),
        pytest.param(RUNNING._replace(status="waiting"), "waiting for the scheduler to have all of the graph",
            id="waiting"),
    ],
)  # fmt: skip
def test_words(seen, wanted):
    assert words(seen) == wanted


def test_without_a_terminal_it_writes_one_line_at_the_end(client, capsys):
    model, lazy = tiny()
    ff_progress = progress(client.compute(lazy))
    nodes = sum(model.ops.values())
    assert ff_progress is None
    told = capsys.readouterr().err
    assert told.startswith(f"bundles {len(model.bundles)}/{len(model.bundles)}  ops {nodes}/{nodes}")
    assert told.count("\n") == 1


def test_what_does_not_run_is_refused(client):
    with pytest.raises(InputError, match="got no futures"):
        progress(tiny()[1])


@pytest.mark.cluster
async def test_an_asynchronous_client_awaits_it(capsys):

    async with (
        LocalCluster(n_workers=1, processes=False, asynchronous=True, dashboard_address=":0") as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await progress(client.map(lambda i: i, range(4)))
    assert capsys.readouterr().err.startswith("tasks 4/4")


@pytest.mark.cluster
def test_a_scheduler_that_goes_ends_the_line(capsys):
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "2s"}),
        LocalCluster(
            n_workers=1, processes=False, dashboard_address=":0", protocol="tcp", silence_logs=50
        ) as cluster,
    ):
        client = Client(cluster, set_as_default=False)
        future = client.submit(time.sleep, 1)
        waiting = threading.Thread(target=progress, args=(future,))
        waiting.start()
        until(followers, "the counts", every=0.01)
        cluster.sync(cluster.scheduler.close)
        waiting.join(40)
        client.close()
    assert capsys.readouterr().err.splitlines()[-1:] == [
        "ff.progress: the connection to the scheduler was lost"
    ]


@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="IPython is not installed")
def test_in_a_notebook_the_line_goes_on_by_itself(client):
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    before = len(followers())  # the log of a scheduler that was ended keeps its counts
    model, lazy = tiny()
    future = client.compute(lazy)
    with capture_output() as captured:
        progress(future, notebook=True)
        finished(future)
        until(
            lambda: len(followers()) <= before and any("in " in str(o.data) for o in captured.outputs[1:]),
            "a last line, with the seconds that it took",
            seen=lambda: [o.data for o in captured.outputs],
        )
    assert f"bundles {len(model.bundles)}/{len(model.bundles)}" in captured.outputs[-1].data["text/plain"]
