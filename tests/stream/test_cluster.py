"""`ff.predict_files` on a real cluster: two worker processes, of which any, and the client, may be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from importlib import import_module
from pathlib import Path

import dask.array as da
import numpy as np
import psutil
import pytest
import zarr

import dask_ferro as ff
from dask_ferro.stream.pools import ClientPool
from tests.graphs import close, mlp, mlp_reference, written
from tests.programs import FORKED, ran
from tests.stream.reading import done_in
from tests.waiting import BOUND_S, ended, until, until_async

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
X = np.random.default_rng(1).standard_normal((600, 6), dtype=np.float32)
# Chunks of it do not go in tasks.
WIDE = np.random.default_rng(2).standard_normal((40_000, 6), dtype=np.float32)


def slow(seconds=0.05):
    """Return y = max(x, 0) that takes its time, whatever the rows, and no CPU."""
    nodes = f"z = ai.dask_ferro.Sleep <seconds = {seconds}> (x) y = Relu (z)"
    return written(f"(float[N,6] x) => (float[N,6] y) {{ {nodes} }}", name="slow")


def noted(journal):
    """Return how often each chunk is done, by the parts that are there."""
    return Counter(done_in(journal))


def write_script(tmp_path, body, **values):
    """Write a Python script, with some values for it."""
    head = "import numpy as np, distributed, dask_ferro as ff\n"
    named = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    body = textwrap.indent(textwrap.dedent(body), "    ")
    (tmp_path / "script.py").write_text(f"{head}{named}if __name__ == '__main__':\n{body}")
    return [sys.executable, "script.py"]


def script(tmp_path, body, **values):
    """Start a Python process."""
    return subprocess.Popen(
        write_script(tmp_path, body, **values),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **FORKED, "PYTHONPATH": str(ROOT)},
    )


def started(tmp_path, client, batch=15):
    """Start a process that runs the slow model over `X`; return it, and what its journal is called."""
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "m.onnx").write_bytes(slow(0.2).SerializeToString())
    body = """
        with distributed.Client(address):
            ff.predict_files("m.onnx", "x.npy", "y.npy", batch_size=batch)
    """
    process = script(tmp_path, body, address=client.scheduler.address, batch=batch)
    return process, tmp_path / "y.npy.ferro-progress"


# ---- right rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "sink"),
    [("npy", "npy"), ("zarr", "npy"), ("numpy", "npy"), ("dask", "npy"), ("npy", "zarr")],
)
def test_from_anything_to_anything(client, tmp_path, source, sink):
    np.save(tmp_path / "x.npy", WIDE)
    zarr.create_array(str(tmp_path / "x.zarr"), data=WIDE, chunks=(7000, 6))
    given = {"numpy": WIDE, "dask": da.from_array(WIDE, chunks=(9000, 3)) * 1}.get(
        source, tmp_path / f"x.{source}"
    )
    summary = ff.predict_files(mlp(), given, tmp_path / f"y.{sink}", batch_size=5000)
    assert (summary.rows, summary.chunks_computed) == (40_000, 8)
    read = np.load if sink == "npy" else lambda path: zarr.open_array(path, mode="r")[:]
    close(read(tmp_path / f"y.{sink}"), mlp_reference(WIDE))


@pytest.mark.parametrize("library", ["pandas", "dask"])
def test_rows_of_frames_are_sent_with_their_chunks(client, tmp_path, library):
    """Also those that are few: a slice of a frame is sent without the rest of it."""
    import dask.dataframe as dd
    import pandas as pd

    frame = pd.DataFrame(X).add_prefix("c").assign(id=[f"row {k}" for k in range(len(X))])
    given = frame if library == "pandas" else dd.from_pandas(frame, npartitions=7)
    assert (
        ff.predict_files(
            mlp(), given, tmp_path / "y.parquet", passthrough="id", batch_size=40
        ).chunks_computed
        == 15
    )
    read = pd.read_parquet(tmp_path / "y.parquet")
    assert read["id"].tolist() == frame["id"].tolist()
    close(read.drop(columns="id").to_numpy(), mlp_reference(X))


def test_nothing_is_left_on_the_cluster(client, tmp_path):
    ff.predict_files(mlp(), WIDE, tmp_path / "y.npy", batch_size=5000)
    until(lambda: not client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)), "no tasks")


# ---- killed ----------------------------------------------------------------------------------------------


def test_a_killed_client_and_nothing_is_computed_twice(client, tmp_path):
    """The workers live on and finish what they had begun; the new client computes the rest, and only that."""
    process, journal = started(tmp_path, client)
    until(lambda: noted(journal).total() >= 10, "ten chunks")
    process.kill()
    process.communicate(timeout=BOUND_S)
    done = noted(journal)
    assert 10 <= done.total() < 40
    summary = ff.predict_files(tmp_path / "m.onnx", tmp_path / "x.npy", tmp_path / "y.npy")
    close(np.load(tmp_path / "y.npy"), np.maximum(X, 0))
    assert summary.chunks_computed + summary.chunks_reused == 40
    assert summary.chunks_reused >= done.total()


def test_everything_killed_at_once(tmp_path):
    """Client, scheduler and workers: the chunks in flight are lost, and no others."""
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "m.onnx").write_bytes(slow(0.2).SerializeToString())
    body = """
        with ff.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
            with distributed.Client(cluster):
                print(ff.predict_files("m.onnx", "x.npy", "y.parquet", batch_size=15))
    """
    process = script(tmp_path, body)
    journal = tmp_path / "y.parquet.ferro-progress"
    until(lambda: noted(journal).total() >= 10, "ten chunks")
    for member in [*psutil.Process(process.pid).children(recursive=True), process]:
        os.kill(member.pid, signal.SIGKILL)
    process.communicate(timeout=BOUND_S)
    done = noted(journal)
    assert set(done.values()) == {1}
    summary = ff.predict_files(tmp_path / "m.onnx", tmp_path / "x.npy", tmp_path / "y.parquet")
    assert (summary.chunks_reused, summary.chunks_computed) == (len(done), 40 - len(done))
    copy = written("(float[N,6] y) => (float[N,6] z) { z = Identity (y) }")
    ff.predict_files(copy, tmp_path / "y.parquet", tmp_path / "z.npy")
    close(np.load(tmp_path / "z.npy"), np.maximum(X, 0))


@pytest.mark.parametrize("source", ["npy", "numpy", "dask"])
def test_a_killed_worker_costs_what_it_had_in_hand(client, tmp_path, source):
    """Rows that were sent to it from the client's memory are sent again: a chunk of them is over 64 KiB."""
    x = np.resize(WIDE, (120_000, 6))
    np.save(tmp_path / "x.npy", x)
    given = {"npy": tmp_path / "x.npy", "numpy": x, "dask": da.from_array(x, chunks=(5000, 6)) * 1}[source]
    journal = tmp_path / "y.npy.ferro-progress"
    victim = next(iter(client.run(os.getpid).values()))

    def kill():
        until(lambda: noted(journal).total() >= 6, "six chunks")
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    summary = ff.predict_files(slow(0.1), given, tmp_path / "y.npy", batch_size=3000)
    ended(killer)
    assert (summary.chunks_computed, summary.chunks_reused) == (40, 0)
    close(np.load(tmp_path / "y.npy"), np.maximum(x, 0))
    client.wait_for_workers(2, timeout=BOUND_S)


def test_an_interrupt_says_how_to_go_on(client, tmp_path):
    process, journal = started(tmp_path, client)
    until(lambda: noted(journal).total() >= 4, "four chunks")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=BOUND_S)
    assert "KeyboardInterrupt" in err
    assert "of 40 chunks are done" in err
    assert "call ff.predict_files as before to resume" in err
    reused = ff.predict_files(tmp_path / "m.onnx", tmp_path / "x.npy", tmp_path / "y.npy").chunks_reused
    assert 4 <= reused < 40
    close(np.load(tmp_path / "y.npy"), np.maximum(X, 0))


# ---- failures --------------------------------------------------------------------------------------------


def test_a_source_that_is_cut_short_ends_the_run_and_keeps_nothing(client, tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, X)

    def cut():
        until(lambda: noted(tmp_path / "y.npy.ferro-progress").total() >= 4, "four chunks")
        os.truncate(path, path.stat().st_size - 6 * 4 * 100)

    cutter = threading.Thread(target=cut)
    cutter.start()
    with pytest.raises(
        ff.InputError, match=r"source of 'x' changed while the run read it.*rows \d+ to \d+ failed"
    ):
        ff.predict_files(slow(0.2), path, tmp_path / "y.npy", batch_size=15)
    ended(cutter)
    np.save(path, X)
    assert (
        ff.predict_files(slow(0.2), path, tmp_path / "y.npy", batch_size=15, overwrite=True).chunks_reused
        == 0
    )
    close(np.load(tmp_path / "y.npy"), np.maximum(X, 0))


async def _asynchronous(client_of, work):
    import distributed

    async with distributed.Client(processes=False, asynchronous=True, dashboard_address=":0") as client:
        return await asyncio.wait_for(work(client_of(client)), BOUND_S)


@pytest.mark.parametrize("client_of", [lambda c: c, lambda c: None], ids=["given", "the current one"])
def test_a_run_with_an_asynchronous_client_is_awaited(tmp_path, client_of):
    def work(client):
        return ff.predict_files(mlp(), X, tmp_path / "y.npy", batch_size=7, client=client)

    assert asyncio.run(_asynchronous(client_of, work)).rows == len(X)
    close(np.load(tmp_path / "y.npy"), mlp_reference(X))


def test_an_awaited_run_stops_when_it_is_cancelled_and_resumes(tmp_path):
    async def cancelled(client):
        run = asyncio.ensure_future(
            ff.predict_files(slow(), X, tmp_path / "y.npy", batch_size=15, client=client)
        )
        journal = tmp_path / "y.npy.ferro-progress"
        await until_async(lambda: done_in(journal), "a chunk that is done")
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        return await ff.predict_files(slow(), X, tmp_path / "y.npy", batch_size=15, client=client)

    summary = asyncio.run(_asynchronous(lambda c: c, cancelled))
    assert summary.chunks_reused >= 1
    assert summary.rows == len(X)
    close(np.load(tmp_path / "y.npy"), np.maximum(X, 0))


@pytest.mark.needs("mount namespaces")
@pytest.mark.parametrize("hidden", ["model", "source", "sink"])
def test_what_the_workers_do_not_see(client, tmp_path, hidden):
    """The model travels; rows do not, and that is said before anything is computed."""
    for name in ("model", "source", "sink"):
        (tmp_path / name).mkdir()
    body = """
        import subprocess
        subprocess.run(["mount", "-t", "tmpfs", "none", hidden], check=True)
        np.save("source/x.npy", np.zeros((600, 6), "f4"))
        open("model/m.onnx", "wb").write(content)
        with distributed.Client(address):
            try:
                print(ff.predict_files("model/m.onnx", "source/x.npy", "sink/y.npy").rows)
            except ff.InputError as error:
                print(error)
    """
    values = {"hidden": hidden, "content": mlp().SerializeToString(), "address": client.scheduler.address}
    run = ran(
        ["unshare", "--mount", *write_script(tmp_path, body, **values)],
        env={"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    if hidden == "model":
        assert run.stdout.strip() == "600", run.stderr
        close(np.load(tmp_path / "sink" / "y.npy"), mlp_reference(np.zeros((600, 6), "f4")))
    else:
        path = {"source": "source/x.npy", "sink": "sink/y.npy.ferro-progress/parts-"}[hidden]
        assert "2 workers do not see all files of the run, for instance tcp://" in run.stdout, run.stderr
        assert str(tmp_path / path) in run.stdout


# ---- memory ----------------------------------------------------------------------------------------------


def test_memory_is_that_of_a_few_chunks(client, tmp_path):
    """480 MB of rows: the client takes a twentieth of that, and the workers a third."""
    rows, columns = 200_000, 600
    header = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(rows, columns))
    del header  # all zeros, and no block of it on the disk
    weights = {"w": np.ones((columns, 300), np.float32)}
    made = written(f"(float[N,{columns}] x) => (float[N,300] y) {{ y = MatMul (x, w) }}", weights)
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    body = """
        import resource
        with distributed.Client(address):
            ff.predict_files("m.onnx", np.zeros((9, 600), "f4"), "small.npy")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            ff.predict_files("m.onnx", "x.npy", "y.npy", batch_size=5_000)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    client.run(
        import_module, "dask_ferro.lower.worker.task"
    )  # ONNX and its runtime, which a first run would load
    idle = {pid: psutil.Process(pid).memory_info().rss for pid in client.run(os.getpid).values()}
    process = script(tmp_path, body, address=client.scheduler.address)
    peak = dict(idle)

    def over():
        for pid in peak:
            peak[pid] = max(peak[pid], psutil.Process(pid).memory_info().rss)
        return process.poll() is not None

    # 480 MB through a disk that others use.
    until(over, "the run", seconds=4 * BOUND_S, every=0.05, seen=lambda: f"{peak} bytes")
    out, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 0, err
    assert int(out) * 1024 < 24e6
    assert sum(peak.values()) - sum(idle.values()) < 160e6
    assert np.load(tmp_path / "y.npy", mmap_mode="r").shape == (rows, 300)


def test_a_run_whose_client_was_closed_ends(tmp_path):
    """A future's callback goes with the client's loop: nothing would ever end, and the look at the pool says so."""
    from distributed import Client, LocalCluster
    from distributed.client import ClosedClientError

    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster:
        client = Client(cluster)
        pool = ClientPool(client)
        pool.look()
        client.close()
        for asks in (pool.look, lambda: pool.slots, pool._await_worker):
            with pytest.raises(ClosedClientError, match="client of the run was closed"):
                asks()
