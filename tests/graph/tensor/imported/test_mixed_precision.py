"""Half precision in a loaded model: which operators compute in it, which in float32, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.graph.tensor.emit import build
from dask_ferro.lower.tensor import compute
from tests.each import every
from tests.graphs import written

F16, BF16 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(0)
W, ROW = RNG.standard_normal((4, 4)).astype("f4"), RNG.standard_normal(4).astype("f4")
IMAGE = RNG.standard_normal((1, 1, 3, 3)).astype("f4")
HALF = "half precision"

# What follows p = MatMul (x, w), which is of half precision; constants of the file; the dtype of y.
ROWS = {
    "a product": ("y = MatMul (p, v)", {"v": W}, HALF),
    "a product of a normalization": (
        "n = LayerNormalization (p, one, one) y = MatMul (n, v)",
        {"one": ROW, "v": W},
        HALF,
    ),
    "a Gemm": ("y = Gemm (p, v, b)", {"v": W, "b": ROW}, HALF),
    "what moves elements": ("y = Transpose (p)", {}, "float32"),
    "a sum of two": ("y = Add (p, p)", {}, "float32"),
    "a sum with a scalar": ("y = Add (p, c)", {"c": np.float32(0.5)}, "float32"),
    "a choice by a mask": ("z = Less (p, c) y = Where (z, p, c)", {"c": np.float32(0)}, "float32"),
    "an exponential": ("y = Exp (p)", {}, "float32"),
    "a softmax": ("y = Softmax (p)", {}, "float32"),
    "a mean": ("y = ReduceMean (p)", {}, "float32"),
    "a normalization": ("y = LayerNormalization (p, one, one)", {"one": ROW}, "float32"),
    "a normalization over the batch": (
        "y = BatchNormalization (p, one, one, one, v)",
        {"one": ROW, "v": abs(ROW)},
        "float32",
    ),
    "a Cast of the file": ("y = Cast <to = 1> (p)", {}, "float32"),
}


def model(then, constants=None, entry="float[N,4] x"):
    weights = {"w": W, **(constants or {})}
    return ff.load_trainable(written(f"({entry}) => (float[M,K] y) {{ p = MatMul (x, w) {then} }}", weights))


@every("row", ROWS)
@every("half", [F16, BF16], ids=str)
def test_each_operator_computes_in_the_dtype_of_its_kind(row, half):
    then, constants, dtype = ROWS[row]
    net, x = model(then, constants).until("y"), RNG.standard_normal((3, 4)).astype("f4")
    w = ft.asarray(W.astype(half), name="w")
    y = net(x, params={"w": w})
    assert y.dtype == (half if dtype == HALF else "float32")
    found, wanted = (compute(of, scheduler="sync").astype("f8") for of in (y, net(x)))
    near = 2e-3 if half == F16 else 2e-2
    np.testing.assert_allclose(found, wanted, rtol=near * 4, atol=near * 4)


def test_an_operator_that_onnx_has_not_in_bfloat16_computes_in_float32():
    text = "(float[N,1,3,3] x) => (float[N,1,1,1] y) { y = Conv (x, w) }"
    net = ff.load_trainable(written(text, {"w": IMAGE}))
    dtypes = [net(IMAGE, params={"w": IMAGE.astype(half)}).dtype for half in ("f4", F16, BF16)]
    assert dtypes == ["float32", "float16", "float32"]


def test_an_input_in_half_precision_is_enough():
    net = model("y = MatMul (p, v)", {"v": W})
    assert net(ft.input("x", ("N", 4), "float16")).dtype == F16
    assert net(ft.input("x", ("N", 4))).dtype == "float32"


def test_casts_are_in_the_region_of_their_operator():
    with ft.region("body"):
        y = model("y = Exp (p)")(np.ones((2, 4), "f4"), params={"w": W.astype(F16)})
    casts = [node for node in build(y).model.graph if node.op_type == "Cast"]
    assert {node.metadata_props["dask_ferro.region"] for node in casts} == {"body"}
    assert len(casts) == 2


@pytest.mark.parametrize(
    ("x", "w", "said"),
    [
        (F16, BF16, "got bfloat16 and float16, wanted one of them; cast to one dtype"),
        ("f4", "f8", r"'w': got float64\(4, 4\), wanted float32\(4, 4\)"),
        ("f8", "f4", r"input 'x' is float32\(N, 4\)"),
        ("f8", F16, r"input 'x' is float32\(N, 4\)"),
    ],
)
def test_other_dtypes_are_refused(x, w, said):
    with pytest.raises(ff.InputError, match=said):
        model("y = Relu (p)")(np.ones((2, 4), x), params={"w": W.astype(w)})


def test_a_file_keeps_its_dtypes(tmp_path):
    with pytest.raises(ff.InputError, match=r"save: .* 'w': got float16\(4, 4\), wanted float32"):
        model("y = Relu (p)").save(tmp_path / "net.onnx", params={"w": W.astype(F16)})
