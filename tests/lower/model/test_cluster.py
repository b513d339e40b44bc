"""The collection on a real cluster: two worker processes."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import KilledWorker
from onnx import helper

import dask_ferro as ff
from tests.clusters import running
from tests.graphs import close, diamond, diamond_reference, mlp, mlp_reference, model
from tests.programs import ran
from tests.waiting import BOUND_S, finished, result, until

pytestmark = pytest.mark.cluster

X = np.random.default_rng(1).standard_normal((10, 6), dtype=np.float32)


@pytest.mark.parametrize("granularity", ["auto", "op", "model"])
@pytest.mark.parametrize("batch", [None, 3])
def test_compute(client, granularity, batch):
    x = X[:, :4]
    y = ff.from_onnx(diamond(), x, batch_size=batch, granularity=granularity)
    got = result(client.compute(y))
    for name, wanted in diamond_reference(x).items():
        close(got[name], wanted)
    close(result(client.compute(y["b2"])), diamond_reference(x)["b2"])


def test_persist_and_submit_on_its_futures(client):
    y = client.persist(ff.from_onnx(mlp(), X, batch_size=5))
    finished(y)
    assert sorted(sum(client.who_has(y).values(), ()))
    close(y.compute(), mlp_reference(X))
    future = client.compute(ff.from_onnx(mlp(), X))
    close(result(client.submit(lambda a: a * 2, future)), mlp_reference(X) * 2)
    close(
        result(client.compute(ff.from_onnx(diamond(), client.submit(lambda: X[:, :4]))))["b0"],
        diamond_reference(X[:, :4])["b0"],
    )


def test_dask_arrays_in_and_out(client):
    x = da.from_array(X, chunks=(3, -1))
    y = ff.from_onnx(mlp())(x)
    total = result(client.compute((y * 2).sum()))
    assert total == pytest.approx(2 * mlp_reference(X).sum(), rel=1e-5)
    close(result(client.compute(y.persist())), mlp_reference(X))


def test_annotations_reach_the_scheduler(client):
    y = ff.from_onnx(mlp(), X + 1, granularity="op")
    with dask.annotate(priority=5, retries=2):
        future = client.compute(y)
    finished(future)
    retries = client.run_on_scheduler(
        lambda dask_scheduler: {
            k: (ts.annotations or {}).get("retries") for k, ts in dask_scheduler.tasks.items()
        }
    )
    assert retries[future.key] == 2


def test_an_error_in_a_task_says_where_and_on_what(client):
    model = ff.from_onnx(mlp())
    later = client.submit(lambda: np.zeros((2, 5), np.float32))  # its shape is not known ahead
    wanted = r"m.*, when the task ran: input 'x' has 5 on axis 1, wanted 6: x: float32\[N, 6\]"
    with pytest.raises(ff.InputError, match=wanted):
        result(client.compute(model(later)))


def test_a_changed_file_is_noticed(client, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(mlp(seed=11).SerializeToString())
    y = ff.from_onnx(path, X)
    path.write_bytes(mlp(seed=12, hidden=9).SerializeToString())
    with pytest.raises(ff.InputError, match="changed after it was opened"):
        result(client.compute(y))


def test_a_lost_file_is_named(client, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(mlp(seed=13).SerializeToString())
    y = ff.from_onnx(path, X)
    graph = client.compute(y, optimize_graph=False)
    close(result(graph), mlp_reference(X, seed=13))
    other = ff.from_onnx(path, X + 1, granularity="op")
    client.restart()
    path.unlink()
    with pytest.raises(ff.InputError, match="cannot see it"):
        result(client.compute(other))


@pytest.mark.needs("mount namespaces")
def test_a_copy_travels_when_workers_cannot_see_the_path(client, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    script = tmp_path / "client.py"
    script.write_text(
        textwrap.dedent(f"""
        import numpy as np, distributed, dask_ferro as ff
        from tests.graphs import mlp, mlp_reference
        x = np.random.default_rng(1).standard_normal((10, 6), dtype=np.float32)
        open({str(hidden / "m.onnx")!r}, "wb").write(mlp().SerializeToString())
        with distributed.Client({client.scheduler.address!r}) as client:
            y = ff.from_onnx({str(hidden / "m.onnx")!r}, x, granularity="op", batch_size=4)
            np.testing.assert_allclose(client.compute(y).result(), mlp_reference(x), rtol=1e-5)
            print("travelled")
        """)
    )
    mount = f"mount -t tmpfs none {hidden} && exec {sys.executable} {script}"
    run = ran(["unshare", "--mount", "sh", "-c", mount], env={"PYTHONPATH": os.getcwd()})
    assert run.stdout.strip() == "travelled", run.stderr
    assert not list(hidden.iterdir())


def _fresh(seed):
    """Rows that no other test has sent; 960 kB."""
    return np.random.default_rng(seed).standard_normal((40_000, 6), dtype=np.float32)


def _die():
    os._exit(1)


@pytest.fixture
def own_client():
    """A cluster whose workers may die, and its client."""
    with running(2, kind=ff.LocalCluster, silence_logs=50) as client:
        yield client


def test_a_large_input_outlives_workers_and_restarts(own_client):
    x = _fresh(31)
    y = ff.from_onnx(mlp(), x, batch_size=10_000)
    close(y.compute(), mlp_reference(x))
    own_client.restart()
    held = y.persist()
    finished(held)
    own_client.wait_for_workers(2, timeout=BOUND_S)  # on a busy machine they may not be back yet
    victim = min(own_client.scheduler_info()["workers"])
    own_client.run(_die, workers=[victim], on_error="ignore")
    close(result(own_client.compute(held + 0)), mlp_reference(x))
    close(y.compute(scheduler="sync"), mlp_reference(x))


def test_a_model_whose_workers_die_is_named_at_the_client():
    node = helper.make_node("Sleep", ["x"], ["y"], domain="ai.dask_ferro", seconds=60.0)
    call = ff.from_onnx(model([node], {"x": ["N"]}, {"y": ["N"]}))
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}), running(1) as client:
        (pid,) = client.run(os.getpid).values()

        def abort():
            until(lambda: any(client.processing().values()), "the model's task")
            os.kill(pid, signal.SIGABRT)

        aborting = threading.Thread(target=abort)
        aborting.start()
        with pytest.raises(KilledWorker) as raised:
            call(np.ones(2, np.float32)).compute()
        aborting.join(BOUND_S)
    assert call.name in str(raised.value)
