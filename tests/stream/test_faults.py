"""What goes wrong around `ff.predict_files`, for all sinks, begun in all ways, on threads and on a cluster."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import dask.array as da
import distributed
import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from onnx import helper

import dask_ferro as ff
from tests.clusters import running
from tests.graphs import close, diamond, diamond_reference, mlp, mlp_reference, model
from tests.programs import ran
from tests.stream.reading import done_at, done_in, read
from tests.stream.stepper import stepper
from tests.waiting import ended, until

ROWS, BATCH = 40, 8
X = np.random.default_rng(1).standard_normal((ROWS, 4), dtype=np.float32)
SIX = np.random.default_rng(2).standard_normal((ROWS, 6), dtype=np.float32)
KINDS = ["npy", "zarr", "parquet"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with stepper(tmp_path_factory.mktemp("reports")) as found:
        yield found


@contextmanager
def running_beside(call):
    """Run `call` in a thread beside the block, and wait for its end; gives what it raised."""
    failed = []

    def run():
        try:
            call()
        except (ff.InputError, RuntimeError) as error:
            failed.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    yield failed
    ended(thread)


def gated(block, gate, number, block_id=None):
    """Return a block, if it is another than `number` or the gate, a file, is there."""
    if block_id[0] == number and not os.path.exists(gate):
        raise ValueError("the gate is shut")
    return block


def waiting(block, gate, number, block_id=None):
    """Return a block; that of `number` when the gate, a file, is there."""
    if block_id[0] == number:
        until(lambda: os.path.exists(gate), f"the gate {gate}")
    return block


def through(function, gate, x, number=3):
    """Return the rows as a dask array whose blocks go through a gate."""
    rows = da.from_array(x, chunks=(BATCH, x.shape[1]))
    return rows.map_blocks(function, os.path.abspath(gate), number, dtype=x.dtype, meta=x[:0])


def noted(folder):
    """Return the chunks whose parts are there, of the first output."""
    return done_in(folder)


# ---- all sinks, all beginnings, all places ---------------------------------------------------------------

SINKS = {
    "npy": {"total": "t.npy"},
    "zarr": {"total": "t.zarr"},
    "parquet": {"total": "t.parquet"},
    "several": {"b1": "b1.zarr", "total": "t.parquet", "b2": "b2.npy"},
}


@pytest.mark.parametrize("fault", ["nothing", "a part that is gone"])
@pytest.mark.parametrize("begin", ["resume", "overwrite"])
@pytest.mark.parametrize(
    ("where", "sinks"),
    [
        *(("threads", sinks) for sinks in SINKS),
        pytest.param("cluster", "several", marks=pytest.mark.cluster),
        *(pytest.param("cluster", s, marks=[pytest.mark.cluster, pytest.mark.soak]) for s in KINDS),
    ],
)
def test_what_is_not_there_is_computed_and_no_more(request, where, sinks, begin, fault):
    """After a failure the same call gives the right rows, bit by bit, and computes what is not there."""
    client = request.getfixturevalue("client") if where == "cluster" else None
    wanted = SINKS[sinks]
    first = next(name for name in diamond_reference(X) if name in wanted)
    journal = f"{wanted[first]}.ferro-progress"
    gate = Path("gate")
    chosen = ff.from_onnx(diamond(), outputs=[name for name in diamond_reference(X) if name in wanted])
    source = through(gated, gate, X)
    if begin == "overwrite":
        ff.predict_files(chosen, X * 2, wanted, batch_size=BATCH, client=client)
    with pytest.raises(RuntimeError, match="rows 24 to 31 failed: ValueError: the gate is shut"):
        ff.predict_files(
            chosen, source, wanted, batch_size=BATCH, client=client, overwrite=begin == "overwrite"
        )
    until(lambda: len(noted(journal)) >= 1, "a chunk that is done")
    if client is not None:
        until(lambda: not any(client.processing().values()), "no tasks")
    folders = sorted(path for path in Path(journal).glob("parts-*/*") if path.is_dir())
    done = set.intersection(*(set(done_at(folder)) for folder in folders))
    assert 1 <= len(done) < 5
    for name, path in wanted.items():  # nothing at the sink before it is whole
        if begin == "overwrite":
            close(read(path), diamond_reference(X * 2)[name])
        else:
            assert not os.path.exists(path)
    gate.touch()
    cost = 0
    if fault == "a part that is gone":
        number = min(done)
        lost = [
            p for p in folders[-1].rglob("*") if p.match(f"part-{number:06d}.*") or p.match(f"c/{number}/0")
        ]
        lost[0].unlink()
        cost = 1
    summary = ff.predict_files(chosen, source, wanted, batch_size=BATCH, client=client)
    assert (summary.chunks_reused, summary.chunks_computed) == (len(done) - cost, 5 - len(done) + cost)
    ff.predict_files(chosen, X, (whole := {n: f"whole.{p}" for n, p in wanted.items()}), batch_size=BATCH)
    for name, path in wanted.items():
        np.testing.assert_array_equal(read(path), read(whole[name]))
        close(read(path), diamond_reference(X)[name])
    left = {p.name for p in Path(".").iterdir() if not p.name.startswith("whole")}
    assert left == {"gate", journal, *wanted.values()}
    assert os.listdir(journal) == ["run.json"]
    assert ff.predict_files(chosen, source, wanted, batch_size=BATCH, client=client).chunks_computed == 0


def damaged(path):
    """Change a byte of an output."""
    file = next(p for p in [path, *sorted(path.rglob("*"))] if p.is_file() and p.name != "zarr.json")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_changed_is_refused_and_kept(kind):
    ff.predict_files(mlp(), SIX, f"y.{kind}", batch_size=BATCH)
    damaged(Path(f"y.{kind}"))
    before = tree(".")
    for options, said in (
        ({}, r"changed since ff\.predict_files wrote it"),
        ({"overwrite": True}, "it has changed since"),
    ):
        with pytest.raises(ff.InputError, match=said):
            ff.predict_files(mlp(), SIX, f"y.{kind}", batch_size=BATCH, **options)
        assert tree(".") == before


# ---- sources that change ---------------------------------------------------------------------------------


def sum_of(*inputs):
    nodes = [helper.make_node("Add", list(inputs), ["y"])]
    return model(nodes, {name: ["N", 6] for name in inputs}, {"y": ["N", 6]})


def written(kind, x):
    """Write the rows as a source, in place; return it."""
    if kind == "numpy":
        return x.copy()
    if kind == "npy":
        np.save("x.npy", x)
    else:
        zarr.create_array("x.zarr", data=x, chunks=(BATCH, 6), overwrite=True)
    return f"x.{kind}"


@pytest.mark.parametrize(
    ("kind", "order"),
    [*((kind, "xm") for kind in ("npy", "zarr", "numpy")), ("npy", "mx")],
)
def test_a_source_that_changes_while_it_is_read(kind, order):
    """`m` waits at a gate: in the order xm, `x` is read by then, and only the end can tell; in mx a chunk does."""
    source = written(kind, SIX)
    given = {"x": source, "m": through(waiting, "gate", SIX, number=4)}
    with running_beside(lambda: ff.predict_files(sum_of(*order), given, "y.npy", batch_size=BATCH)) as failed:
        until(lambda: len(noted("y.npy.ferro-progress")) == 4, "four chunks")
        if kind == "numpy":
            source += 1
        else:
            written(kind, SIX + 1)
        Path("gate").touch()
    assert len(failed) == 1, "the run ended well"
    assert "source of 'x' changed while the run read it. No result is kept" in failed[0]
    # Of order xm the last chunk may be at either input when its source is written again.
    assert order == "xm" or "changed while it was read" in failed[0]
    assert not os.path.exists("y.npy")
    given["x"] = written(kind, SIX + 2)
    ff.predict_files(sum_of(*order), given, "y.npy", batch_size=BATCH, overwrite=True)
    close(np.load("y.npy"), 2 * SIX + 2)


REPLACED = {
    "in place, with its time": lambda old, new: Path("x.npy").write_bytes(new),
    "by a rename, with its time": lambda old, new: (
        Path("z.npy").write_bytes(new),
        os.replace("z.npy", "x.npy"),
    ),
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_source_of_the_same_size_and_time_is_another_one(how):
    """Change time and inode tell."""
    written("npy", SIX)
    ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=BATCH)
    old = os.stat("x.npy")
    REPLACED[how](old, Path("x.npy").read_bytes()[:-4] + b"\0\0\0\0")
    os.utime("x.npy", ns=(old.st_atime_ns, old.st_mtime_ns))
    assert os.stat("x.npy").st_mtime_ns == old.st_mtime_ns
    with pytest.raises(
        ff.InputError, match=r"is of another run: call ff.predict_files .* source of 'x' \(was"
    ):
        ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=BATCH)


def test_no_chunk_is_kept_where_chunks_fail_and_a_source_was_written_to():
    rows = SIX.copy()

    def adding(block, gate, number, block_id=None):
        if block_id[0] == number and not os.path.exists(gate):
            rows[:] += 1
        return gated(block, gate, number, block_id)

    given = {"x": through(adding, "gate", SIX, number=4), "m": rows}
    said = r"'m' changed while.*No result is kept.*first to fail: rows \d+ to"
    with pytest.raises(ff.InputError, match=said):
        ff.predict_files(sum_of("x", "m"), given, "y.npy", batch_size=BATCH)
    Path("gate").touch()
    rows[:] = SIX
    assert ff.predict_files(sum_of("x", "m"), given, "y.npy", batch_size=BATCH).chunks_reused == 0
    close(np.load("y.npy"), 2 * SIX)


def taking_away(block, gate, number, block_id=None, fails=True):
    """Return a block; before that of `number` the folder "in" is moved away, once."""
    if block_id[0] == number and not os.path.exists(gate):
        Path(gate).touch()
        os.rename(f"{os.path.dirname(gate)}/in", f"{os.path.dirname(gate)}/away")
        if fails:
            raise ValueError("half of a file")
    return block


@pytest.mark.parametrize("fails", [True, False])
def test_a_source_that_cannot_be_read_for_a_while_costs_no_chunk(fails, monkeypatch):
    """It is taken away while the array's last chunk is read: of the order mx, `m` is read first."""
    # With two threads, the chunk before may still have to read it.
    monkeypatch.setattr("dask_ferro.stream.pools.CPU_COUNT", 1)
    os.mkdir("in")
    np.save("in/x.npy", SIX)
    given = {"x": through(partial(taking_away, fails=fails), "gate", SIX, number=4), "m": "in/x.npy"}
    said = (
        "of 5 chunks are done.* as before to compute"
        if fails
        else "'m' can no longer be read.* All chunks are done"
    )
    with pytest.raises((RuntimeError, ff.InputError), match=said):
        ff.predict_files(sum_of("m", "x"), given, "y.npy", batch_size=BATCH)
    done = len(noted("y.npy.ferro-progress"))
    os.rename("away", "in")
    assert ff.predict_files(sum_of("m", "x"), given, "y.npy", batch_size=BATCH).chunks_reused == done > 0
    close(np.load("y.npy"), 2 * SIX)


def test_a_sink_that_the_source_is_made_from():
    """A dask array of the sink: it is read to its end before anything takes its place."""
    ff.predict_files(sum_of("x", "m"), {"x": SIX, "m": SIX}, "y.zarr", batch_size=BATCH)
    for _ in range(2):
        before = read("y.zarr")
        source = da.from_zarr("y.zarr")
        ff.predict_files(
            sum_of("x", "m"), {"x": source, "m": SIX}, "y.zarr", batch_size=BATCH, overwrite=True
        )
        close(read("y.zarr"), before + SIX)


# ---- what overwrite=True leaves alone --------------------------------------------------------------------


def tree(path):
    """Return what lies in a folder: names, and contents of files."""
    found = {}
    for entry in sorted(Path(path).rglob("*")):
        name = str(entry.relative_to(path))
        found[name] = (
            os.readlink(entry) if entry.is_symlink() else entry.read_bytes() if entry.is_file() else None
        )
    return found


def own(path):
    """Make an output of ours."""
    ff.predict_files(mlp(), SIX, path, batch_size=BATCH)


def own_and(path, *make):
    own(path)
    for one in make:
        one()


FOREIGN = {
    "an array that somebody saved": ("y.npy", lambda: np.save("y.npy", SIX)),
    "one of the same shape over ours": ("y.npy",
        lambda: own_and("y.npy", lambda: np.save("y.npy", np.ones((ROWS, 3), np.float32)))),
    "a text": ("y.npy", lambda: Path("y.npy").write_text("thesis")),
    "a folder": ("y.npy", lambda: (Path("y.npy").mkdir(), Path("y.npy/thesis").touch())),
    "an empty folder": ("y.npy", lambda: Path("y.npy").mkdir()),
    "a link to a file": ("y.npy",
        lambda: (Path("thesis.npy").write_text("all"), Path("y.npy").symlink_to("thesis.npy"))),
    "a file beside ours": ("y.parquet",
        lambda: own_and("y.parquet", lambda: Path("y.parquet/thesis.tex").write_text("all"))),
    "a table beside ours": ("y.parquet",
        lambda: own_and("y.parquet", lambda: Path("y.parquet/2020.parquet").write_text("all"))),
    "a temporary file beside ours": ("y.parquet",
        lambda: own_and("y.parquet", lambda: Path("y.parquet/.mine.tmp").write_text("all"))),
    "a link beside ours": ("y.parquet",
        lambda: own_and("y.parquet", lambda: Path("y.parquet/more").symlink_to("/etc"))),
    "a folder beside ours": ("y.parquet", lambda: own_and("y.parquet", lambda: Path("y.parquet/d.parquet").mkdir())),
    "a folder of tables": ("y.parquet",
        lambda: (Path("y.parquet").mkdir(), Path("y.parquet/part-000000.parquet").write_text("all"))),
    "one table": ("y.parquet", lambda: pq.write_table(pa.table({"a": [1]}), "y.parquet")),
    "a group": ("y.zarr", lambda: zarr.create_group("y.zarr").create_array("a", data=SIX)),
    "a file in ours, of zarr": ("y.zarr",
        lambda: own_and("y.zarr", lambda: Path("y.zarr/notes.txt").write_text("all"))),
    "a file among chunks": ("y.zarr", lambda: own_and("y.zarr", lambda: Path("y.zarr/c/notes").write_text("all"))),
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_overwriting_removes_nothing_but_outputs_of_ours(what):
    path, make = FOREIGN[what]
    make()
    before = tree(".")
    with pytest.raises(ff.InputError, match="remove it yourself"):
        ff.predict_files(mlp(), SIX * 2, path, batch_size=BATCH, overwrite=True)
    assert tree(".") == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_to_lie_at_the_sink_during_a_run_stays(kind):
    """It is reported at the end, and the run continues once the file has been moved away."""
    path = Path(f"y.{kind}")
    source = through(waiting, "gate", SIX)
    with running_beside(lambda: ff.predict_files(mlp(), source, path, batch_size=BATCH)) as failed:
        until(lambda: list(Path(".").glob("*.ferro-progress/parts-*")), "a part")
        path.write_text("thesis")
        Path("gate").touch()
    assert "exists, and is not what was there when this run began" in failed[0]
    assert path.read_text() == "thesis"
    path.unlink()
    assert ff.predict_files(mlp(), source, path, batch_size=BATCH).chunks_computed == 0
    close(read(path), mlp_reference(SIX))


# ---- the lock of a sink ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["y.npy", "./y.npy", "../here/y.npy", "linked/y.npy", "link.npy"])
def test_a_second_run_is_refused_by_whatever_path_and_a_dead_one_holds_nothing(runs, tmp_path, name):
    where = tmp_path / "here"
    where.mkdir()
    onnx.save(mlp(), str(where / "m.onnx"))
    np.save(where / "x.npy", SIX)
    (where / "linked").symlink_to(where)
    (where / "link.npy").symlink_to("y.npy")
    stopped = runs.run(
        "m.onnx",
        "x.npy",
        "y.npy",
        cwd=where,
        batch_size=BATCH,
        limits={"steps": 9, "signal": int(signal.SIGSTOP)},
    )
    assert "stopped" in stopped
    second = runs.run("m.onnx", "x.npy", name, cwd=where, batch_size=BATCH)
    assert f"is being written by another ff.predict_files: process {stopped['pid']} on host" in second["said"]
    os.kill(stopped["pid"], signal.SIGKILL)
    assert runs.go_on(stopped["pid"])["killed"] == signal.SIGKILL
    assert "computed" in runs.run("m.onnx", "x.npy", name, cwd=where, batch_size=BATCH)
    close(np.load(where / "y.npy"), mlp_reference(SIX))


def test_a_lock_that_is_no_file_is_refused_and_not_waited_for():
    os.mkfifo("y.npy.ferro-lock")
    with pytest.raises(ff.InputError, match=r"a lock has to be a file \('.*y.npy.ferro-lock'\)"):
        ff.predict_files(mlp(), SIX, "y.npy")


@pytest.mark.parametrize("cause", [errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_refused(cause, monkeypatch):
    def flock(handle):
        raise OSError(cause, os.strerror(cause))

    monkeypatch.setattr("dask_ferro.portable.lock", flock)
    with pytest.raises(
        ff.InputError,
        match=r"y.npy' cannot be written: ff.predict_files locks it by flock.*another file system",
    ):
        ff.predict_files(mlp(), SIX, "y.npy")
    assert not os.path.exists("y.npy")


def test_a_lock_that_another_host_has_left_is_nobodys():
    said = {"host": "far", "pid": 7, "since": "2026-01-01 00:00:00 UTC"}
    Path("y.npy.ferro-lock").write_text(json.dumps(said))
    ff.predict_files(mlp(), SIX, "y.npy")
    close(np.load("y.npy"), mlp_reference(SIX))
    assert sorted(os.listdir(".")) == ["y.npy", "y.npy.ferro-progress"]


def test_a_run_whose_lock_was_removed_publishes_nothing():
    source = through(waiting, "gate", SIX)
    with running_beside(lambda: ff.predict_files(mlp(), source, "y.npy", batch_size=BATCH)) as failed:
        until(lambda: list(Path(".").glob("*.ferro-progress/parts-*")), "a part")
        Path("y.npy.ferro-lock").unlink()
        Path("y.npy.ferro-lock").touch()
        Path("gate").touch()
    assert "was removed or replaced while it was written" in failed[0]
    assert not os.path.exists("y.npy")
    assert os.path.exists("y.npy.ferro-lock"), "the lock is another's"


def hold_writes(gate, held):
    """Stop the threads of this process before they write a chunk while the gate is shut."""

    def hook(event, args):
        writes = event == "open" and args[2] & os.O_WRONLY
        if writes and ".part-" in str(args[0]):
            Path(held).touch()
            until(lambda: os.path.exists(gate), f"the gate {gate}")

    sys.addaudithook(hook)


@pytest.mark.cluster
def test_a_worker_that_outlives_its_run_does_not_write_into_the_next(tmp_path):
    """It is stopped after it looked whose journal it is, and before it writes; meanwhile another run ends."""
    onnx.save(mlp(), "m.onnx")
    np.save("x.npy", SIX)
    with (
        ff.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        client.run(hold_writes, str(tmp_path / "gate"), str(tmp_path / "held"))
        code = (
            "import distributed, dask_ferro as ff\n"
            f"with distributed.Client({cluster.scheduler_address!r}):\n"
            f"    ff.predict_files('m.onnx', 'x.npy', 'y.npy', batch_size={BATCH})\n"
        )
        root = str(Path(__file__).parents[2])
        first = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root})
        until(lambda: os.path.exists("held"), "a worker that is about to write")
        first.kill()
        ended(first)
        ff.predict_files(mlp(), SIX * 2, "y.npy", batch_size=BATCH, overwrite=True)
        Path("gate").touch()
        until(lambda: not any(client.call_stack().values()), "an idle worker")
    close(np.load("y.npy"), mlp_reference(SIX * 2))
    assert ff.predict_files(mlp(), SIX * 2, "y.npy", batch_size=BATCH).chunks_computed == 0


# ---- no room, no right, no workers -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk(runs, tmp_path, kind):
    """No file may grow over 300 bytes; with room, the same call ends it."""
    onnx.save(mlp(), "m.onnx")
    np.save("x.npy", SIX)
    args = ("m.onnx", "x.npy", f"y.{kind}")
    failed = runs.run(*args, cwd=tmp_path, batch_size=ROWS, limits={"most_bytes": 300})
    assert failed["error"] in ("InputError", "RuntimeError")
    assert "File too large" in failed["said"]
    assert not os.path.exists(f"y.{kind}")
    assert runs.run(*args, cwd=tmp_path, batch_size=ROWS)["computed"] == 1
    close(read(f"y.{kind}"), mlp_reference(SIX))
    assert sorted(os.listdir(".")) == ["m.onnx", "x.npy", f"y.{kind}", f"y.{kind}.ferro-progress"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_cannot_be_written(tmp_path, kind):
    onnx.save(mlp(), "m.onnx")
    np.save("x.npy", SIX)
    os.mkdir("sink")
    code = (
        "import subprocess, dask_ferro as ff\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro', 'none', 'sink'], check=True)\n"
        f"try: ff.predict_files('m.onnx', 'x.npy', 'sink/y.{kind}')\n"
        "except ff.InputError as error: print(error)\n"
    )
    words = ["unshare", "--mount", sys.executable, "-c", code]
    run = ran(words, env={"PYTHONPATH": str(Path(__file__).parents[2])})
    if "mount failed" in run.stderr or "unshare" in run.stderr:
        pytest.skip("needs the right to mount")
    assert f"sink/y.{kind}' cannot be written: Read-only file system" in run.stdout, run.stderr


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["npy", "numpy"])
def test_a_cluster_without_workers_is_told_and_waited_for(caplog, kind, monkeypatch):
    """Rows in memory have to be sent to a worker, and a path has not."""
    np.save("x.npy", SIX)
    source = "x.npy" if kind == "npy" else np.resize(SIX, (4000, 6))
    ended_well = []
    monkeypatch.setattr("dask_ferro.stream.pools._NO_WORKERS", 0.1)
    with running(0, processes=False) as client:

        def run():
            ff.predict_files(mlp(), source, "y.npy", client=client)
            ended_well.append(True)

        with running_beside(run) as failed:
            until(lambda: "has no workers; ff.predict_files waits for one" in caplog.text, "a word")
            assert client.cluster.scheduler_address in caplog.text
            assert ended_well == []
            client.cluster.scale(1)
        assert failed == []
    close(np.load("y.npy"), mlp_reference(SIX if kind == "npy" else source))
