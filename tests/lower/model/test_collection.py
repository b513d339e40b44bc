"""The collection that `from_onnx` returns, on Dask's own schedulers, without processes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import onnx
import pandas as pd
import pytest
from dask.delayed import Delayed
from onnx import helper

import dask_ferro as ff
from dask_ferro.lower.model.collection import prepared_model_of
from tests.each import every
from tests.graphs import close, diamond, diamond_reference, mlp, mlp_reference, written
from tests.programs import ran
from tests.waiting import BOUND_S, ended

X = np.random.default_rng(1).standard_normal((10, 6), dtype=np.float32)
SCHEDULERS = ["sync", "threads"]
GRANULARITIES = ["auto", "op", "model", 1e-9, 10.0]


@every("scheduler", SCHEDULERS)
@every("granularity", GRANULARITIES)
def test_one_output_computes_to_an_array(scheduler, granularity):
    y = ff.from_onnx(mlp(), X, granularity=granularity)
    got = y.compute(scheduler=scheduler)
    assert isinstance(got, np.ndarray)
    close(got, mlp_reference(X))


WHATEVER = {
    "numpy": lambda m: m(X, batch_size=4),
    "dask": lambda m: m(da.from_array(X, chunks=(4, 6))),
    "pandas": lambda m: m(pd.DataFrame(X), batch_size=4),
    "delayed": lambda m: m(dask.delayed(X)),
    "lists": lambda m: m(X.tolist()),
    "by name": lambda m: m(x=X),
}


@every("granularity", ["auto", "op"])
@every("given", WHATEVER)
def test_a_call_gives_a_dask_array_whatever_it_is_given(given, granularity):
    y = WHATEVER[given](ff.from_onnx(mlp(), granularity=granularity))
    assert type(y) is da.Array
    assert "dask.array<mlp-" in repr(y)
    da.utils.assert_eq(
        y.sum(axis=1), mlp_reference(X).sum(axis=1), check_shape=given != "delayed", scheduler="sync"
    )


def test_several_outputs_are_a_mapping_that_unpacks_in_order():
    x = X[:, :4]
    outputs = ff.from_onnx(diamond())(x, batch_size=4)
    total, b0, b1, b2 = outputs
    assert list(outputs.keys()) == ["total", "b0", "b1", "b2"]
    assert all(type(one) is da.Array and one.chunks == ((4, 4, 2), (4,)) for one in outputs)
    assert dict(outputs) == {"total": total, "b0": b0, "b1": b1, "b2": b2}
    close((total - b1).compute(scheduler="sync"), diamond_reference(x)["total"] - diamond_reference(x)["b1"])
    got = dask.compute(outputs, total + 1, scheduler="sync")
    close(got[0]["b2"], diamond_reference(x)["b2"])
    close(got[1], diamond_reference(x)["total"] + 1)


def sequence():
    """A model of a sequence and a number beside it."""
    made = written("(float[N,6] x) => (float[N,6] y) { s = SequenceConstruct (x, x) y = Neg (x) }")
    floats = helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, None))
    made.graph.output.append(helper.make_value_info("s", floats))
    return made


def test_what_is_no_array_is_a_delayed_value():
    y, s = ff.from_onnx(sequence())(X)
    assert (type(y), type(s)) == (da.Array, Delayed)
    close(s.compute(scheduler="sync")[1], X)
    close(s[0].compute(scheduler="sync"), X)
    close(ff.from_onnx(sequence())(X).compute(scheduler="sync")["s"][0], X)


def test_no_axes_and_any_number_of_rows():
    total, kept = ff.from_onnx(
        written("(float[N,6] x, bool[N] m) => (float t, float[K,6] k) {"
                " t = ReduceSum <keepdims = 0> (x) k = Compress <axis = 0> (x, m) }")
    )(X, X[:, 0] > 0)  # fmt: skip
    assert (total.shape, kept.ndim) == ((), 2)
    close((total / 2).compute(scheduler="sync"), X.sum() / 2)
    close(kept.max(axis=0).compute(scheduler="sync"), X[X[:, 0] > 0].max(axis=0))


@every("scheduler", SCHEDULERS)
@every("granularity", GRANULARITIES)
def test_several_outputs_compute_to_a_dict_by_name(scheduler, granularity):
    x = X[:, :4]
    got = ff.from_onnx(diamond(), x, granularity=granularity).compute(scheduler=scheduler)
    wanted = diamond_reference(x)
    assert list(got) == ["total", "b0", "b1", "b2"]
    for name, value in wanted.items():
        close(got[name], value)


@every("batch", [1, 3, 4, 10, 100])
@every("granularity", ["auto", "op"])
def test_a_batch_cuts_rows_and_joins_them_again(batch, granularity):
    model = ff.from_onnx(mlp(), batch_size=batch, granularity=granularity)
    assert model(X).numblocks == (-(-10 // batch), 1)
    assert model.planned(X).chunks == -(-10 // batch)
    close(model(X).compute(scheduler="sync"), mlp_reference(X))


def test_dask_array_in_dask_array_out():
    x = da.from_array(X, chunks=(4, 3))
    y = ff.from_onnx(mlp())(x * 2)
    assert isinstance(y, da.Array)
    assert y.chunks == ((4, 4, 2), (3,))
    assert y.dtype == np.float32
    close(y.sum(axis=1).compute(scheduler="sync"), mlp_reference(X * 2).sum(axis=1))
    close(y[3:7].compute(scheduler="sync"), mlp_reference(X * 2)[3:7])
    da.utils.assert_eq(y, mlp_reference(X * 2), check_chunks=True, scheduler="sync")


def test_dask_array_through_several_outputs_gives_a_dict_of_dask_arrays():
    x = da.from_array(X[:, :4], chunks=(4, -1))
    got = ff.from_onnx(diamond(), x)
    assert all(isinstance(a, da.Array) and a.chunks == ((4, 4, 2), (4,)) for a in got.values())
    values = dask.compute(got, scheduler="sync")[0]
    for name, wanted in diamond_reference(X[:, :4]).items():
        close(values[name], wanted)


def test_dask_array_with_unknown_chunk_sizes():
    x = da.from_array(X, chunks=(5, -1))
    kept = x[x[:, 0] > -np.inf]
    assert np.isnan(kept.chunks[0][0])
    close(ff.from_onnx(mlp(), kept).compute(scheduler="sync"), mlp_reference(X))


@pytest.mark.parametrize("granularity", ["auto", "op"])
def test_a_batch_of_one_is_split_over_more_rows(granularity):
    model = ff.from_onnx(mlp(rows=1), granularity=granularity)
    assert model(X[:0]).compute(scheduler="sync").shape == (0, 3)
    close(model(X).compute(scheduler="sync"), mlp_reference(X))
    close(model(X, batch_size=4).compute(scheduler="sync"), mlp_reference(X))
    close(model(da.from_array(X, chunks=(5, -1))).compute(scheduler="sync"), mlp_reference(X))


def test_models_compose():
    first = ff.from_onnx(diamond())(X[:, :4])
    second = ff.from_onnx(diamond())(first["total"])
    wanted = diamond_reference(diamond_reference(X[:, :4])["total"])["total"]
    close(second["total"].compute(scheduler="sync"), wanted)


def test_delayed_input():
    later = dask.delayed(lambda: X)()
    close(ff.from_onnx(mlp(), later).compute(scheduler="sync"), mlp_reference(X))


def test_persist_keeps_arrays_and_outputs():
    y = ff.from_onnx(diamond(), X[:, :4], granularity="op").persist(scheduler="sync")
    close(y.compute(scheduler="sync")["total"], diamond_reference(X[:, :4])["total"])
    close((y["b1"] + 1).compute(scheduler="sync"), diamond_reference(X[:, :4])["b1"] + 1)
    close(y["b1"].persist(scheduler="sync").compute(scheduler="sync"), diamond_reference(X[:, :4])["b1"])


@every("model", [mlp, diamond])
def test_a_model_on_inputs_of_its_own_is_a_collection(model):
    own = ff.from_onnx(model())
    with pytest.warns(UserWarning, match="seeded synthetic"):
        value = own.compute(scheduler="sync")
    for got in (
        dask.compute(own, scheduler="sync")[0],
        own.persist(scheduler="sync").compute(scheduler="sync"),
    ):
        np.testing.assert_equal(got, value)


def test_without_inputs_it_runs_on_seeded_ones_and_says_so():
    model = ff.from_onnx(mlp())
    with pytest.warns(UserWarning, match="seeded synthetic"):
        first = model.compute(scheduler="sync")
    with pytest.warns(UserWarning, match="seeded synthetic"):
        again = ff.from_onnx(mlp()).compute(scheduler="sync")
    assert first.shape == (1, 3)
    np.testing.assert_array_equal(first, again)


@pytest.mark.needs("dot")
def test_visualize_draws(tmp_path):
    pytest.importorskip("graphviz", reason="needs the visualize extra")
    path = tmp_path / "graph.svg"
    ff.from_onnx(diamond(), X[:, :4], granularity="op").visualize(filename=str(path))
    assert path.read_text().count("<g id=") > 8


def test_same_call_same_keys_in_another_process(tmp_path):
    path = tmp_path / "mlp.onnx"
    path.write_bytes(mlp().SerializeToString())
    code = (
        "import dask_ferro as ff, numpy as np, dask; x = np.arange(60, dtype='f4').reshape(10, 6);"
        f"y = ff.from_onnx({str(path)!r}, x, batch_size=4, granularity='op');"
        "print(sorted(map(str, dict(y.__dask_graph__()))), dask.base.tokenize(y))"
    )
    y = ff.from_onnx(str(path), np.arange(60, dtype="f4").reshape(10, 6), batch_size=4, granularity="op")
    here = f"{sorted(map(str, dict(y.__dask_graph__())))} {dask.base.tokenize(y)}\n"
    assert ran([sys.executable, "-c", code], check=True).stdout == here


def test_the_graph_that_travels_is_small_whatever_the_chunks():
    x = da.zeros((100_000, 6), chunks=(10, 6), dtype="f4")
    y = ff.from_onnx(mlp())(x)
    (layer,) = [layer for name, layer in y.dask.layers.items() if name == y.name]
    assert not layer.is_materialized()
    assert len(layer) == 10_000
    assert len(pickle.dumps(layer)) < 3_000


def test_weights_do_not_travel():
    heavy = mlp(features=6, hidden=50_000)
    y = ff.from_onnx(heavy, X, batch_size=5)
    assert len(pickle.dumps(y.__dask_graph__())) < 5_000


BAD = {
    "a wrong dtype names the conversion": (lambda m: m(X.astype("f8")), r"float64, wanted float32.*astype"),
    "a wrong width": (lambda m: m(X[:, :5]), r"has 5 on axis 1, wanted 6"),
    "a wrong rank": (lambda m: m(X[0]), r"wanted 2 axes"),
    "an unknown name": (lambda m: m(y=X), r"unknown input 'y', missing input 'x'"),
    "too many arrays": (lambda m: m(X, X), r"got 2 inputs, wanted 1"),
    "a batch of nothing": (lambda m: m(X, batch_size=0), r"batch_size=0"),
    "a dask array of the wrong dtype": (lambda m: m(da.from_array(X.astype("f8"))), r"dtype float64"),
}


@pytest.mark.parametrize("claim", BAD)
def test_refuses(claim):
    call, message = BAD[claim]
    with pytest.raises(ff.InputError, match=message):
        call(ff.from_onnx(mlp()))


@every("granularity", GRANULARITIES)
@every("batch", [None, 4])
def test_outputs_that_are_inputs_or_weights(granularity, batch):
    text = "(float[N,6] x) => (float[N,6] y, float[N,6] x, float[2] w) { y = Relu (x) }"
    proto = written(text, {"w": np.float32([1, 2])})
    if batch is not None:
        with pytest.raises(ff.InputError, match="output 'w' has 2 on axis 0, wanted one for each row"):
            ff.from_onnx(proto, X, batch_size=batch).compute(scheduler="sync")
        return
    got = ff.from_onnx(proto, X, granularity=granularity).compute(scheduler="sync")
    close(got["y"], np.maximum(X, 0))
    close(got["x"], X)
    close(got["w"], [1, 2])


def test_another_fixed_batch_is_a_size_like_any_other():
    """Nothing says that the rows of a model of batch 4 do not depend on each other."""
    fixed, cut = ff.from_onnx(mlp(rows=4)), da.from_array(X[:4], chunks=(2, 6))
    table = dd.from_pandas(pd.DataFrame(X), npartitions=2)
    exporter = r"dynamic_axes={'x': {0: 'batch'}}, or dynamic_shapes=\({0: torch.export.Dim\('batch'\)},\)"
    for call in (
        fixed,
        fixed.predict,
        lambda x: fixed(x[:4], batch_size=2),
        lambda _: fixed(cut),
        lambda _: fixed(table),
    ):
        with pytest.raises(ff.InputError, match=f"( on axis 0, wanted 4|fixed at 4 rows).*{exporter}"):
            call(X)
    close(ff.from_onnx(mlp(rows=4), X[:4]).compute(scheduler="sync"), mlp_reference(X[:4]))


def test_rows_that_depend_on_each_other_are_not_cut():
    square = ff.from_onnx(written("(float[N,6] x) => (float[N,N] y) { t = Transpose (x) y = MatMul (x, t) }"))
    close(square(X).compute(scheduler="sync"), X @ X.T)
    with pytest.raises(ff.InputError, match="combines each of them with the others"):
        square(X, batch_size=5).compute(scheduler="sync")
    with pytest.raises(ff.InputError, match="combines each of them with the others"):
        square(da.from_array(X, chunks=(5, -1)))


def add(rows):
    """Return a[rows, 3] + b[rows, 3]."""
    return ff.from_onnx(
        written(f"(float[{rows},3] a, float[{rows},3] b) => (float[{rows},3] y) {{ y = Add (a, b) }}")
    )


@pytest.mark.parametrize("rows", ["N", 1])
def test_inputs_of_different_length_are_refused(rows):
    a, b = X[:4, :3], X[:6, :3]
    with pytest.raises(ff.InputError, match=r"differ in length|axis 0"):
        add(rows)(da.from_array(a, chunks=(2, -1)), b)
    with pytest.raises(ff.InputError, match=r"differ in length|axis 0"):
        add(rows)(a, b, batch_size=2).compute(scheduler="sync")


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ff.InputError, match="future or a delayed"):
        add("N")(X[:4, :3], dask.delayed(lambda: X[:4, :3])(), batch_size=2).compute(scheduler="sync")
    with pytest.raises(ff.InputError, match="NoneType"):
        add("N")(X[:4, :3], None)


def test_a_model_whose_outputs_are_bundles_of_their_own_composes_as_dask_arrays():
    made = written("(float[N,6] x) => (float[N,6] a, float[N,6] b) { a = Relu (x) b = Exp (x) }")
    both = ff.from_onnx(made, granularity="op")
    got = both(da.from_array(X, chunks=(4, -1)))
    close((got["b"] + 1).sum().compute(scheduler="sync"), (np.exp(X) + 1).sum())
    close((got["a"] + got["b"]).compute(scheduler="sync"), np.maximum(X, 0) + np.exp(X))


def test_a_replaced_file_is_noticed_in_the_same_process(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(mlp(hidden=2000, seed=1).SerializeToString())
    small = ff.from_onnx(path, X)
    expected = small.compute(scheduler="sync")
    path.write_bytes(mlp(hidden=2000, seed=2).SerializeToString())
    np.testing.assert_array_equal(small.compute(scheduler="sync"), expected)
    assert not np.array_equal(ff.from_onnx(path, X).compute(scheduler="sync"), expected)


def test_a_model_of_the_same_bytes_is_loaded_and_prepared_once(tmp_path):
    paths = [tmp_path / "one.onnx", tmp_path / "other.onnx"]
    for path in paths:
        path.write_bytes(mlp(seed=3).SerializeToString())
    one, other = (prepared_model_of(ff.from_onnx(path)) for path in paths)
    assert other.loaded.model is one.loaded.model
    assert [one.ref.path, other.ref.path] == [str(path) for path in paths]
    assert prepared_model_of(ff.from_onnx(paths[0])) is one


def test_calls_look_for_regions_once(monkeypatch):
    looked = []
    monkeypatch.setattr("dask_ferro.graph.model.load.region_of", lambda node: looked.append(node.name) or ())
    opened = ff.from_onnx(mlp(seed=4))
    for _ in range(3):
        opened(X)
        opened.predict(X)
    assert looked == [node.name for node in prepared_model_of(opened).loaded.model.graph]


def test_external_data_is_read_each_time_that_a_model_is_opened(tmp_path):
    path, results, contents = tmp_path / "m.onnx", [], []
    for seed in (1, 2):
        (tmp_path / "w.bin").unlink(missing_ok=True)
        onnx.save(mlp(seed=seed), path, save_as_external_data=True, location="w.bin", size_threshold=0)
        results.append(ff.from_onnx(path, X).compute(scheduler="sync"))
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    assert not np.array_equal(*results)


def test_random_numbers_in_a_body_are_drawn_once():
    text = (
        "(float[3] x) => (float[3] y) { noise = If (yes)"
        " <then_branch = t () => (r) { r = RandomUniform <shape = [3]> () },"
        " else_branch = e () => (s) { s = RandomUniform <shape = [3]> () }>"
        " p = Add (x, noise) q = Sub (x, noise) y = Add (p, q) }"
    )
    twice = ff.from_onnx(written(text, {"yes": True}), granularity="op")
    close(twice(X[0, :3]).compute(scheduler="sync"), 2 * X[0, :3])


@pytest.mark.parametrize("kind", ["sequence", "optional"])
def test_a_repr_never_raises(kind):
    floats = helper.make_tensor_type_proto(1, [2])
    make = helper.make_sequence_type_proto if kind == "sequence" else helper.make_optional_type_proto
    op = "SequenceLength" if kind == "sequence" else "OptionalHasElement"
    out = helper.make_tensor_value_info("y", 7 if kind == "sequence" else 9, [])
    nodes, given = [helper.make_node(op, ["s"], ["y"])], [helper.make_value_info("s", make(floats))]
    graph = helper.make_graph(nodes, "g", given, [out])
    made = ff.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    assert f"s: {kind}" in repr(made)
    assert "known once it has its inputs" in repr(made)
    assert "known once it has its inputs" in made._repr_html_()
    article = "an" if kind == "optional" else "a"
    refused = pytest.raises(ff.InputError, match=f"is {article} {kind}:")
    with pytest.warns(UserWarning, match="no inputs"), refused:
        made.compute(scheduler="sync")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_model_in_memory(kind):
    content = kind(mlp().SerializeToString())
    close(ff.from_onnx(content, X).compute(scheduler="sync"), mlp_reference(X))


_SPOOLS = """
import sys, time
import dask_ferro as ff
from tests.graphs import mlp
print(ff.from_onnx(mlp())._opened.ref.path, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that end with a process")
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def started(seconds):
        process = subprocess.Popen(
            [sys.executable, "-c", _SPOOLS, str(seconds)], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    killed, abandoned = started(60)
    living, used = started(60)
    try:
        killed.terminate()
        ended(killed)
        assert abandoned.exists()
        last, _ = started(0)
        ended(last)
        assert not abandoned.parent.exists()
        assert used.exists()
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate(timeout=BOUND_S)
    last.communicate(timeout=BOUND_S)


def test_a_batch_graph_takes_one_inference_a_size():
    """Two sizes at which rows are followed, and that of a chunk; the next call takes none."""
    opened = ff.from_onnx(mlp())
    inference = opened._opened.inference
    sizes, native = [], inference.types
    inference.types = lambda **k: sizes.append(k["shapes"]["x"][0]) or native(**k)
    for _ in range(3):
        opened(X, batch_size=4)
    assert sizes == [251, 509, 4]
