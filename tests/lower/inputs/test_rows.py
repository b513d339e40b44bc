"""Models whose rows depend on each other, or have no name, when the rows are cut."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import dask
import dask.array as da
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_ir.serde import deserialize_model

import dask_ferro as ff
from dask_ferro.graph.ir.inference import infer
from dask_ferro.lower.worker.outputs import OutputCheck, check_outputs
from tests.each import every
from tests.graphs import close, mlp, mlp_reference, model, written

node = helper.make_node
X = np.random.default_rng(1).standard_normal((10, 6), dtype=np.float32)


def centered():
    text = "(float[N,6] x) => (float[N,6] y) { [mean] m = ReduceMean <axes = [0], keepdims = 1> (x) y = Sub (x, m) }"
    return written(text, opset=17, name="centered")


def looped(body, name="looped"):
    """Run nodes v -> w three times over, whose body is not analysed."""
    text = (
        "(float[N,6] x) => (float[N,6] y) { [loop] y = Loop (trips, , x) <body = body (int64 i, bool c, float v)"
        f" => (bool go, float w) {{ go = Identity (c) {body} }}> }}"
    )
    made = written(text, {"trips": 3}, opset=17, name=name)
    inner = made.graph.node[0].attribute[0].g
    for value in (inner.input[2], inner.output[1]):
        value.type.tensor_type.ClearField("shape")
    return made


def unsure():
    return looped("w = Add (v, v)", "unsure")


def secretly_centered():
    return looped("m = ReduceMean <axes = [0], keepdims = 1> (v) w = Sub (v, m)", "secret")


def test_a_model_that_combines_rows_runs_on_all_of_them(tmp_path):
    with dask.config.set(scheduler="sync"):
        got = ff.from_onnx(centered())(X, batch_size=10).compute()
    ff.predict_files(centered(), X, tmp_path / "y.npy", batch_size=10, progress=False)
    for rows in (got, np.load(tmp_path / "y.npy")):
        close(rows, X - X.mean(0))


COMBINE_ROWS = {
    "centered": (centered, r"node 'mean' \(ReduceMean\) combines them all; run it on all rows"),
    "tried on a few": (secretly_centered, r"model 'secret': .* 'y' of 6 rows differ when they are cut"),
}
CUTS = {
    "batch": lambda m, sink: m(X, batch_size=5),
    "dask": lambda m, sink: m(da.from_array(X, chunks=(5, 6))),
    "dask, row by row": lambda m, sink: m(da.from_array(X, chunks=(1, 6))),
    "run": lambda m, sink: ff.predict_files(m, X, sink, batch_size=4, progress=False),
}


@pytest.mark.filterwarnings("ignore:model 'graph'")
@every("cut", ["batch", "dask"])
@every(
    "nodes",
    [
        "s = Shape (x) k = Gather (s, nine) y = Expand (x, k)",
        "s = Shape (x) k = Slice (s, zero, nine, zero, zero) y = Expand (x, k)",
        "y = Slice (x, one, nine, one, zero)",
        "y = GatherElements <axis = 9> (x, nine)",
    ],
)
def test_what_no_engine_computes_is_refused_in_words_where_rows_are_cut(nodes, cut):
    text = f"(float[N,6] x) => (float[N,6] y) {{ {nodes} }}"
    m = ff.from_onnx(written(text, {"zero": [0], "one": [1], "nine": [9]}, opset=17))
    with pytest.raises((ff.InputError, ff.ModelError), match=r"Gather|Slice|output y"):
        CUTS[cut](m, None).compute(scheduler="sync")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", COMBINE_ROWS)
def test_a_model_that_combines_rows_is_not_cut(name, cut, tmp_path):
    make, said = COMBINE_ROWS[name]
    with pytest.raises(ff.InputError, match=said):
        CUTS[cut](ff.from_onnx(make()), tmp_path / "y.npy")
    assert not (tmp_path / "y.npy").exists()


def test_a_model_that_may_combine_rows_is_warned_of_once():
    m = ff.from_onnx(unsure())
    with pytest.warns(UserWarning, match=r"'loop' \(Loop\) has a body, which is not inspected"):
        m(X, batch_size=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m(X, batch_size=2)


def gelu(*after, **outputs):
    """A model with a Gelu of another domain, whose shapes are not known, and nodes after it."""
    proto = model(
        [node("Gelu", ["x"], ["g"], domain="com.microsoft"), *after],
        {"x": ["N", 4, 5]},
        {},
        name="gelu",
        opset=17,
    )
    for name, (kind, shape) in outputs.items():
        info = helper.make_tensor_value_info(name, kind, shape)
        proto.graph.output.append(info if kind else helper.make_empty_tensor_value_info(name))
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return proto


OF_ALL_ROWS = {
    "a shape that is not declared": lambda: gelu(node("Shape", ["g"], ["z"]), z=(0, None)),
    "a shape": lambda: gelu(node("Shape", ["g"], ["z"]), z=(TensorProto.INT64, [None])),
    "a shape beside rows": lambda: gelu(node("Gelu", ["x"], ["y"], domain="com.microsoft"),
        node("Shape", ["g"], ["z"]), y=(0, None), z=(0, None)),
    "a count": lambda: gelu(node("Size", ["x"], ["z"]), z=(TensorProto.INT64, [None])),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:model 'gelu'")
@pytest.mark.parametrize("make", OF_ALL_ROWS.values(), ids=list(OF_ALL_ROWS))
def test_an_output_that_has_no_rows_is_not_put_together_of_chunks(make):
    x = np.ones((6, 4, 5), np.float32)
    with pytest.raises(ff.InputError, match="output 'z' is not made of the rows"):
        ff.from_onnx(make())(x, batch_size=2).compute(scheduler="sync")


@pytest.mark.parametrize(
    "outputs", [[None, 3], ["unk__7", 3], ["M", 3]], ids=["nothing", "invented", "other"]
)
def test_a_batch_axis_without_a_name_is_cut(outputs):
    proto = mlp(rows=None)
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("scores", TensorProto.FLOAT, outputs))
    m = ff.from_onnx(proto)
    assert "unk__" not in repr(m)
    with dask.config.set(scheduler="sync"):
        close(m(X, batch_size=4).compute(), mlp_reference(X))
        close(m(da.from_array(X, chunks=(5, 6))).compute(), mlp_reference(X))


def total(rows):
    return ff.from_onnx(model([node("ReduceSum", ["x"], ["y"], keepdims=0)], {"x": [rows, 6]}, {"y": []}))


def test_more_rows_than_one_need_an_output_with_rows():
    assert total(1)(X[:1]).compute(scheduler="sync") == pytest.approx(X[:1].sum(), rel=1e-5)
    with pytest.raises(ff.InputError, match="fixed at 1, and it got more rows"):
        total(1)(X)


def test_a_fixed_batch_is_not_cut_into_smaller_ones():
    m = ff.from_onnx(model([node("Relu", ["x"], ["y"])], {"x": [4, 6]}, {"y": [4, 6]}))
    with pytest.raises(ff.InputError, match="fixed at 4 rows"):
        m(X[:4], batch_size=2)


def test_batch_rechunks_a_dask_array():
    m = ff.from_onnx(mlp())
    cut = m(da.from_array(X, chunks=(5, 6)), batch_size=4)
    assert cut.chunks[0] == (4, 4, 2)
    close(cut.compute(scheduler="sync"), mlp_reference(X))


def unknown():
    x = da.from_array(X, chunks=(5, 6))
    return x[da.from_array(X[:, 0] > -9, chunks=5)]


def test_two_inputs_of_unknown_chunk_sizes_are_taken_chunk_by_chunk():
    nodes = [node("Add", ["a", "b"], ["y"])]
    m = ff.from_onnx(model(nodes, {"a": ["N", 6], "b": ["N", 6]}, {"y": ["N", 6]}))
    u = unknown()
    np.testing.assert_allclose(m(u, u).compute(scheduler="sync"), 2 * X, rtol=1e-6)
    with pytest.raises(ff.InputError, match="chunked differently"):
        m(u, da.from_array(X, chunks=(10, 6)))


def test_an_input_in_chunks_that_is_taken_whole_is_named_with_its_remedy():
    m = ff.from_onnx(
        model([node("MatMul", ["x", "s"], ["y"])], {"x": ["N", 6], "s": ["K", 2]}, {"y": ["N", 2]})
    )
    said = r"input 's' is read whole and has 2 chunks; make it one chunk with .rechunk\(-1\)"
    with pytest.raises(ff.InputError, match=said):
        m(X, da.from_array(X[:6, :2], chunks=(3, 2)))


def test_what_a_model_gives_in_chunks_is_an_input_of_the_next():
    first = ff.from_onnx(mlp())(X, batch_size=5)
    second = ff.from_onnx(model([node("Neg", ["s"], ["y"])], {"s": ["N", 3]}, {"y": ["N", 3]}))(first)
    assert second.chunks == ((5, 5), (3,))
    close(second.compute(scheduler="sync"), -mlp_reference(X))


# Which inputs are cut together.

A, B = X[:6, :1], X[:6, 1:2]
NAMES = [(None, None), ("A", "B"), ("N", None), (None, "N")]


def added(names, rows=None):
    inputs = {n: [name, 1] for n, name in zip("ab", names, strict=True)}
    return model([node("Add", ["a", "b"], ["y"], name="add")], inputs, {"y": [rows, 1]}, name="added")


@every("names", NAMES)
@every(
    "call",
    [
        lambda m: m(A, B, batch_size=1),
        lambda m: m(A, B, batch_size=4),
        lambda m: m(A, B, batch_size=100),
        lambda m: m(da.from_array(A, chunks=(2, 1)), da.from_array(B, chunks=(2, 1))),
        lambda m: m(da.from_array(A, chunks=(4, 1)), B),
        lambda m: m(A, da.from_array(B, chunks=(1, 1))),
        lambda m: m(da.from_array(A, chunks=(6, 1)), da.from_array(B, chunks=(6, 1)), batch_size=4),
    ],
)
def test_inputs_without_a_common_name_are_cut_together(names, call):
    got = call(ff.from_onnx(added(names))).compute(scheduler="sync")
    np.testing.assert_array_equal(got, A + B)


def test_inputs_of_other_lengths_are_not_cut_beside_each_other():
    with pytest.raises(ff.InputError, match=r"do not go with all of 'b', so name .* with batch_inputs="):
        ff.from_onnx(added((None, None)))(A, B[:3], batch_size=3)


def gathered():
    proto = model([node("Gather", ["t", "i"], ["y"])], {"i": [None], "t": [None, 6]}, {"y": [None, 6]})
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    return proto


def test_a_table_with_as_many_rows_goes_whole_to_each_chunk():
    ids = np.array([1, 0, 5, 2, 2, 3])
    got = ff.from_onnx(gathered())(ids, X[:6], batch_size=2).compute(scheduler="sync")
    np.testing.assert_array_equal(got, X[ids])


def test_inputs_are_cut_as_they_are_named(tmp_path):
    table = X[:6]
    ids = np.array([1, 0, 5, 2, 2, 3])
    want = table[ids]
    for how in ("i", ("i",), ["i"]):
        got = ff.from_onnx(gathered())(ids, table, batch_size=2, batch_inputs=how).compute(scheduler="sync")
        np.testing.assert_array_equal(got, want)
        got = ff.from_onnx(gathered(), batch_size=2, batch_inputs=how)(ids, table).compute(scheduler="sync")
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ff.InputError, match="works along the axis of the rows"):
        ff.from_onnx(gathered())(ids, table, batch_size=2, batch_inputs=("i", "t"))
    ff.predict_files(
        gathered(), {"i": ids, "t": table}, tmp_path / "y.npy", batch_size=2, batch_inputs="i", progress=False
    )
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), want)


@pytest.mark.parametrize(
    ("names", "batched", "message"),
    [
        ((None, None), ("c",), "names 'c'; wanted some of its inputs: a, b"),
        ((None, None), (), "names nothing"),
        (("N", "N"), ("a",), "leaves out 'b', whose axis 0 has the same name"),
        ((None, 6), ("a", "b"), r"without an open axis 0, which cannot be cut: b: float32\[6, 1\]"),
    ],
)
def test_names_of_inputs_that_cannot_be_cut_are_refused(names, batched, message):
    with pytest.raises(ff.InputError, match=message):
        ff.from_onnx(added(names))(A, B, batch_size=2, batch_inputs=batched)


# The check of each task, where the shape was not known.


def dropping():
    """As many rows as are not 0, out of a body that is not analysed."""
    body = "m = ReduceMax <axes = [1], keepdims = 0> (v) keep = Cast <to = 9> (m) w = Compress <axis = 0> (v, keep)"
    return looped(body, "dropping")


@pytest.mark.parametrize("granularity", ["op", "model"])
@pytest.mark.parametrize(
    "cut", [lambda m, x: m(x, batch_size=2), lambda m, x: m(da.from_array(x, chunks=(2, 6)))]
)
@pytest.mark.filterwarnings("ignore:model 'dropping'")
def test_a_task_whose_output_lacks_rows_says_so(granularity, cut):
    x = np.abs(X) + 1
    m = ff.from_onnx(dropping(), granularity=granularity)
    np.testing.assert_array_equal(cut(m, x).compute(scheduler="sync"), x)
    x[3] = 0
    want = r"model 'dropping': output 'y' has 1 rows \(shape \(1, 6\)\) for a chunk of 2 rows, wanted 2"
    with pytest.raises(ff.InputError, match=want):
        cut(m, x).compute(scheduler="sync")


@pytest.mark.parametrize("keep", [[0, 1], [0], [0, 1, 2, 2]], ids=["fewer", "one", "more"])
@pytest.mark.parametrize("granularity", ["op", "model"])
def test_a_chunk_that_is_not_as_long_as_its_array_says_is_refused(keep, granularity):
    x = da.from_array(X[:9], chunks=(3, 6)).map_blocks(lambda b: b[keep], dtype=X.dtype, meta=X[:0])
    with pytest.raises(ff.InputError, match="for a chunk of 3"):
        ff.from_onnx(mlp(), granularity=granularity)(x).compute(scheduler="sync")


def declared(op, *shape):
    """A model that keeps the shape of x, and declares another; of com.microsoft.Gelu inference knows none."""
    made = model(
        [node(op, ["x"], ["y"], domain="com.microsoft" if op == "Gelu" else "")],
        {"x": ["N", 6, 5]},
        {"y": shape},
    )
    made.opset_import.add(domain="com.microsoft", version=1)
    return ff.from_onnx(made)


@pytest.mark.filterwarnings("ignore:model 'graph'")
@pytest.mark.parametrize("shape", [("N",), ("N", 6, 7), ("N", 6, 5, 1), ("N", "N", 5)])
@pytest.mark.parametrize("chunks", [(3, 6, 5), (7, 6, 5)])
def test_what_is_inferred_wins_over_what_is_declared_and_what_is_seen_over_both(shape, chunks, tmp_path):
    x = np.random.default_rng(3).random((7, 6, 5), np.float32)
    known, unknown = declared("Relu", *shape), declared("Gelu", *shape)
    for y in (known(x), known(x, batch_size=3)):
        assert y.shape == y.compute(scheduler="sync").shape == x.shape
    for m in (known, unknown):
        assert m.predict(x).shape == m.predict(x, batch_size=3).shape == x.shape
    y, z = (m(da.from_array(x, chunks=chunks)) for m in (known, unknown))
    assert (y.shape, known.outputs["y"].shape) == (x.shape, ("N", 6, 5))
    np.testing.assert_array_equal((y + 1).compute(scheduler="sync"), x + 1)
    ff.predict_files(known, x, tmp_path / "y.npy", batch_size=3, progress=False)
    for lazy in (z, z.sum()):
        with pytest.raises(ff.ModelError, match=r"'y' has shape \(\d, 6, 5\), wanted \[\?(.|\n)*declares"):
            lazy.compute(scheduler="sync")
    with pytest.raises(
        ff.InputError, match=r"'y' is float32\[3, 6, 5\], wanted float32\[3.*, as the model declares"
    ):
        ff.predict_files(unknown, x, tmp_path / "z.npy", batch_size=3, progress=False)


def test_pieces_that_read_no_rows_check_theirs_too():
    """With a bundle for each node, the last one reads what the Loop made."""
    proto = dropping()
    proto.graph.node.append(node("Relu", ["y"], ["z"], name="last"))
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None, 6]))
    x = np.abs(X) + 1
    x[3] = 0
    with pytest.warns(UserWarning, match="may depend"):
        cut = ff.from_onnx(proto, granularity="op")(x, batch_size=2)
    assert len(cut.dask) > 5
    with pytest.raises(ff.InputError, match="output 'z' has 1 rows"):
        cut.compute(scheduler="sync")


@pytest.mark.parametrize("cut", [lambda x: {"batch_size": 3}, lambda x: {}], ids=["batch", "dask"])
def test_a_late_input_that_is_taken_whole_goes_to_each_chunk(cut):
    made = model(
        [node("MatMul", ["x", "s"], ["y"])], {"x": ["N", 6], "s": ["K", 2]}, {"y": ["N", 2]}, opset=17,
        # A model is warned of once.
        name=f"late{len(cut(X))}",
    )  # fmt: skip
    x = X if cut(X) else da.from_array(X, chunks=(3, 6))
    with pytest.warns(UserWarning, match="may depend"):
        call = ff.from_onnx(made)({"x": x, "s": dask.delayed(X[:6, :2])}, **cut(X))
    close(call.compute(scheduler="sync"), X @ X[:6, :2])


@pytest.mark.parametrize(
    ("made", "rows"),
    [
        pytest.param('y = StringNormalizer<case_change_action = "LOWER">(s)', 3, id="texts"),
        pytest.param('y = StringNormalizer<stopwords = ["a"]>(s)', None, id="stop words"),
        pytest.param("y = Compress<axis = 0>(s, m)", None, id="some rows, declared as all"),
        pytest.param("y = Concat<axis = 0>(s, s)", 6, id="two for each"),
    ],
)
def test_a_whole_call_has_the_rows_that_follow_from_its_inputs(made, rows):
    text = f'<ir_version: 9, opset_import: ["": 17]> g (string[N] s, bool[N] m) => (string[N] y) {{ {made} }}'
    proto = onnx.parser.parse_model(text)
    given = {"s": np.array(["a", "", "é"], object), "m": np.array([True, False, True])}
    assert len(ff.from_onnx(proto)(given).compute(scheduler="sync")) == (rows or 2)
    wanted = OutputCheck("g", ((0, "y", (None,)),), shapes=(("s", (3,)), ("m", None)))
    ir_model = deserialize_model(proto)
    lost = pytest.raises(
        ff.ModelError, match=rf"output 'y' has shape \(2,\), wanted \[{rows}\](.|\n)*inputs \(s: .3., m: .3."
    )
    with lost if rows else nullcontext():
        check_outputs(
            wanted,
            [given["s"][:2]],
            given,
            None,
            lambda s: infer(ir_model, shapes=dict(s), trusts_declared=False),
        )


def texts_apart():
    """Split texts into words: as many columns as the longest of the rows that are computed together has."""
    nodes = [node("StringSplit", ["x"], ["y", "n"], delimiter=" ")]
    return model(nodes, {"x": ["N"]}, {"y": ["N", "M"]}, opset=20, name="texts", dtype=TensorProto.STRING)


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, x: m(x, batch_size=1).compute(),
        lambda m, x: m(x, batch_size=1)[:2].compute(),
        lambda m, x: m(da.from_array(x, chunks=2)).compute(),
        lambda m, x: dask.compute(m(da.from_array(x, chunks=2)))[0],
    ],
    ids=["batch", "a part", "dask", "dask.compute"],
)
@pytest.mark.filterwarnings("ignore:.*its rows may depend")
def test_chunks_of_other_widths_are_named(compute):
    x = np.array(["a", "b c", "d e f", "g"], object)
    want = r"model 'texts': output 'y' has shape .* and .*, but only axis 0 may differ.* on all rows"
    with dask.config.set(scheduler="sync"), pytest.raises(ff.InputError, match=want):
        compute(ff.from_onnx(texts_apart()), x)


def test_an_axis_with_the_name_of_the_rows_is_not_cut_beside_them(tmp_path):
    x, m = X[:6], ff.from_onnx(written("(float[N,N] x) => (float[N,N] y) { y = Relu (x) }"))
    close(m(x).compute(scheduler="sync"), x * (x > 0))
    calls = (
        lambda: m(x, batch_size=2),
        lambda: m(da.from_array(x, chunks=(3, 6))),
        lambda: ff.predict_files(m, x, tmp_path / "y.npy", batch_size=2, progress=False),
    )
    for call in calls:
        with pytest.raises(ff.InputError, match="axis 1 of input 'x' is 'N' too, the number of all rows"):
            call()
