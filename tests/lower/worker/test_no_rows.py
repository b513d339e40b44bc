"""Chunks without rows: right shapes and dtypes, whatever the engines make of nothing; what has elements is computed."""

from __future__ import annotations

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser

import dask_ferro as ff
from tests.each import every
from tests.graphs import model, written
from tests.hostile.zygote import zygote

GRANULARITIES = ("op", "auto", "model", 0.5)
RNG = np.random.default_rng(4)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def recurrent(op):
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    weights = {"w": floats(1, gates * 4, 3), "r": floats(1, gates * 4, 4), "one": [1]}
    nodes = (
        f"t = Transpose <perm = [1,0,2]> (x) [recurrence] h = {op} <hidden_size = 4> (t, w, r)"
        " s = Squeeze (h, one) y = Transpose <perm = [1,0,2]> (s)"
    )
    return written(f"(float[N,5,3] x) => (float[N,5,4] y) {{ {nodes} }}", weights), (5, 3), (5, 4)


def convolutional():
    statistics = {n: np.abs(floats(4)) for n in ("scale", "bias", "mean", "variance")}
    nodes = (
        "c = Conv (x, w) n = BatchNormalization (c, scale, bias, mean, variance) r = Relu (n)"
        " p = GlobalAveragePool (r) f = Flatten (p) l = Gemm (f, g) y = Softmax (l)"
    )
    weights = {"w": floats(4, 3, 3, 3), "g": floats(4, 2), **statistics}
    return written(f"(float[N,3,6,6] x) => (float[N,2] y) {{ {nodes} }}", weights), (3, 6, 6), (2,)


def normalized(op):
    extra = {"LayerNormalization": ["s", "b"], "InstanceNormalization": ["s", "b"], "LRN": []}[op]
    size = 6 if op == "LayerNormalization" else 3
    attributes = {"size": 3} if op == "LRN" else {}
    nodes = [helper.make_node(op, ["x", *extra], ["n"], **attributes), helper.make_node("Relu", ["n"], ["y"])]
    weights = {name: floats(size) for name in extra}
    return model(nodes, {"x": ["N", 3, 6]}, {"y": ["N", 3, 6]}, weights), (3, 6), (3, 6)


MODELS = {
    **{op: (lambda op=op: recurrent(op)) for op in ("RNN", "GRU", "LSTM")},
    "conv": convolutional,
    **{op: (lambda op=op: normalized(op)) for op in ("LayerNormalization", "InstanceNormalization", "LRN")},
}


def without_rows(name):
    """The shapes and dtypes that a model gives for no rows; runs in a child."""
    made, given, _ = MODELS[name]()
    x = np.zeros((0, *given), np.float32)
    found = [
        ff.from_onnx(made, granularity=granularity)(x).compute(scheduler="sync")
        for granularity in ("op", "model")
    ]
    return [[list(y.shape), str(y.dtype)] for y in found]


@pytest.fixture(scope="module")
def children():
    with zygote("tests.lower.worker.test_no_rows") as running:
        yield running


@pytest.mark.parametrize("name", MODELS)
def test_no_rows_give_no_rows(children, name):
    wanted = [[0, *MODELS[name]()[2]], "float32"]
    ended = children.run("tests.lower.worker.test_no_rows:without_rows", name=name)  # it ended the process
    assert ended.is_alive, ended
    assert ended.answer == [wanted] * 2


@every("name", MODELS)
@every("granularity", GRANULARITIES)
def test_an_empty_chunk_among_others_is_an_empty_chunk(name, granularity):
    made, given, _ = MODELS[name]()
    x = floats(5, *given)
    chunks = da.concatenate([da.from_array(x[:3], chunks=-1), da.zeros((0, *given), dtype=x.dtype), x[3:]])
    call = ff.from_onnx(made, granularity=granularity)
    whole = call(x).compute(scheduler="sync")
    parts = call(chunks)
    np.testing.assert_allclose(parts.compute(scheduler="sync"), whole, rtol=1e-5, atol=1e-6)


def test_a_classifier_of_no_rows_gives_no_labels_and_no_scores():
    text = (
        '<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]> g (float[N,4] x) => (int64[N] l, float[N,2] p) {'
        " l, p = ai.onnx.ml.LinearClassifier <classlabels_ints = [0,1], multi_class = 1, intercepts = [0.1,0.2],"
        " coefficients = [1.0,2.0,3.0,4.0,-1.0,-2.0,-3.0,-4.0]> (x)"
        " z = ai.onnx.ml.ZipMap <classlabels_int64s = [0,1]> (p) }"
    )
    made = parser.parse_model(text)
    scores = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(1, None))
    made.graph.output.append(helper.make_value_info("z", helper.make_sequence_type_proto(scores)))
    for granularity in GRANULARITIES:
        late = ff.from_onnx(made, granularity=granularity)(np.zeros((0, 4), np.float32))
        got = late.compute(scheduler="sync")
        assert (got["l"].shape, got["l"].dtype) == ((0,), np.int64)
        assert (got["p"].shape, got["p"].dtype) == ((0, 2), np.float32)
        assert (got["z"].shape, got["z"].dtype) == ((0, 2), np.float32)


def test_what_no_engine_takes_is_refused_by_its_node():
    made = written("(float[N,3] x) => (int64[3] y) { [best] y = ArgMax <axis = 0, keepdims = 0> (x) }")
    for granularity in GRANULARITIES:
        call = ff.from_onnx(made, granularity=granularity)
        with pytest.raises(ff.ModelError, match=r"'best' \(ArgMax.*inputs: x: float32\[0, 3\]"):
            call(np.zeros((0, 3), np.float32)).compute(scheduler="sync")


HAS_ELEMENTS = {
    "a sum over the rows": (
        "(float[N,3] x) => (float[3] y) { b = Add (x, one) y = ReduceSum <keepdims = 0> (b, zero) }",
        (0, 3),
    ),
    "their number": ("(float[N,3] x) => (int64[2] y) { b = Relu (x) y = Shape (b) }", (0, 3)),
    "all rows after one": ("(float[N,3] x) => (float[M,3] y) { y = Concat <axis = 0> (row, x) }", (0, 3)),
    "a row of padding": ("(float[N,3] x) => (float[M,3] y) { b = Relu (x) y = Pad (b, pads) }", (0, 3)),
    "every second row after one of padding": (
        "(float[N,3] x) => (float[M,3] y) { b = Pad (x, pads) y = Slice (b, zero, last, zero, two) }",
        (0, 3),
    ),
    "a part that is left out": (
        "(float[N,3] x) => (float[N,3] y) { e = Slice (x, nine, last, zero) m = Concat <axis = 0> (e, x) y = Neg (m) }",
        (2, 3),
    ),
    "a sum over a part that is left out": (
        "(float[N,3] x) => (float[3] y) { e = Slice (x, nine, last, zero) r = Relu (e)"
        " y = ReduceSum <keepdims = 0> (r, zero) }",
        (2, 3),
    ),
}  # fmt: skip


@every("granularity", ["op", "model"])
@every("what", HAS_ELEMENTS)
def test_what_has_elements_is_what_onnx_runtime_computes(what, granularity):
    source, shape = HAS_ELEMENTS[what]
    weights = {
        "zero": [0],
        "two": [2],
        "nine": [9],
        "last": [99],
        "pads": [1, 0, 0, 0],
        "one": floats(1),
        "row": floats(1, 3),
    }
    made = written(source, {name: value for name, value in weights.items() if name in source})
    x = np.ones(shape, np.float32)
    (wanted,) = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": x})
    got = ff.from_onnx(made, granularity=granularity)(x).compute(scheduler="sync")
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


def test_a_delayed_input_may_turn_out_to_have_no_rows():
    made, given, wanted = recurrent("GRU")
    late = dask.delayed(np.zeros)((0, *given), np.float32)
    assert ff.from_onnx(made)(late).compute(scheduler="sync").shape == (0, *wanted)


def copied_sizes():
    """As PyTorch exports recurrent networks of two directions: the sizes of rows and steps are copied."""
    nodes = "t = Transpose <perm = [0,2,1]> (x) [flat] r = Reshape (t, to) y = Relu (r)"
    return written(f"(float[N,5,3] x) => (float[N,3,5] y) {{ {nodes} }}", {"to": [0, 0, -1]})


def group_norm():
    """As PyTorch exports one: groups of channels become the channels of an InstanceNormalization, and come apart."""
    nodes = "g = Reshape (x, groups) n = InstanceNormalization (g, s, b) [back] y = Reshape (n, back)"
    weights = {"groups": [0, 2, -1], "back": [-1, 4, 6, 6], "s": floats(2), "b": floats(2)}
    return written(f"(float[N,4,6,6] x) => (float[N,4,6,6] y) {{ {nodes} }}", weights)


def texts():
    return written("(string[N,2] x) => (string[N,2] y) { y = Identity (x) }")


def halves():
    return written("(bfloat16[N,2] x) => (bfloat16[N,2] y) { y = Add (x, x) }")


@every("granularity", ["op", "model"])
@every(
    ("make", "given", "wanted"),
    [
        (copied_sizes, np.zeros((0, 5, 3), np.float32), (0, 3, 5)),
        (group_norm, np.zeros((0, 4, 6, 6), np.float32), (0, 4, 6, 6)),
        (texts, np.zeros((0, 2), object), (0, 2)),
        (halves, np.zeros((0, 2), ml_dtypes.bfloat16), (0, 2)),
    ],
)
def test_no_rows_of_other_types_and_copied_sizes(make, given, wanted, granularity):
    got = ff.from_onnx(make(), granularity=granularity)(given).compute(scheduler="sync")
    assert (got.shape, got.dtype) == (wanted, given.dtype)
