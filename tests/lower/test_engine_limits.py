"""Errors of engines name model and node, at every granularity alike."""

from __future__ import annotations

import sys

import dask.array as da
import numpy as np
import pytest
from onnx import helper

import dask_ferro as ff
from tests.each import every
from tests.graphs import model, written
from tests.programs import ran

GRANULARITIES = ("op", "auto", "model", 0.5)


# Of a Pad of unknown axes, before it is run.
@pytest.mark.filterwarnings("ignore:model .* its rows may depend")
@pytest.mark.parametrize("pads", [[1], [1, 1], [0, 1, 0, 1, 1, 1]])
def test_a_pad_with_the_wrong_number_of_values_is_refused_by_its_node(pads):
    node = helper.make_node("Pad", ["x", "p"], ["y"], name="widened")
    made = model([node], {"x": ["N", 4]}, {"y": ["N", 4]}, {"p": np.array(pads, np.int64)})
    for given in (np.ones((300, 4), np.float32), np.ones((40_000, 4), np.float32)):
        with pytest.raises((ff.ModelError, RuntimeError), match="widened"):
            ff.from_onnx(made)(given).compute(scheduler="sync")
    x = da.ones((40_000, 4), chunks=(20_000, 4), dtype=np.float32)
    with pytest.raises((ff.ModelError, ff.InputError), match="widened"):
        ff.from_onnx(made)(x).compute(scheduler="sync")


@every("op", ["Div", "Mod"])
@every("dtype", [np.int32, np.int64, np.int8, np.uint8])
def test_an_integer_divided_by_0_is_an_error_at_every_granularity(op, dtype):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node(op, ["a", "b"], ["y"], name="ratio")
    made = model([node], {"a": ["N"], "b": ["N"]}, {"y": ["N"]}, dtype=kind)
    for granularity in GRANULARITIES:
        call = ff.from_onnx(made, granularity=granularity)
        with pytest.raises(Exception, match="integer is divided by 0"):
            call(np.ones(3, dtype), np.array([1, 0, 1], dtype)).compute(scheduler="sync")


def least_by_minus_1(op, dtype):
    """Yield what the least integer by -1 gives, with -1 as an input and as a weight, at every granularity."""
    kind, least = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), np.iinfo(dtype).min
    nodes = [helper.make_node("Add", ["a", "z"], ["c"]), helper.make_node(op, ["c", "b"], ["y"])]
    zero = {"z": np.zeros(1, dtype)}
    for weights in (zero, {**zero, "b": np.array([-1], dtype)}):
        inputs = {"a": ["N"]} if "b" in weights else {"a": ["N"], "b": ["N"]}
        made = model(nodes, inputs, {"y": ["N"]}, weights, dtype=kind)
        given = {"a": np.full(3, least, dtype), "b": np.full(3, -1, dtype)}
        for granularity in GRANULARITIES:
            call = ff.from_onnx(made, granularity=granularity)
            yield call({name: given[name] for name in inputs}).compute(scheduler="sync").tolist()


IN_A_CHILD = """
from tests.lower.test_engine_limits import least_by_minus_1
for op in ("Div", "Mod"):
    for dtype in ("int32", "int64"):
        for found in least_by_minus_1(op, dtype):
            print(op, dtype, found, flush=True)
"""


def test_the_least_integer_by_minus_1_wraps_and_ends_no_process():
    done = ran([sys.executable, "-c", IN_A_CHILD])  # it ended the process
    wanted = []
    for op in ("Div", "Mod"):
        for dtype in ("int32", "int64"):
            least = int(np.iinfo(dtype).min)
            wanted += [f"{op} {dtype} {[least if op == 'Div' else 0] * 3}"] * 2 * len(GRANULARITIES)
    assert done.stdout.splitlines() == wanted, (done.returncode, done.stderr[-400:])


BODIES = {
    "Loop": "y = Loop (n, c, a) <body = b (int64 i, bool ci, int64[N] s) => (bool co, int64[N] t)"
    " {co = Identity (ci) p = Neg (s) q = Neg (p) t = Div (q, d)}>",
    "If": "y = If (c) <then_branch = t () => (e) {p = Neg (a) q = Neg (p) e = Div (q, d)},"
    " else_branch = u () => (f) {p = Cast <to = 1> (a) q = Div (p, p) f = Cast <to = 7> (q)}>",
    "If in a Loop": "y = Loop (n, c, a) <body = b (int64 i, bool ci, int64[N] s) => (bool co, int64[N] t)"
    " {co = Identity (ci) p = Neg (s) t = If (ci) <then_branch = v () => (e) {q = Neg (p) e = Div (q, d)},"
    " else_branch = w () => (f) {f = Identity (p)}>}>",
    "Scan": "y = Scan <num_scan_inputs = 2, body = b (s, t) => (u) {p = Neg (s) q = Neg (p) u = Div (q, t)}>"
    " (a, d)",
}


@every("name", BODIES)
@every("op", ["Div", "Mod"])
def test_a_body_that_may_divide_by_minus_1_is_not_run_by_onnxruntime(name, op):
    text = BODIES[name].replace("e = Div", f"e = {op}").replace("t = Div", f"t = {op}")
    nodes = text.replace("u = Div", f"u = {op}")
    made = written(f"(int64 n, bool c, int64[N] a, int64[N] d) => (int64[N] y) {{ {nodes} }}", opset=17)
    call = ff.from_onnx(made)
    assert [row.engines for row in call._opened.support] == [("reference",)]
    least = np.iinfo(np.int64).min
    given = {"n": np.array(1), "c": np.array(True), "a": np.full(3, least), "d": np.full(3, -1)}
    got = call({n: given[n] for n in call.inputs}).compute(scheduler="sync")
    assert got.tolist() == [least if op == "Div" else 0] * 3


def test_a_body_that_divides_by_a_constant_stays_in_the_session():
    text = """(int64 n, bool c, int64[N] a) => (int64[N] y) {
        y = Loop (n, c, a) <body = b (int64 i, bool ci, int64[N] s) => (bool co, int64[N] t)
        {co = Identity (ci) k = Constant <value_int = 2> () p = Neg (s) t = Div (p, k)}> }"""
    made = written(text, opset=17)
    assert ff.from_onnx(made)._opened.support[0].engines[0] == "onnxruntime"


def test_a_constant_divisor_that_cannot_trap_stays_in_the_session():
    nodes = "s = Shape (x) h = Div (s, two) y = Reshape (x, h)"
    made = written(f"(float[N,4] x) => (y) {{ {nodes} }}", {"two": [2, 1]})
    opened = ff.from_onnx(made)._opened
    assert [row.engines[0] for row in opened.support] == ["onnxruntime"] * 3


@every("opset", [9, 13, 14, 15])
@every("shape", [(6, 4), (3, 4, 5)])
def test_batch_normalization_that_trains_gives_the_same_each_time(opset, shape):
    """ONNX Runtime writes the running mean over the weight, and here over the bias, which has its numbers."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    scale, bias = rng.standard_normal((2, 4)).astype(np.float32)
    outputs = ["y", "m", "v"] if opset >= 14 else ["y", "m", "v", "p", "q"]
    attributes = {"training_mode": 1} if opset >= 14 else {}
    weights = {"s": scale, "b": bias, "mean": bias, "w": np.ones(4, np.float32)}
    node = helper.make_node("BatchNormalization", ["x", *weights], outputs, **attributes)
    made = model([node], {"x": shape}, {"y": shape}, weights, opset=opset)
    made.ir_version = 8
    axes = (0, *range(2, len(shape)))
    channel = (1, -1) + (1,) * (len(shape) - 2)
    centred = x - x.mean(axes, keepdims=True)
    scale_, bias_ = scale.reshape(channel), bias.reshape(channel)
    wanted = centred / np.sqrt(x.var(axes, keepdims=True) + 1e-5) * scale_ + bias_
    call = ff.from_onnx(made)
    for _ in range(3):
        np.testing.assert_allclose(call(x).compute(scheduler="sync"), wanted, rtol=1e-4, atol=1e-5)
    made = model([node], {"x": shape}, {"y": shape, "m": [4], "v": [4]}, weights, opset=opset)
    made.ir_version = 8
    got = ff.from_onnx(made)(x).compute(scheduler="sync")
    np.testing.assert_allclose(got["m"], 0.9 * bias + 0.1 * x.mean(axes), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got["v"], 0.9 + 0.1 * x.var(axes), rtol=1e-4)
