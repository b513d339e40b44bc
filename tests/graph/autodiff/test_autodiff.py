"""Gradients: which ops have one, at kinks, of half precision, of imported models, and what is refused."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from dask_ferro.engines.array.table import KERNELS
from dask_ferro.errors import InputError, UnsupportedOpError
from dask_ferro.graph.autodiff.grad import EXPANSIONS, FLAT, RULES, grad, value_and_grad
from dask_ferro.graph.ir import regions
from dask_ferro.graph.model.load import load
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import to_model
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.graph.tensor.tensor import asarray, emit, input
from tests.each import every
from tests.graph.tensor.runs import by_reference, values
from tests.graphs import written

from .gradient_cases import Case, normal, whole

# ---- the table ---------------------------------------------------------------------------------------------

# Floating results that have a gradient on paper and none here.
WITHOUT = {
    "CausalConvWithState": "a state of inference",
    "TensorScatter": "a cache of inference",
    "DequantizeLinear": "integers in",
    "DynamicQuantizeLinear": "integers out",
    "Range": "its length depends on its inputs",
    **dict.fromkeys(("CenterCropPad", "Compress", "GlobalLpPool", "LpNormalization", "LpPool",
        "MeanVarianceNormalization", "OneHot"), "no layer has it, and few models"),
}  # fmt: skip
# Results that are no floating point numbers.
DISCRETE = {
    "And", "ArgMax", "ArgMin", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "ConstantOfShape", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "MatMulInteger",
    "NonZero", "Not", "Or", "QuantizeLinear", "Shape", "Size", "Xor",
}  # fmt: skip


def test_every_kernel_has_a_gradient_or_a_reason():
    # ONNX Runtime alone computes a Resize, in float32: `test_resize`.
    places = [RULES.keys() - {"Resize"}, EXPANSIONS.keys(), FLAT, WITHOUT.keys(), DISCRETE]
    assert set().union(*places) == set(KERNELS)
    assert sum(map(len, places)) == len(KERNELS), "an op is in two places"


@pytest.mark.parametrize("op", ["Ceil", "Floor", "Round", "Sign"])
def test_a_step_function_stops_the_gradient(op):
    x = input("x", (3,), np.float64)
    y = getattr(xp, op.lower())(x) + 2 * x
    assert values({"g": grad(y.sum(), x)}, {"x": normal(3)})["g"].tolist() == [2.0, 2.0, 2.0]


def test_swiglu_equals_its_parts():
    gate, value = (input(name, (2, 3), np.float64) for name in ("a", "b"))
    text = "(double[2,3] a, double[2,3] b) => (double[2,3] y0) { y0 = SwiGLU (a, b) }"
    whole_op = from_model(ir.from_proto(written(text, opset=28)), {"a": gate, "b": value}).outputs["y0"]
    parts = nn.silu(gate) * value
    feeds = {"a": normal(2, 3), "b": normal(2, 3)}
    got, wanted = (grad(xp.square(y).sum(), [gate, value]) for y in (whole_op, parts))
    found = values({"a0": got[0], "b0": got[1], "a1": wanted[0], "b1": wanted[1]}, feeds)
    np.testing.assert_allclose(found["a0"], found["a1"], rtol=1e-13)
    np.testing.assert_allclose(found["b0"], found["b1"], rtol=1e-13)


# ---- half precision ----------------------------------------------------------------------------------------

HALVES = [pytest.param(np.float16, id="float16"), pytest.param(ml_dtypes.bfloat16, id="bfloat16")]


@pytest.mark.parametrize("rows", [70_000, "N"], ids=["known", "named"])
def test_a_mean_of_more_halves_than_float16_counts_has_a_gradient(rows):
    x = input("x", (rows,), np.float16)
    found = values({"g": grad(xp.mean(x) * 4.0, x)}, {"x": np.ones(70_000, np.float16)}, [x])["g"]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found.astype(np.float64), 4 / 70_000, rtol=1e-3)


# id -> op and attributes: each normalizes 2 x 4 x 64 numbers, and takes a scale and (but for RMS) a bias
NORMS = {
    "layer": ("LayerNormalization", {}, 64),
    "layer, two axes": ("LayerNormalization", {"axis": 1}, (4, 64)),
    "root mean square": ("RMSNormalization", {}, 64),
    "instance": ("InstanceNormalization", {}, 4),
    "group": ("GroupNormalization", {"num_groups": 2}, 4),
}


@every("dtype", HALVES)
@every("name", NORMS)
def test_a_norm_of_halves_is_differentiated_in_float32(name, dtype):
    op, attributes, size = NORMS[name]
    rng = np.random.default_rng(5)
    x = 1000 * rng.standard_normal((2, 4, 64))  # squares of float16 end at 256 * 256
    weight = rng.standard_normal(x.shape)
    scale = rng.uniform(0.5, 1.5, size)
    arrays = {"x0": x, "x1": scale} | ({} if op.startswith("RMS") else {"x2": np.zeros_like(scale)})
    halves = {name: array.astype(dtype) for name, array in arrays.items()}

    def gradients(kind: Any) -> dict[str, np.ndarray]:
        inputs = {name: input(name, array.shape, kind) for name, array in halves.items()}
        y = emit(op, list(inputs.values()), x.shape, opset=23, **attributes)
        loss = (y * asarray(weight.astype(dtype).astype(kind))).sum()
        found = grad(loss, {name: inputs[name] for name in ("x0", "x1")})
        feeds = {name: array.astype(kind) for name, array in halves.items()}
        model = to_model({f"d_{name}": g for name, g in found.items()}, list(inputs.values()))
        slopes = by_reference(model, feeds)
        return {name: slopes[f"d_{name}"] for name in found}

    wanted, got = gradients(np.float64), gradients(dtype)
    rounding = 4 * float(ml_dtypes.finfo(dtype).eps)
    for name, slopes in wanted.items():
        assert got[name].dtype == dtype
        near = rounding * np.abs(slopes).max()
        np.testing.assert_allclose(
            got[name].astype(np.float64), slopes, rtol=rounding, atol=near, err_msg=name
        )


# ---- kinks and refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "x", "slope"),
    [
        pytest.param(nn.relu, 0.0, 0.0, id="relu has slope 0 at 0"),
        pytest.param(abs, 0.0, 0.0, id="|x| has slope 0 at 0"),
        pytest.param(lambda x: xp.maximum(x, x * 1.0), 2.0, 1.0, id="a tie is split, and adds up to the whole"),
        pytest.param(lambda x: xp.sqrt(xp.where(x > 5, x, xp.zeros_like(x))), 1.0, 0.0,
            id="the branch not taken adds nothing, though g is infinite"),
        pytest.param(lambda x: x**0, 0.0, 0.0, id="x ** 0 is flat at 0 too"),
        pytest.param(lambda x: x * x, 3.0, 6.0, id="both uses of a value count"),
    ],
)  # fmt: skip
def test_slopes_at_a_point(fn, x, slope):
    t = input("x", (), np.float64)
    assert values({"g": grad(fn(t), t)}, {"x": np.array(x)})["g"] == slope


def test_a_parameter_out_of_use_has_a_gradient_of_zeros():
    x, w = input("x", (2,), np.float64), input("w", ("N", 3), np.float64)
    assert values({"g": grad(x.sum(), w)}, {"w": normal(2, 3)}, [w])["g"].tolist() == [[0.0] * 3] * 2


class Pair(NamedTuple):
    first: Any
    second: Any


def test_gradients_come_in_the_form_of_the_parameters():
    w = input("w", ())
    params = (w, [w], Pair(w, {"b": (w,)}))
    found = grad(w * w, params)
    assert (type(found), type(found[1]), type(found[2])) == (tuple, list, Pair)
    assert isinstance(found[2].second["b"], tuple)


def test_a_computed_tensor_may_be_a_parameter():
    x = input("x", (3,), np.float64)
    h = x * x
    found = values(
        dict(zip("ab", grad((h * h).sum(), [h, x]), strict=True)), {"x": np.array([1.0, 2.0, 3.0])}
    )
    assert found["a"].tolist() == [2.0, 8.0, 18.0]
    assert found["b"].tolist() == [4.0, 32.0, 108.0]


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        pytest.param(lambda x: grad(x, x), InputError, "a loss is a scalar, got (2, 3)", id="no scalar"),
        pytest.param(lambda x: grad(x.sum(), asarray([1, 2])), InputError, "is not floating point",
            id="integer parameters"),
        pytest.param(lambda x: grad(x.sum(), {"w": "x"}), InputError, "got str", id="no tensor"),
        pytest.param(lambda x: grad(lambda w: w, x), InputError,
            "grad: loss: got a function, wanted the tensor that it returns: grad(fn(w), w)", id="a function"),
        pytest.param(lambda x: value_and_grad(1.0, x), InputError, "got a float, wanted a Tensor", id="a number"),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused(make, error, said):
    with pytest.raises(error, match=re.escape(said)):
        make(input("x", (2, 3)))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        pytest.param(Case("Range", (np.array(0.0), np.array(3.0), np.array(1.0)), shape=(3,)), "Range has none",
            id="by op"),
        pytest.param(Case("ScatterND", (normal(3), whole([0]), normal(1)), {"reduction": "mul"}), "'mul'",
            id="by reduction"),
        pytest.param(Case("Pad", (normal(3), whole(1, -1)), {"mode": "reflect"}), "below 0", id="by width"),
        pytest.param(Case("GatherND", (normal(2, 3), whole([[1]], [[0]])), {"batch_dims": 1}), "batch_dims",
            id="by batches"),
        pytest.param(Case("MaxPool", (normal(1, 1, 5, 4),), {"kernel_shape": [2, 2], "storage_order": 1}),
            "storage_order", id="by attribute"),
    ],
)  # fmt: skip
def test_what_has_no_gradient_is_named(case, said):
    imported = from_model(load(case.model()).model)
    with pytest.raises(UnsupportedOpError) as caught:
        grad(imported.outputs["y0"].sum(), imported.inputs)
    assert "'node'" in str(caught.value)
    assert said in str(caught.value)


# ---- the graph of gradients --------------------------------------------------------------------------------


def test_input_and_weight_gradients_are_separate_nodes():
    x, w = input("x", ("N", 4)), input("w", (4, 3))
    dx, dw = grad((x @ w).sum(), [x, w])
    for alone, other in ((dx, "w"), (dw, "x")):
        backward = [n for n in to_model(alone).graph if regions.region_of(n).phase == regions.BACKWARD]
        assert [n.op_type for n in backward].count("MatMul") == 1
        reads = {v.name for n in backward if n.op_type == "Transpose" for v in n.inputs}
        assert reads == {other}


def test_gradients_lie_in_the_region_of_their_nodes():
    x = input("x", ("N", 4))
    with regions.region("layer1"):
        h = xp.tanh(x)
    model = to_model({"g": grad(h.sum(), x)})
    found = {n.op_type: regions.region_of(n) for n in model.graph}
    assert found["Tanh"] == ("layer1", "")
    assert found["Sub"] == ("layer1", "backward")
    assert found["Expand"] == ("", "backward")


def test_the_same_calls_give_the_same_graph():
    def once() -> bytes:
        x, w = input("x", ("N", 4)), asarray(np.ones((4, 3), np.float32), name="w")
        loss = nn.cross_entropy(x @ w, input("t", ("N",), np.int64))
        model = to_model(dict(zip(["l", "g"], value_and_grad(loss, w), strict=True)))
        return ir.to_proto(model).SerializeToString()

    assert once() == once()


# ---- imported models ---------------------------------------------------------------------------------------


def _old_mlp() -> ir.Model:
    """A model as exporters wrote it: named weights, axes as attributes, a squeeze and a mean."""
    text = """(double[batch,4] x) => (double[batch,3] scores) {
        h = Gemm (x, w1, b1)  r = Relu (h)  s = MatMul (r, w2)  u = Unsqueeze <axes = [1]> (s)
        scores = ReduceMean <axes = [1], keepdims = 0> (u)
    }"""
    return load(written(text, {"w1": normal(4, 5), "b1": normal(5), "w2": normal(5, 3)}, opset=11)).model


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        pytest.param({"z": input("z", (2, 4), np.float64)}, "no input 'z'", id="a name it has not"),
        pytest.param({"x": input("x", (2, 4))}, "is float64(batch, 4)", id="another dtype"),
        pytest.param({"x": input("x", (2, 5), np.float64)}, "<Tensor x: float64(2, 5)>", id="another size"),
    ],
)
def test_what_does_not_fit_a_model_is_refused(inputs, said):
    with pytest.raises(InputError, match=re.escape(said)):
        from_model(_old_mlp(), inputs)


def test_control_flow_is_refused_by_node():
    text = """(bool c, float[2] x) => (float[2] y) {
        [choice] y = If (c) <then_branch = t () => (float[2] x) {}, else_branch = e () => (float[2] x) {}>
    }"""
    with pytest.raises(UnsupportedOpError, match="'choice' \\(If\\) has a body"):
        from_model(ir.from_proto(written(text)))


def test_a_scalar_beside_unknown_sizes_needs_no_sum():
    x = input("x", (None, None))
    model = to_model(grad((x * 2 + 1).sum(), x))
    assert "NonZero" not in {node.op_type for node in model.graph}
