"""Sources of which only a name is known, and what numpy keeps beside the numbers: no output of other rows."""

from __future__ import annotations

import os

import dask.array as da
import numpy as np
import pytest
import zarr
from dask import delayed
from onnx import helper

import dask_ferro as ff
from tests.graphs import close, mlp, mlp_reference, model, written
from tests.stream.reading import done_in, read

ROWS, BATCH = 40, 8
X = np.random.default_rng(1).standard_normal((ROWS, 6), dtype=np.float32)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Every test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


def named(rows):
    return da.from_array(rows, chunks=BATCH, name="data")


def of_zarr(rows):
    zarr.open_array("x.zarr", mode="w", shape=rows.shape, chunks=(BATCH, 6), dtype=rows.dtype)[:] = rows
    return da.from_zarr("x.zarr")


def of_files(rows, lacking=None):
    """Files by their paths, one a chunk, of which one may be missing."""
    parts = []
    for number, start in enumerate(range(0, ROWS, BATCH)):
        path = os.path.abspath(f"x{number}.npy")
        np.save(path, rows[start : start + BATCH])
        if number == lacking:
            os.unlink(path)
        read_it = delayed(np.load, pure=True)(path)
        parts.append(da.from_delayed(read_it, (BATCH, 6), "f4"))
    return da.concatenate(parts)


SOURCES = [named, of_zarr, of_files]
CHANGES = {"the first row": 0, "the last row": ROWS - 1}


@pytest.mark.parametrize("kind", ["npy", "zarr", "parquet"])
@pytest.mark.parametrize("made", SOURCES, ids=lambda made: made.__name__)
@pytest.mark.parametrize("row", CHANGES.values(), ids=list(CHANGES))
def test_a_finished_run_is_not_that_of_other_rows_under_the_same_name(made, row, kind):
    sink, other = f"y.{kind}", X.copy()
    other[row] += 1
    before = made(X)
    ff.predict_files(mlp(), before, sink, batch_size=BATCH)
    assert ff.predict_files(mlp(), made(X), sink, batch_size=BATCH).chunks_computed == 0
    after = made(other)
    assert after.name == before.name
    with pytest.raises(ff.InputError, match=r"the source changed: rows \d+ to \d+ .*overwrite=True"):
        ff.predict_files(mlp(), after, sink, batch_size=BATCH)
    close(read(sink), mlp_reference(X))
    ff.predict_files(mlp(), after, sink, batch_size=BATCH, overwrite=True)
    close(read(sink), mlp_reference(other))


@pytest.mark.parametrize("is_other", [False, True])
@pytest.mark.parametrize("where", ["threads", "cluster"])
def test_a_run_that_goes_on_has_one_source_throughout(request, where, is_other):
    if where == "cluster":
        request.getfixturevalue("client")
    os.makedirs("files")
    folder = os.path.abspath("files")
    os.chdir(folder)
    sink = os.path.join(os.path.dirname(folder), "y.npy")
    with pytest.raises(RuntimeError, match="rows 24 to 31 failed: FileNotFoundError"):
        ff.predict_files(mlp(), of_files(X, lacking=3), sink, batch_size=BATCH)
    assert done_in(f"{sink}.ferro-progress"), "no chunk was done, so there is nothing to go on with"
    rows = X + 1 if is_other else X
    if not is_other:
        assert ff.predict_files(mlp(), of_files(rows), sink, batch_size=BATCH).chunks_reused >= 1
        close(read(sink), mlp_reference(X))
        return
    with pytest.raises(ff.InputError, match="the source changed"):
        ff.predict_files(mlp(), of_files(rows), sink, batch_size=BATCH)
    assert not os.path.exists(sink)


def test_a_source_that_goes_whole_to_each_chunk_is_looked_at_too():
    add = written("(float[N,6] x, float[6] b) => (float[N,6] y) { [add] y = Add (x, b) }")
    bias = np.arange(6, dtype=np.float32)

    def sources(b):
        return {"x": X, "b": da.from_array(b, name="bias")}

    ff.predict_files(add, sources(bias), "y.npy", batch_size=BATCH)
    assert ff.predict_files(add, sources(bias), "y.npy", batch_size=BATCH).chunks_computed == 0
    with pytest.raises(ff.InputError, match="the source changed"):
        ff.predict_files(add, sources(bias + 1), "y.npy", batch_size=BATCH)


@pytest.mark.parametrize(
    "made", [np.ma.masked_array, lambda x, mask: da.from_array(np.ma.masked_array(x, mask))]
)
@pytest.mark.parametrize("op", ["Relu", None])
def test_no_mask_is_dropped(made, op):
    nodes = [helper.make_node(op, ["x"], ["y"], name="n")] if op else []
    same = model(nodes, {"x": ["N", 6]}, {"y" if op else "x": ["N", 6]})
    with pytest.raises(ff.InputError, match="masked array, and models have no masks"):
        ff.predict_files(same, made(X, X > 0), "y.npy", batch_size=BATCH)
    assert not os.path.exists("y.npy")
