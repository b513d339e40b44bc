"""The collection on a real cluster: two worker processes."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import textwrap
import threading

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import KilledWorker, worker_client
from onnx import helper

import dask_ferro as ff
from dask_ferro.graph.model.own_models import made_here
from tests.clusters import running, tasks_of
from tests.graphs import close, diamond, diamond_reference, mlp, mlp_reference, model
from tests.programs import ran
from tests.waiting import BOUND_S, finished, result, until

pytestmark = pytest.mark.cluster

X = np.random.default_rng(1).standard_normal((10, 6), dtype=np.float32)
# 960 kB: does not travel in tasks.
LARGE = np.random.default_rng(2).standard_normal((40_000, 6), dtype=np.float32)


@pytest.mark.parametrize("granularity", ["auto", "op", "model"])
@pytest.mark.parametrize("batch", [None, 3])
def test_compute(client, granularity, batch):
    x = X[:, :4]
    y = ff.from_onnx(diamond(), x, batch=batch, granularity=granularity)
    got = result(client.compute(y))
    for name, wanted in diamond_reference(x).items():
        close(got[name], wanted)
    close(result(client.compute(y.outputs["b2"])), diamond_reference(x)["b2"])


def test_large_inputs_go_to_the_workers_and_not_through_the_graph(client):
    y = ff.from_onnx(mlp(), LARGE, batch=10_000)
    layers = y.__dask_graph__().layers
    sent = next(layer for name, layer in layers.items() if name.startswith("ferro-input"))
    assert len(sent) == 4
    close(result(client.compute(y)), mlp_reference(LARGE))
    close(y.compute(), mlp_reference(LARGE))


def test_a_large_input_that_was_just_released_can_be_sent_again(client):
    model = ff.from_onnx(mlp())
    for _ in range(20):  # each round releases the parts that the next one sends under the same keys
        close(model(LARGE, batch=20_000).compute(), mlp_reference(LARGE))
    first, second = model(LARGE, batch=20_000), model(LARGE, batch=20_000)
    close(first.compute(), second.compute())
    assert first.__dask_keys__() == second.__dask_keys__()


def test_persist_and_submit_on_its_futures(client):
    y = client.persist(ff.from_onnx(mlp(), X, batch=5))
    finished(y)
    assert isinstance(y, ff.ModelGraph)
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
    with dask.annotate(priority=5, retries=2):
        y = ff.from_onnx(mlp(), X + 1, granularity="op")
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
    with pytest.raises(ff.ConfigError, match=wanted):
        result(client.compute(model(later)))


def test_a_changed_file_is_noticed(client, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(mlp(seed=11).SerializeToString())
    y = ff.from_onnx(path, X)
    path.write_bytes(mlp(seed=12, hidden=9).SerializeToString())
    with pytest.raises(ff.ConfigError, match="changed after the graph was built"):
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
    with pytest.raises(ff.ConfigError, match="cannot see it"):
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
            y = ff.from_onnx({str(hidden / "m.onnx")!r}, x, granularity="op", batch=4)
            np.testing.assert_allclose(client.compute(y).result(), mlp_reference(x), rtol=1e-5)
            print("travelled")
        """)
    )
    mount = f"mount -t tmpfs none {hidden} && exec {sys.executable} {script}"
    run = ran(["unshare", "--mount", "sh", "-c", mount], env={"PYTHONPATH": os.getcwd()})
    assert run.stdout.strip() == "travelled", run.stderr
    assert not list(hidden.iterdir())


def test_a_dask_array_is_read_and_run_in_one_task_a_chunk(client):
    x = da.concatenate(
        [da.from_delayed(dask.delayed(_noise)(seed), (20, 6), np.float32) for seed in range(4)]
    )
    y = ff.from_onnx(mlp())(x)
    wanted = mlp_reference(np.concatenate([_noise(seed) for seed in range(4)]))
    close(y.compute(), wanted)
    assert tasks_of(client, y.compute) == 4  # Dask's own way has 9: an alias a chunk, and one that joins
    close(y.compute(scheduler="sync"), wanted)
    close(y.compute(optimize_graph=False), wanted)
    close((y + 1).compute(), wanted + 1)


def _noise(seed):
    return np.random.default_rng(seed).standard_normal((20, 6), dtype=np.float32)


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


def test_what_was_sent_is_sent_again_after_a_restart_and_after_a_death(own_client):
    x = _fresh(31)
    y = ff.from_onnx(mlp(), x, batch=10_000)
    output = next(iter(y.outputs.values()))
    close(y.compute(), mlp_reference(x))
    own_client.restart()
    close(y.compute(), mlp_reference(x))
    own_client.restart()
    close(own_client.compute(y).result(timeout=30), mlp_reference(x))
    own_client.restart()
    y.__dask_graph__()
    own_client.wait_for_workers(2, timeout=BOUND_S)  # on a busy machine they may not be back yet
    victim = min(own_client.scheduler_info()["workers"])
    own_client.run(_die, workers=[victim], on_error="ignore")
    close(output.compute(), mlp_reference(x))
    close(dask.compute(y)[0], mlp_reference(x))


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_what_was_sent_is_here_too(client, scheduler):
    """A graph with sent inputs also runs in this process."""
    x = _fresh(33)
    y = ff.from_onnx(mlp(), x, batch=10_000)
    assert any(name.startswith("ferro-input") for name in y.__dask_graph__().layers)
    wanted = mlp_reference(x)
    close(dask.compute(y, scheduler=scheduler)[0], wanted)
    close(next(iter(y.outputs.values())).compute(scheduler=scheduler), wanted)
    close(dask.delayed(np.negative)(y).compute(scheduler=scheduler), -wanted)
    close(dask.compute(*y.outputs.values(), scheduler=scheduler)[0], wanted)
    close(dask.delayed(np.negative)(y).compute(), -wanted)  # and on the cluster, as before
    close(dask.optimize(y)[0].compute(), wanted)


def test_what_lies_on_workers_alone_says_so(client):
    y = ff.from_onnx(mlp(), X).persist()
    finished(y)
    close(y.compute(), mlp_reference(X))
    with pytest.raises(ff.ConfigError, match="lies on a cluster's workers"):
        y.compute(scheduler="sync")
    future = client.scatter(X)
    with pytest.raises(ff.ConfigError, match="lies on a cluster's workers"):
        ff.from_onnx(mlp())(future).compute(scheduler="sync")


def test_sent_values_do_not_travel_in_the_graph(client):
    y = ff.from_onnx(mlp(), _fresh(34), batch=10_000)
    for graph in (y.__dask_graph__(), dask.delayed(np.negative)(y).__dask_graph__()):
        assert len(pickle.dumps(graph)) < 20_000


def test_keys_tell_how_an_input_travels(client):
    x = _fresh(35)
    with dask.config.set(scheduler="sync"):
        here = ff.from_onnx(mlp(), x, batch=10_000).__dask_keys__()
        small = ff.from_onnx(mlp(), X).__dask_keys__()
    sent = ff.from_onnx(mlp(), x, batch=10_000).__dask_keys__()
    assert here != sent
    assert sent == ff.from_onnx(mlp(), x, batch=10_000).__dask_keys__()
    assert small == ff.from_onnx(mlp(), X).__dask_keys__()  # in the tasks, either way


def _layers_in_a_task(rows):
    x = np.zeros((rows, 6), np.float32)
    with worker_client() as inner:
        y = ff.from_onnx(mlp(), x, batch=rows // 2)
        assert result(inner.compute(y)).shape[0] == rows
        return list(y.__dask_graph__().layers)


def test_a_client_in_a_task_sends_too(client):
    layers = result(client.submit(_layers_in_a_task, 40_000, pure=False))
    assert any(name.startswith("ferro-input") for name in layers)


def test_a_model_whose_workers_die_is_named_at_the_client():
    node = helper.make_node("Sleep", ["x"], ["y"], domain="ai.dask_ferro", seconds=60.0)
    call = ff.from_onnx(made_here(model([node], {"x": ["N"]}, {"y": ["N"]})))
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
    assert f"computes model '{call.name}'" in " ".join(raised.value.__notes__)
