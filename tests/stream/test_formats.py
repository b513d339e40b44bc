"""One suite for all formats: what a sink was given, a source gives; what is no array is refused."""

from __future__ import annotations

import itertools
import os
import pickle
import sys

import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dask_ferro as ff
from dask_ferro.stream import files
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.endpoints import open_source, sinks_by_name, sources_by_name
from dask_ferro.stream.formats import rows_of
from dask_ferro.stream.formats.arrays import open_npy
from dask_ferro.stream.sinks import Sink, check_kind
from tests.each import each, every
from tests.graphs import mlp
from tests.graphs import written as written_model

KINDS = ["npy", "zarr"]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((10, 3), dtype=np.float32)


def sink_of(tmp_path, kind, array, batch=4):
    """Return a sink that is prepared for an array, and how it is cut."""
    chunks = Chunks(len(array), batch)
    sink = Sink(kind, ("y",), chunks, array.dtype, array.shape[1:], folder=str(tmp_path / "parts"))
    sink.prepare()
    return sink, chunks


def fill(sink, chunks, array, numbers=None):
    for number in range(chunks.count) if numbers is None else numbers:
        sink.write(number, array[slice(*chunks.span(number))])


def put_together(sink, path):
    """Put the parts together at a path."""
    whole, pieces = sink.whole()
    if pieces is not None:
        files.put_joined(whole, pieces)
    os.rename(whole, path)
    return str(path)


def read(source, chunks):
    pieces = source.pieces(chunks)
    parts = [rows_of(pickle.loads(pickle.dumps(pieces(n)))) for n in range(chunks.count)]
    return np.concatenate(parts) if parts else np.empty((0, *source.row_shape), source.dtype)


# ---- sinks and sources of one format ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_read(tmp_path, kind):
    arrays = itertools.product(["f4", "f8", "f2", "i8", "u1", "?"], [(), (3,), (2, 3), (1,)])
    each(arrays, lambda row: _written_and_read(tmp_path / str(row), kind, *row))


def _written_and_read(folder, kind, dtype, row_shape):
    folder.mkdir()
    array = (RNG.standard_normal((10, *row_shape)) * 9).astype(dtype)
    sink, chunks = sink_of(folder, kind, array)
    sink = pickle.loads(pickle.dumps(sink))
    assert sink.done() == set()
    fill(sink, chunks, array, [2, 0])
    assert sink.done() == {0, 2}
    fill(sink, chunks, array, [1, 0])  # a second time does no harm
    assert sink.done() == {0, 1, 2}
    path = put_together(sink, folder / f"y.{kind}")
    source = open_source(path, "y")
    assert (source.rows, source.row_shape, source.dtype) == (10, row_shape, array.dtype)
    for other in (chunks, Chunks(10, 3), Chunks(10, 99)):
        got = read(source, other)
        assert got.dtype == array.dtype
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(tmp_path, kind):
    sink, chunks = sink_of(tmp_path, kind, X[:0])
    assert (chunks.count, sink.done()) == (0, set())
    source = open_source(put_together(sink, tmp_path / f"y.{kind}"), "y")
    assert (source.rows, source.row_shape, source.dtype) == (0, (3,), np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_other_readers_read_it_and_nothing_half_made_is_left(tmp_path, kind):
    sink, chunks = sink_of(tmp_path, kind, X)
    fill(sink, chunks, X)
    # Of a writer that was killed.
    (tmp_path / "parts" / ".part-000001.0123.tmp").write_text("half")
    path = put_together(sink, tmp_path / f"y.{kind}")
    readers = {"npy": lambda p: np.load(p, mmap_mode="r"), "zarr": lambda p: zarr.open_array(p, mode="r")[:]}
    np.testing.assert_array_equal(readers[kind](path), X)
    assert list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_source_has_another_fingerprint(tmp_path, kind):
    for number, x in enumerate((X, X + 1)):
        (tmp_path / str(number)).mkdir()
        sink, chunks = sink_of(tmp_path / str(number), kind, x)
        fill(sink, chunks, x)
        put_together(sink, tmp_path / str(number) / f"y.{kind}")
    path = str(tmp_path / f"y.{kind}")
    os.rename(tmp_path / "0" / f"y.{kind}", path)
    before = open_source(path, "y").fingerprint()
    assert open_source(path, "y").fingerprint() == before
    assert path in before
    os.rename(path, tmp_path / "away")
    os.rename(tmp_path / "1" / f"y.{kind}", path)
    assert open_source(path, "y").fingerprint() != before


@pytest.mark.parametrize(("kind", "package"), [("zarr", "zarr"), ("parquet", "pyarrow")])
def test_a_missing_package_names_the_extra(tmp_path, kind, package, monkeypatch):
    (tmp_path / f"x.{kind}").mkdir()
    (tmp_path / f"x.{kind}" / "part.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ff.InputError, match=r"pip install 'dask-ferro\[io\]'"):
        ff.predict_files(mlp(), tmp_path / f"x.{kind}", tmp_path / "y.npy")
    with pytest.raises(ff.InputError, match=r"pip install 'dask-ferro\[io\]'"):
        check_kind(kind)


# ---- .npy ------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(data=st.data(), count=st.integers(0, 20), batch=st.integers(1, 8))
def test_npy_of_any_shape(tmp_path, data, count, batch):
    shape = (count, *data.draw(st.lists(st.integers(0, 3), max_size=2)))
    array = np.arange(np.prod(shape)).reshape(shape)
    path = str(tmp_path / "x.npy")
    np.save(path, array)
    np.testing.assert_array_equal(read(open_npy(path), Chunks(count, batch)), array)


def written(path, content):
    """Write a file of bytes or of an array."""
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        pytest.param("x.npy", b"", "is not a .npy file", id="empty"),
        pytest.param("x.npy", b"PK\x03\x04" * 9, "is not a .npy file", id="something else"),
        pytest.param("x.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': junk }\n", "is not a .npy file",
            id="a broken header"),
        pytest.param("x.npy", np.array(["a", "b"]), "which is not streamed", id="of what is no number"),
        pytest.param("x.npy", np.asfortranarray(np.ones((3, 2))), "is in Fortran's order", id="of another order"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_source(tmp_path, name, content, said):
    with pytest.raises(ff.InputError, match=said):
        open_source(written(tmp_path / name, content), "x")


def test_npy_that_is_cut_short(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, X)
    piece = open_npy(str(path)).pieces(Chunks(10, 4))(2)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ff.InputError, match="is truncated"):
        open_source(str(path), "x")
    with pytest.raises(OSError, match="ends before row 10"):
        piece.read()


# ---- zarr ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_groups(tmp_path, version):
    path = str(tmp_path / "g.zarr")
    group = zarr.create_group(path, zarr_format=version)
    group.create_array("x", data=X, chunks=(4, 2))
    group.create_array("other", data=X * 2, chunks=(5, 3))
    for given_path, name, wanted, grain in ((path, "x", X, 4), (path + "/other", "x", X * 2, 5)):
        source = open_source(given_path, name)
        np.testing.assert_array_equal(read(source, Chunks(10, 3)), wanted)
        assert source.grain == grain
    with pytest.raises(ff.InputError, match="a zarr group of other, x, and none has the name 'z'"):
        open_source(path, "z")
    (tmp_path / "no.zarr").mkdir()
    with pytest.raises(ff.InputError, match="is not a zarr array or group"):
        open_source(str(tmp_path / "no.zarr"), "x")


@pytest.mark.parametrize(
    ("attributes", "is_read"),
    [
        ({"scale_factor": 0.1}, False),
        ({"_FillValue": -1.0}, False),
        ({"_FillValue": "AADAfw=="}, True),
        ({}, True),
    ],
)
def test_packed_values_are_left_to_xarray(tmp_path, attributes, is_read):
    zarr.create_array(tmp_path / "x.zarr", data=X, attributes=attributes)
    if is_read:
        np.testing.assert_array_equal(read(open_source(str(tmp_path / "x.zarr"), "x"), Chunks(10, 4)), X)
        return
    with pytest.raises(ff.InputError, match="by which xarray unpacks"):
        open_source(str(tmp_path / "x.zarr"), "x")


# ---- parquet ---------------------------------------------------------------------------------------------


def table(tmp_path, columns, name="x.parquet", **options):
    path = str(tmp_path / name)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def copied(tmp_path, source, shape="N,3", **options):
    """Return the rows that a model of one input gets of a source."""
    copy = written_model(f"(float[{shape}] x) => (float[{shape}] y) {{ y = Identity (x) }}")
    ff.predict_files(copy, source, tmp_path / "y.npy", **options)
    return np.load(tmp_path / "y.npy")


LISTS = {
    "list": pa.list_(pa.float32()),
    "large": pa.large_list(pa.float32()),
    "fixed": pa.list_(pa.float32(), 3),
}


@pytest.mark.parametrize("shape", ["N,3", "N,K"])
@pytest.mark.parametrize("kind", LISTS)
def test_a_column_of_lists_is_a_matrix(tmp_path, kind, shape):
    columns = {"v": pa.array(X.tolist(), LISTS[kind]), "id": [str(k) for k in range(10)]}
    path = table(tmp_path, columns, row_group_size=3)
    for batch in (1, 3, 4, 10):
        got = copied(tmp_path, path, shape, columns="v", batch_size=batch, overwrite=True)
        np.testing.assert_array_equal(got, X)


def test_lists_in_lists(tmp_path):
    array = RNG.standard_normal((5, 2, 3), dtype=np.float32)
    path = table(tmp_path, {"v": pa.array(array.tolist())})
    np.testing.assert_array_equal(copied(tmp_path, path, "N,2,3", batch_size=2), array)


def test_parquet_folder_is_read_in_the_order_in_which_dask_reads_it(tmp_path):
    """Dask does not pad the numbers of its parts."""
    (tmp_path / "x").mkdir()
    for number in range(12):
        table(tmp_path / "x", {"v": pa.array([[number] * 4], LISTS["list"])}, f"part.{number}.parquet")
    np.testing.assert_array_equal(copied(tmp_path, tmp_path / "x", "N,4", batch_size=5)[:, 0], range(12))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_source_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(ff.InputError, match="neither a file nor a folder"):
        open_source(str(tmp_path / "x.npy"), "x")


def test_a_table_goes_to_all_inputs(tmp_path):
    path = table(tmp_path, {"a": [1.0]})
    with pytest.raises(ff.InputError, match="is not an array: pass it as the only source"):
        ff.predict_files(mlp(), {"x": path}, tmp_path / "y.npy")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        pytest.param([[1.0, 2.0], [3.0]], "lists of 1 to 2 values, wanted as many in every row", id="ragged"),
        pytest.param([[1.0], [2.0, 3.0], []], "lists of 0 to 2 values", id="ragged, right in sum"),
        pytest.param(
            [[1.0], [2.0, 3.0], [4.0, 5.0]], r"rows of shape \(2,\), wanted \(1,\)", id="of another length"
        ),
        pytest.param([[1.0, 2.0], [3.0, None]], "1 values are missing", id="null in a list"),
        pytest.param([[1.0, 2.0], None], "1 values are missing", id="null for a list"),
        pytest.param([["a", "b"], ["c", "d"]], "wanted float32", id="texts"),
    ],
)
def test_lists_that_are_no_rows(tmp_path, values, said):
    path = table(tmp_path, {"v": pa.array(values)})
    batch = 1 if "shape" in said else 9
    with pytest.raises(ff.InputError, match=said) as caught:
        copied(tmp_path, path, "N,K", batch_size=batch)
    assert "v" in str(caught.value)


# ---- arrays that are no files ----------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(4, 3), (4, 2), ((1, 5, 4), 3), (10, 3)])
def test_dask_arrays(chunks):
    source = open_source(da.from_array(X, chunks=chunks), "x")
    assert (source.rows, source.row_shape, source.dtype) == (10, (3,), np.float32)
    pieces = source.pieces(Chunks(10, 4))
    np.testing.assert_array_equal(pieces(2).compute(scheduler="sync"), X[8:])


def test_the_fingerprint_of_an_array_is_its_content():
    def prints(array):
        return [open_source(one, "x").fingerprint() for one in (array, da.from_array(array))]

    assert prints(X) == prints(X.copy())
    assert prints(X) != prints(X + 1)


@every(
    ("source", "said"),
    [
        (np.float32(3), "source of 'x' is a float32; wanted a path"),
        (np.array(3.0), "is a single number"),
        (np.array(["a"]), "which is not streamed"),
        (da.from_array(X)[da.from_array(X)[:, 0] > 0], "unknown size; call .compute_chunk_sizes"),
        ([1, 2], "is a list; wanted a path"),
        ("simplecache::s3://bucket/x.zarr", "chains file systems"),
        ("nowhere.npy", "does not exist"),
        ("nowhere/x", "does not exist"),
        ("pyproject.toml/x", "does not exist"),
        ("pyproject.toml", "unknown format"),
        ("tests", "unknown format"),
    ],
)
def test_sources_that_are_none(source, said):
    with pytest.raises(ff.InputError, match=said):
        open_source(source, "x")


# ---- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "source", "wanted"),
    [
        (["x"], "a.npy", {"x": "a.npy"}),
        (["x", "m"], {"m": "b.npy", "x": "a.npy"}, {"x": "a.npy", "m": "b.npy"}),
        (["x", "m"], "a.npy", "inputs x, m; pass a mapping"),
        (["x"], {"y": "a.npy"}, "no input 'y'; no source for input 'x'"),
    ],
)
def test_which_source_is_for_which_input(names, source, wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", X)
    if isinstance(wanted, dict):
        assert sources_by_name(names, source) == wanted
    else:
        with pytest.raises(ff.InputError, match=wanted):
            sources_by_name(names, source)


def test_a_group_holds_several_inputs(tmp_path):
    group = str(tmp_path / "g.zarr")
    zarr.create_group(group)
    assert sources_by_name(["x", "m"], group) == {"x": f"{group}/x", "m": f"{group}/m"}


@every(
    ("sink", "wanted"),
    [
        ("a.pq/", {"s, t/1": ("parquet", "a.pq")}),
        ("a.csv", {"s, t/1": ("csv", "a.csv")}),
        ("out", {"s": ("npy", "out/s.npy"), "t/1": ("npy", "out/t%2F1.npy")}),
        ({"t/1": "b.zarr", "s": "a.csv"}, {"s": ("csv", "a.csv"), "t/1": ("zarr", "b.zarr")}),
        ("a.npy", "has outputs s, t/1, and sink 'a.npy' holds one"),
        ({"z": "a.npy"}, "no output 'z'; no sink for output 's'"),
        ({"s": "a.npy"}, r"no sink for output 't/1'.*ff.from_onnx\(model, outputs=...\)"),
        ({"s": "a.npy", "t/1": "a.npy"}, "the same sink"),
        ("a.txt", "sink 'a.txt': unknown format"),
        ("https://b/a.zarr", "is read, and not written"),
        (None, "sink is a NoneType"),
    ],
)
def test_which_output_goes_where(sink, wanted):
    if isinstance(wanted, dict):
        got = sinks_by_name(["s", "t/1"], sink)
        assert {name: place[:2] for name, place in got.items()} == {
            name: (kind, os.path.realpath(path)) for name, (kind, path) in wanted.items()
        }
        assert [name for place in got.values() for name in place.outputs] == ["s", "t/1"]
    else:
        with pytest.raises(ff.InputError, match=wanted):
            sinks_by_name(["s", "t/1"], sink)


@pytest.mark.parametrize("path", ["", "x\0.npy"])
def test_what_is_no_path_is_called_that(path):
    with pytest.raises(ff.InputError, match="is not a path"):
        open_source(path, "x")
    with pytest.raises(ff.InputError, match="is not a path"):
        sinks_by_name(["y"], path)
