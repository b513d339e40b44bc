"""`ff.predict_files` on threads of this process: right rows, gone on with, refused."""

from __future__ import annotations

import errno
import os
import pickle
from contextlib import nullcontext
from pathlib import Path

import dask.array as da
import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import helper

import dask_ferro as ff
from dask_ferro.stream import files
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.endpoints import Endpoints, journal_folder, open_source, sinks_by_name
from dask_ferro.stream.journal import Journal
from dask_ferro.stream.work import StreamJob, Work, run_chunk
from tests.each import every
from tests.graphs import close, diamond, diamond_reference, mlp, mlp_reference, model, written
from tests.stream.reading import read

ROWS = 50
X = np.random.default_rng(1).standard_normal((ROWS, 6), dtype=np.float32)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every test runs in a folder of its own, where `x.npy` is."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)


def source_of(kind):
    if kind == "numpy":
        return X
    if kind == "dask":
        return da.from_array(X, chunks=(9, 2))
    if kind == "npy":
        return "x.npy"
    ff.predict_files(copy_model(), "x.npy", f"x.{kind}", batch_size=9)
    return f"x.{kind}"


def copy_model():
    return model([helper.make_node("Identity", ["x"], ["y"])], {"x": ["N", 6]}, {"y": ["N", 6]})


def disk_that_fills_up(monkeypatch, after):
    """The disk takes `after` parts, and no more."""
    put, count = files.put, iter(range(10**6))

    def full(path, content):
        if "part-" in path and next(count) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(path, content)

    monkeypatch.setattr(files, "put", full)


def job_of(sink):
    """Return what the tasks of the run that wrote a sink had in common, and its parts again."""
    opened = ff.from_onnx(mlp())._opened
    places = sinks_by_name(["scores"], sink)
    journal = Journal(journal_folder(sink, places))
    header = journal.header()
    ends = Endpoints({"x": open_source(X, "x")}, places, [])
    work = Work(opened, ends, Chunks(header.work["rows"], header.work["batch"]))
    sinks = journal.placed(work.sinks(work.known_rows()), header.run)
    return StreamJob(work.call, work.chunks, tuple(sinks), journal.parts(header.run))


# ---- right rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["npy", "zarr", "parquet", "numpy", "dask"])
@pytest.mark.parametrize("sink", ["npy", "zarr", "parquet"])
def test_from_anything_to_anything(source, sink):
    summary = ff.predict_files(mlp(), source_of(source), f"y.{sink}", batch_size=8)
    assert (summary.rows, summary.chunks_computed, summary.chunks_reused) == (ROWS, 7, 0)
    assert summary.rows_per_second == pytest.approx(ROWS / summary.seconds)
    close(read(f"y.{sink}"), mlp_reference(X))


@pytest.mark.parametrize("given", ["path", "bytes", "proto", "graph"])
def test_a_model_in_any_form(given):
    onnx.save(mlp(), "m.onnx")
    forms = {"path": Path("m.onnx"), "bytes": Path("m.onnx").read_bytes(), "proto": mlp()}
    forms["graph"] = ff.from_onnx("m.onnx", batch_size=10)
    summary = ff.predict_files(forms[given], "x.npy", "y.npy")
    assert summary.chunks_computed == (5 if given == "graph" else 1)
    close(np.load("y.npy"), mlp_reference(X))


def test_a_batch_that_nobody_named():
    assert ff.predict_files(mlp(), "x.npy", "y.npy").chunks_computed == 1  # 50 rows are no 50 ms of work
    close(np.load("y.npy"), mlp_reference(X))


def test_a_model_of_another_fixed_batch_is_refused():
    with pytest.raises(
        ff.InputError, match=r"on axis 0, wanted 4.*torch.onnx.export dynamic_axes={'x': {0: 'batch'}}"
    ):
        ff.predict_files(mlp(rows=4), "x.npy", "y.npy", batch_size=5)


def test_several_outputs_to_a_folder():
    ff.predict_files(diamond(), X[:, :4], "out", batch_size=8)
    wanted = diamond_reference(X[:, :4])
    assert sorted(os.listdir("out")) == sorted(f"{name}.npy" for name in wanted)
    for name, array in wanted.items():
        close(np.load(f"out/{name}.npy"), array)


def two_inputs():
    """Return y = tile(x + m, times), whose shape is not known before it runs."""
    nodes = "s = Add (x, m) y = Tile (s, times)"
    return written(f"(float[N,6] x, float[N,1] m, int64[2] times) => (float[?,?] y) {{ {nodes} }}")


@pytest.mark.parametrize("rows", [ROWS, 0])
def test_several_inputs_one_without_the_batch_and_an_output_of_unknown_shape(rows):
    x, m, times = X[:rows], X[:rows, :1], np.array([1, 2])
    said = pytest.warns(UserWarning, match=r"\(Tile\) is not known to keep") if rows else nullcontext()
    with said:  # `times` might repeat the rows
        ff.predict_files(two_inputs(), {"m": m, "x": x, "times": times}, "y.npy", batch_size=8)
    close(np.load("y.npy"), np.tile(x + m, times))


@pytest.mark.parametrize("sink", ["npy", "zarr", "parquet"])
@pytest.mark.parametrize("source", ["npy", "numpy", "dask"])
def test_no_rows(source, sink):
    np.save("none.npy", X[:0])
    given = {"npy": "none.npy", "numpy": X[:0], "dask": da.from_array(X[:0])}[source]
    for _ in range(2):
        summary = ff.predict_files(mlp(), given, f"y.{sink}")
        assert (summary.rows, summary.chunks_computed, summary.chunks_reused) == (0, 0, 0)
    if sink == "parquet":
        assert pq.read_table("y.parquet").schema == pa.schema(
            [(f"scores_{k}", pa.float32()) for k in range(3)]
        )
    else:
        assert read(f"y.{sink}").shape == (0, 3)


# ---- gone on with ----------------------------------------------------------------------------------------


def test_again_is_nothing():
    ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=8)
    written = os.stat("y.npy").st_mtime_ns
    again = ff.predict_files(
        mlp(), "x.npy", "y.npy"
    )  # a run that names no batch continues with the one before
    assert (again.rows, again.rows_computed, again.chunks_computed, again.chunks_reused) == (ROWS, 0, 0, 7)
    assert os.stat("y.npy").st_mtime_ns == written
    assert sorted(os.listdir("y.npy.ferro-progress")) == ["run.json"]


def test_a_failure_names_the_rows_and_the_run_goes_on_where_it_was(monkeypatch):
    with monkeypatch.context() as full:
        disk_that_fills_up(full, after=4)
        with pytest.raises(RuntimeError, match=r"rows .* failed: OSError: .*No space left") as caught:
            ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=5)
    assert "4 of 10 chunks are done" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    summary = ff.predict_files(mlp(), "x.npy", "y.npy")
    assert (summary.chunks_computed, summary.chunks_reused, summary.rows_computed) == (6, 4, 30)
    close(np.load("y.npy"), mlp_reference(X))


def test_a_sink_that_was_removed_is_made_anew(monkeypatch):
    ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=5)
    os.unlink("y.npy")
    assert ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=5).chunks_computed == 10
    close(np.load("y.npy"), mlp_reference(X))


def test_one_of_several_sinks_that_was_removed_is_made_anew_with_the_others():
    sinks = {"b1": "b1.zarr", "total": "t.parquet", "b2": "b2.npy"}
    chosen = ff.from_onnx(diamond(), outputs=list(sinks))
    ff.predict_files(chosen, X[:, :4], sinks, batch_size=8)
    os.unlink("b2.npy")
    ff.predict_files(chosen, X[:, :4], sinks, batch_size=8)
    for name, path in sinks.items():
        close(read(path), diamond_reference(X[:, :4])[name])


@pytest.mark.parametrize("kind", ["npy", "zarr", "parquet"])
def test_overwrite(kind):
    ff.predict_files(mlp(), "x.npy", f"y.{kind}", batch_size=5)
    np.save("z.npy", X[:20] * 2)
    assert ff.predict_files(mlp(), "z.npy", f"y.{kind}", batch_size=8, overwrite=True).chunks_computed == 3
    close(read(f"y.{kind}"), mlp_reference(X[:20] * 2))


def test_a_task_of_a_run_that_was_overwritten_does_not_write():
    ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=5)
    old = job_of("y.npy")
    ff.predict_files(mlp(), X * 2, "y.npy", batch_size=5, overwrite=True)
    with pytest.raises(FileNotFoundError, match="parts-"):
        run_chunk(old, 0, None, None, X[:5])
    close(np.load("y.npy"), mlp_reference(X * 2))


# ---- refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"batch_size": 8}, r"batch \(was 5, is 8\)", id="batch"),
        pytest.param({"model": mlp(seed=9)}, r"the model \(was .*, is ", id="model"),
        pytest.param({"source": X + 1}, r"source of 'x' \(was .*x.npy.*, is array", id="source"),
        pytest.param({"source": X[:20]}, r"rows \(was 50, is 20\)", id="rows"),
    ],
)
def test_a_sink_of_other_work(change, said):
    ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=5)
    call = {"model": mlp(), "source": "x.npy", "sink": "y.npy", "batch_size": 5, **change}
    with pytest.raises(ff.InputError, match=said) as caught:
        ff.predict_files(**call)
    assert "overwrite=True" in str(caught.value)
    close(np.load("y.npy"), mlp_reference(X))


def test_a_changed_source():
    ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=5)
    np.save("x.npy", X * 2)
    with pytest.raises(ff.InputError, match=r"source of 'x' \(was .*x.npy, 1328 bytes, changed at"):
        ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=5)


def test_a_sink_that_was_there():
    np.save("y.npy", X)
    for overwrite in (False, True):
        with pytest.raises(
            ff.InputError, match=r"is not, or not only, an output of ff\.predict_files: no record names it"
        ):
            ff.predict_files(mlp(), "x.npy", "y.npy", overwrite=overwrite)
    np.testing.assert_array_equal(np.load("y.npy"), X)


def test_a_sink_that_was_exchanged():
    ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=5)
    np.save("y.npy", X)
    with pytest.raises(ff.InputError, match=r"changed since ff\.predict_files wrote it"):
        ff.predict_files(mlp(), "x.npy", "y.npy")


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_source_and_sink_the_same(link):
    sink = "x.npy"
    if link is not None:
        link("x.npy", sink := "linked.npy")
    with pytest.raises(ff.InputError, match=r"are the same|is not, or not only, an output"):
        ff.predict_files(mlp(), "x.npy", sink, overwrite=True)
    np.testing.assert_array_equal(np.load("x.npy"), X)


def test_a_sink_in_the_source():
    source_of("zarr")
    with pytest.raises(ff.InputError, match="are the same"):
        ff.predict_files(mlp(), "x.zarr", "x.zarr/y.zarr")


def no_inputs():
    return written("() => (float[2,3] y) { y = RandomUniform <shape = [2,3]> () }")


def scalar_output():
    return written(
        "(float[N,6] x) => (float y, float[N,6] z) { y = ReduceSum <keepdims = 0> (x) z = Relu (x) }"
    )


def rows_that_vanish():
    """Return y = x[x[:, 0] > 0], a row for some rows."""
    nodes = (
        "zero = Constant <value_int = 0> () first = Gather <axis = 1> (x, zero) positive = Relu (first)"
        " wanted = Cast <to = 9> (positive) y = Compress <axis = 0> (x, wanted)"
    )
    return written(f"(float[N,6] x) => (float[?,6] y) {{ {nodes} }}")


@every(
    ("call", "said"),
    [
        pytest.param({"source": X[:, :5]}, r"has 5 on axis 1, wanted 6", id="row shape"),
        pytest.param({"source": X.astype("f8")}, "has dtype float64, wanted float32", id="dtype"),
        pytest.param({"source": X[0]}, "wanted 2 axes", id="axes"),
        pytest.param({"sink": "no/y.npy"}, "folder '.*/no' does not exist", id="no folder"),
        pytest.param({"sink": "no/out"}, "folder '.*/no' does not exist", id="no folder for the folder"),
        pytest.param({"sink": {"scores": "no/y.npy"}}, "folder '.*/no' does not exist", id="no folder by name"),
        pytest.param({"batch_size": 0}, "batch_size=0, wanted", id="batch"),
        pytest.param({"batch_size": True}, "batch_size=True, wanted", id="batch of a kind"),
        pytest.param({"model": ff.from_onnx(scalar_output(), outputs="y")}, "does not carry the batch",
            id="no rows out"),
        pytest.param({"model": no_inputs()}, "has no inputs", id="no inputs"),
        pytest.param({"model": two_inputs(), "source": {"x": X, "m": X[:9, :1], "times": np.array([1, 2])}},
            "sources differ in rows: {'x': 50, 'm': 9}", id="lengths"),
    ],
)  # fmt: skip
def test_refused_before_anything_is_made(call, said):
    before = sorted(os.listdir("."))
    with pytest.raises(ff.InputError, match=said):
        ff.predict_files(**{"model": mlp(), "source": "x.npy", "sink": "y.npy", **call})
    assert sorted(os.listdir(".")) == before


def test_an_output_that_has_not_a_row_for_each():
    said = r"rows \d+ to \d+ failed.*output 'y' is float32\[\d, 6\], wanted float32\[8, 6\]"
    warned = pytest.warns(UserWarning, match=r"\(Compress\) is not known to keep")
    with pytest.raises(ff.InputError, match=f"{said}.*the same call fails again until") as failed, warned:
        ff.predict_files(rows_that_vanish(), "x.npy", "y.npy", batch_size=8)
    assert "as before" not in str(failed.value)


def test_a_row_that_cannot_be_read_is_named():
    source_of("parquet")
    part = "x.parquet/part-000002.parquet"
    Path(part).write_bytes(Path(part).read_bytes()[:-20] + b"0" * 20)
    with pytest.raises(ff.InputError, match="is not parquet"):
        ff.predict_files(mlp(), "x.parquet", "y.npy")


# ---- what else -------------------------------------------------------------------------------------------


def test_progress_is_shown_when_wanted_and_only_then(capsys):
    ff.predict_files(mlp(), "x.npy", "y.npy")
    assert capsys.readouterr() == ("", "")
    ff.predict_files(mlp(), "x.npy", "z.npy", progress=True, batch_size=5)
    out, err = capsys.readouterr()
    assert out == ""
    assert "50 / 50 rows" in err
    assert "rows/s" in err


def test_what_travels_with_a_task_is_small():
    ff.predict_files(mlp(), "x.npy", "y.npy", batch_size=5)
    assert len(pickle.dumps(job_of("y.npy"))) < 2000
