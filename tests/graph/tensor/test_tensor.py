"""Tensors: what is checked as one writes, the ONNX that comes out, and that it computes what numpy does."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import dask.array as da
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.model.load import load
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.dims import resolve_shape
from dask_ferro.graph.tensor.emit import build, save_onnx, to_model
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.graph.tensor.tensor import Node, Tensor, TensorType, asarray, input
from tests.each import every

from .runs import by_onnxruntime, values

X = np.random.default_rng(4).standard_normal((5, 4)).astype(np.float32)
W = np.random.default_rng(5).standard_normal((4, 3)).astype(np.float32)


def x_() -> Any:
    return input("x", ("N", 4))


# ---- numbers -----------------------------------------------------------------------------------------------

SAME = {
    "arithmetic with scalars": lambda m, x: (2 * x + 1 - x / 3) ** 2 - (1 - x) * (1 / (x * x + 1)),
    "a constant array on either side": lambda m, x: X[0] + x * X[1],
    "negation and absolute value": lambda m, x: -abs(x) + +x,
    "comparison": lambda m, x: m.where((x > 0) & ~(x >= 1) | (x != x), x, -1.0),
    "reversed comparison": lambda m, x: m.where((x > 0) ^ (x == X[0]), x, 0.0),
    "matrix product": lambda m, x: x @ W,
    "product with a vector": lambda m, x: x @ W[:, 0],
    "transpose": lambda m, x: (x.T @ x).mT,
    "slices": lambda m, x: x[1:-1, ::2],
    "slices backwards": lambda m, x: x[::-1, 3:0:-2],
    "an integer index": lambda m, x: x[2] + x[-1],
    "new axes and dots": lambda m, x: x[..., None, 1:3],
    "an index of an array": lambda m, x: m.take(x, np.array([2, 0, -1]), axis=1),
    "reshape": lambda m, x: m.reshape(x, (-1, 2, 2)),
    "permute_dims": lambda m, x: m.permute_dims(m.reshape(x, (-1, 2, 2)), (2, 0, 1)),
    "expand_dims and squeeze": lambda m, x: m.squeeze(m.expand_dims(x, axis=1), axis=1),
    "concat": lambda m, x: m.concat([x, x * 2], axis=1),
    "stack": lambda m, x: m.stack([x, x * 2], axis=1),
    "flip": lambda m, x: m.flip(x, axis=1),
    "broadcast_to": lambda m, x: m.broadcast_to(x[0], (3, 4)),
    "sum": lambda m, x: m.sum(x, axis=0) + x.sum(),
    "mean, kept": lambda m, x: m.mean(x, axis=(0, 1), keepdims=True) + x.mean(axis=-1, keepdims=True),
    "max, min and prod": lambda m, x: m.max(x, axis=1) - m.min(x, axis=1) * m.prod(x, axis=1),
    "var and std": lambda m, x: m.var(x, axis=0) + m.std(x, axis=0),
    "argmax": lambda m, x: m.argmax(x, axis=1) - m.argmin(x, axis=1),
    "functions": lambda m, x: m.exp(-x * x) + m.sin(x) * m.cos(x) + m.tanh(x) + m.sqrt(m.square(x)),
    "logarithms": lambda m, x: m.log(1 + x * x) + m.log1p(x * x) + m.expm1(-x * x),
    "rounding": lambda m, x: m.floor(x) + m.ceil(2 * x) + m.round(3 * x) + m.sign(x),
    "maximum and minimum": lambda m, x: m.maximum(x, 0.1) + m.minimum(x, X[0]),
    "zeros and ones like": lambda m, x: m.zeros_like(x) + m.ones_like(x),
}


@every("name", SAME)
def test_equals_numpy_through_onnxruntime(name):
    y = SAME[name](xp, x_())
    wanted = SAME[name](np, X)
    got = by_onnxruntime(y, {"x": X})["y"]
    assert got.shape == np.shape(wanted)
    assert all(d is None or d == n or (d == "N" and n == 5) for d, n in zip(y.shape, got.shape, strict=True))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@every("name", SAME)
def test_shapes_are_what_onnx_infers(name):
    model = to_model(SAME[name](xp, x_()))
    model.graph.outputs[0].shape = None
    for node in model.graph:
        for value in node.outputs:
            value.shape = None
    y = SAME[name](xp, x_())
    inferred = infer(model)["y"]
    assert inferred.dtype == y.type.dtype
    assert inferred.shape is None or all(
        a is None or not isinstance(b, int) or a == b for a, b in zip(y.shape, inferred.shape, strict=True)
    )


@every(
    ("fn", "shape"),
    [
        pytest.param(lambda x: x + 1, ("N", 4), id="a name is kept"),
        pytest.param(lambda x: x @ W, ("N", 3), id="through products"),
        pytest.param(lambda x: x.T, (4, "N"), id="where it goes"),
        pytest.param(lambda x: x.reshape(-1, 2, 2), ("N", 2, 2), id="a -1 can only be it"),
        pytest.param(lambda x: x.reshape("N", 2, 2), ("N", 2, 2), id="and may be written"),
        pytest.param(lambda x: x.reshape(4, "N"), (4, "N"), id="in any place"),
        pytest.param(lambda x: x.reshape(-1), (None,), id="a product with it is unknown"),
        pytest.param(lambda x: x[1:], (None, 4), id="a part of it is unknown"),
        pytest.param(lambda x: x[::-1], ("N", 4), id="its reverse is as long"),
        pytest.param(lambda x: xp.concat([x, x]), (None, 4), id="twice it is unknown"),
        pytest.param(lambda x: x.sum(axis=0), (4,), id="reduced, it is gone"),
        pytest.param(lambda x: xp.broadcast_to(x, (2, "N", 4)), (2, "N", 4), id="broadcast, it stays"),
    ],
)
def test_named_dimensions(fn, shape):
    y = fn(x_())
    assert y.shape == shape
    assert by_onnxruntime(y, {"x": X})["y"].ndim == len(shape)


# ---- dtypes ------------------------------------------------------------------------------------------------


@every(
    ("make", "dtype"),
    [
        pytest.param(lambda: asarray([1.0, 2.0]), "float32", id="Python floats are float32"),
        pytest.param(lambda: asarray(np.zeros(2)), "float64", id="numpy's are kept"),
        pytest.param(lambda: asarray([1, 2]) * 2, "int64", id="an int beside integers"),
        pytest.param(lambda: asarray(np.zeros(2, np.float16)) * 2.5, "float16", id="a float beside halves"),
        pytest.param(lambda: asarray(np.zeros(2, np.float32)) + asarray(np.zeros(2)), "float64", id="floats widen"),
        pytest.param(lambda: asarray(np.zeros(2, np.int8)) + asarray(np.zeros(2, np.int32)), "int32",
            id="so are integers"),
        pytest.param(lambda: xp.sum(asarray(np.int32([1]))), "int64", id="small integers are summed in 64 bits"),
        pytest.param(lambda: asarray([1.0]) < 2, "bool", id="comparisons are bools"),
        pytest.param(lambda: input("h", (2,), ml_dtypes.bfloat16) + 1, "bfloat16", id="bfloat16 is a float"),
        pytest.param(lambda: asarray([1]).astype(np.float64) / 2, "float64", id="a cast"),
    ],
)  # fmt: skip
def test_dtypes(make, dtype):
    assert make().dtype.name == dtype


# ---- what is refused ---------------------------------------------------------------------------------------

REFUSED = [
    ("sizes that differ", lambda x: x + asarray(W), "shapes (N, 4) and (4, 3) do not broadcast: 'N' against 4"),
    ("two names", lambda x: x + input("z", ("M", 4)), "'N' against 'M'"),
    ("a name and a size", lambda x: x + X, "'N' against 5"),
    ("rows that do not meet", lambda x: x @ x, "4 columns do not match 'N' rows"),
    ("floats with integers", lambda x: x + asarray([1, 2, 3, 4]), "float32 with int64 do not mix"),
    ("a float beside integers", lambda x: asarray([1]) + 0.5, "0.5 with int64"),
    ("integers divided", lambda x: asarray([1]) / 2, "takes floating point numbers, got <Tensor constant: int64(1,)>"),
    ("numbers as a condition", lambda x: xp.where(x, x, 0.0), "the condition must be boolean"),
    ("numbers in logic", lambda x: x & x, "takes integers, got <Tensor x: float32(N, 4)>; use astype, or"),
    ("a number as a truth", lambda x: ~x, "bitwise_invert: takes bool or integers, got <Tensor x: float32(N, 4)>;"),
    ("bytes below 0", lambda x: -asarray(np.uint8([1])), "negative: takes numbers that have a sign"),
    ("the sign of a truth", lambda x: xp.sign(x > 0), "sign: takes numbers, got"),
    ("too many indices", lambda x: x[0, 0, 0], "3 indices"),
    ("an index out of bounds", lambda x: x[:, 4], "4 is out of bounds for dimension 1"),
    ("a step of 0", lambda x: x[::0], "step 0"),
    ("a list as an index", lambda x: x[[0, 1]], "is not an index of a tensor"),
    ("an axis it has not", lambda x: x.sum(axis=2), "axis 2 of a tensor of 2 dimensions"),
    ("an axis twice", lambda x: x.sum(axis=(0, -2)), "an axis occurs twice"),
    ("elements lost", lambda x: x.reshape("N", 3), "(N, 4) and (N, 3) have different numbers of elements"),
    ("two -1", lambda x: x.reshape(-1, -1), "at most one -1"),
    ("a transpose of a stack", lambda x: x[None].T, "is not a matrix"),
    ("no order", lambda x: xp.permute_dims(x, (0, 0)), "is not an order of 2 dimensions"),
    ("a squeeze of 4", lambda x: xp.squeeze(x, 1), "dimension 1"),
    ("joined beside the axis", lambda x: xp.concat([x, asarray(W)]), "shapes differ in other dimensions than the axis"),
    ("indices of other rows", lambda x: xp.take_along_axis(asarray(W), np.zeros((7, 2), np.int64), axis=1),
     "wanted the shape of <Tensor constant: float32(4, 3)> except axis 1"),
    ("indices that would broadcast", lambda x: xp.take_along_axis(x, np.zeros((1, 2), np.int64)), "except axis 1"),
    ("pieces that are too long", lambda x: xp.split(x, [3, 2], axis=1), "[3, 2] do not add up to the 4 of dimension 1"),
    ("a piece of length below 0", lambda x: xp.split(x, [5, -1], axis=1), "wanted whole numbers of at least 0"),
    ("floats as indices", lambda x: xp.take(x, x), "takes int32 or int64 indices"),
    ("a truth", lambda x: bool(x.sum() > 0), "is lazy and has no value yet"),
    ("an array of it", lambda x: np.asarray(x), "is lazy and has no value yet"),
    ("a loop over it", lambda x: list(x), "is lazy and has no value yet"),
    ("a dtype of nothing", lambda x: x.astype("M8[s]"), "ONNX has no"),
    ("a name of nothing", lambda x: input("", (2,)), "the name must be a non-empty string"),
    ("a size below 0", lambda x: input("a", (-1,)), "a dimension is a size"),
    ("an output that is none", lambda x: to_model([x, 1]), "outputs are tensors"),
    ("two arguments of a name", lambda x: to_model(x + input("x", ("N", 4))), "two arguments are named 'x'"),
    ("an output named as an input", lambda x: to_model({"x": x + 1}), "names an input and an output"),
    ("a computed input", lambda x: to_model(x + 1, [x + 1]), "is computed and cannot be an input"),
]  # fmt: skip


@every(("call", "said"), [pytest.param(c, s, id=i) for i, c, s in REFUSED])
def test_is_refused_as_one_writes(call, said):
    with pytest.raises(InputError, match=re.escape(said)):
        call(x_())


# ---- models ------------------------------------------------------------------------------------------------


def test_a_saved_file_runs_in_onnxruntime(tmp_path):
    y = xp.tanh(x_() @ asarray(W, name="w")).mean(axis=1)
    save_onnx({"scores": y}, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    np.testing.assert_allclose(session.run(["scores"], {"x": X})[0], np.tanh(X @ W).mean(axis=1), rtol=1e-5)
    assert [i.shape for i in session.get_inputs()] == [["N", 4]]


def test_large_weights_lie_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("dask_ferro.graph.model.embedding.INLINE_BYTES", 64)
    w = np.arange(400, dtype=np.float32).reshape(4, 100)
    save_onnx(x_() @ asarray(w, name="w"), tmp_path / "m.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    np.testing.assert_allclose(session.run(None, {"x": X})[0], X @ w, rtol=1e-4)


def test_a_model_passes_onnx_checks_and_our_loader():
    proto = ir.to_proto(to_model({"y": xp.exp(x_()) @ asarray(W, name="w")}))
    onnx.checker.check_model(proto, full_check=True)
    loaded = load(proto)
    assert (loaded.opset, loaded.weight_bytes) == (21, W.nbytes)


def test_a_transpose_back_is_what_was_transposed():
    # Else the gradient of a layer keeps each weight's transpose from the forward to the backward.
    x, w = input("x", (3, 4)), asarray(X, name="w")
    y = nn.linear(x, w)
    model = to_model({"y": y, "back": xp.permute_dims(w.mT, (1, 0)) * 2, "dx": grad((y * y).sum(), x)})
    transposed = [node for node in model.graph if node.op_type == "Transpose"]
    assert [[user.op_type for user in node.outputs[0].consumers()] for node in transposed] == [["MatMul"]]


def test_a_transpose_of_another_domain_is_no_transpose():
    kind = TensorType(ir.DataType.FLOAT, (4, 3))
    turned = Tensor(Node("Transpose", (input("x", (3, 4)),), (kind,), {"perm": (1, 0)}, "theirs"), 0, kind)
    ops = [(node.domain, node.op_type) for node in to_model({"y": turned.mT}).graph]
    assert ops == [("theirs", "Transpose"), ("", "Transpose")]


def test_equal_nodes_and_constants_are_written_once():
    x = x_()
    model = to_model(xp.exp(x * 2) + xp.exp(x * 2) * 2)
    assert sorted(n.op_type for n in model.graph) == ["Add", "Exp", "Mul", "Mul"]
    assert len(model.graph.initializers) == 1


def test_outputs_have_their_names_and_inputs_their_order():
    x, z = x_(), input("z", ("N", 4))
    h = x + z
    model = to_model({"h": h, "again": h, "same": x, "w_out": asarray(W, name="w")}, [z])
    assert [v.name for v in model.graph.outputs] == ["h", "again", "same", "w_out"]
    assert [v.name for v in model.graph.inputs] == ["z", "x"]
    found = by_onnxruntime({"h": h, "again": h, "same": x}, {"x": X, "z": X})
    assert all(
        np.array_equal(found[name], want) for name, want in [("h", 2 * X), ("again", 2 * X), ("same", X)]
    )


def test_a_constant_is_a_weight_or_an_input_bound_to_its_value():
    w = asarray(W, name="w")
    y = x_() @ w
    assert list(to_model(y).graph.initializers) == ["w"]
    built = build(y, [w])
    assert ([v.name for v in built.model.graph.inputs], list(built.model.graph.initializers)) == (
        ["w", "x"],
        [],
    )
    assert built.bound["w"] is W


@pytest.mark.parametrize(
    ("mix", "dims"),
    [
        pytest.param(lambda x, d: x + d, (5, 4), id="beside a tensor"),
        pytest.param(lambda x, d: d * x, (5, 4), id="before it"),
        pytest.param(lambda x, d: x + d[d[:, 0] > 0], (5, 4), id="of unknown length"),
    ],
)
def test_a_dask_array_is_an_argument_bound_to_it(mix, dims):
    data = da.from_array(X, chunks=(2, 4))
    built = build(mix(input("x", (5, 4)), data))
    assert [v.name for v in built.model.graph.inputs] == ["x", "input_0"]
    assert isinstance(built.bound["input_0"], da.Array)
    assert tuple(built.model.graph.outputs[0].shape) == dims


def test_what_nobody_holds_is_freed():
    w = asarray(W, name="w")
    batch = np.ones((5, 4), np.float32)
    gone = weakref.ref(batch)
    loss = (asarray(batch) @ w).mean()
    del batch, loss
    gc.collect()
    assert gone() is None
    assert w.shape == (4, 3)


def test_a_deep_graph_is_no_deep_recursion():
    x = input("x", ())
    y = x
    for _ in range(3000):
        y = y + 1
    assert values(y, {"x": np.float32(0)})["y"] == 3000


def test_tensors_and_files_mix():
    inner = to_model({"s": xp.exp(input("a", ("rows", 4))) @ asarray(W, name="w")})
    x = x_()
    scores = from_model(inner, {"a": x * 2}).outputs["s"]
    assert scores.shape == ("N", 3)
    np.testing.assert_allclose(by_onnxruntime(scores / 2, {"x": X})["y"], np.exp(2 * X) @ W / 2, rtol=1e-5)


# ---- properties --------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 3), max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(SIZES, SIZES)
def test_broadcasting_is_numpys(a, b):
    x, y = input("a", a), input("b", b)
    try:
        wanted = np.broadcast_shapes(a, b)
    except ValueError:
        with pytest.raises(InputError, match="do not broadcast"):
            x + y
    else:
        assert (x + y).shape == wanted


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.slices(6), st.slices(4))
def test_slices_are_numpys(rows, first, second):
    data = np.arange(rows * 4, dtype=np.float64).reshape(rows, 4)
    before_the_start = (first.step or 1) < 0 and (first.start or 0) < -rows  # where ONNX departs from numpy
    for shape in ((rows, 4), *([] if before_the_start else [("N", 4)])):
        y = input("x", shape, np.float64)[first, second]
        assert np.array_equal(values(y, {"x": data})["y"], data[first, second])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_a_reshape_to_any_grouping_is_known(dims, random):
    old = ("N", *dims)
    cut = random.randint(1, len(old))
    product = int(np.prod(dims[cut - 1 :], dtype=int))
    assert resolve_shape(old, (-1, *dims[: cut - 1], product), "here") == ("N", *dims[: cut - 1], product)


def test_a_file_in_no_folder_is_refused_and_no_folder_is_made(tmp_path):
    x = input("x", (2,), "float32")
    with pytest.raises(InputError, match=r"folder '.*no' does not exist"):
        save_onnx(x + x, tmp_path / "no" / "a.onnx")
    assert not (tmp_path / "no").exists()
