"""What ONNX Runtime may rewrite, and what not: bits that depend on where a model is cut."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from dask_ferro.engines.onnxruntime.session import SessionSettings
from dask_ferro.engines.onnxruntime.session_model import session_of
from dask_ferro.graph.model.load import load
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.tensor import asarray, input
from tests.graphs import written

SCALE = 1 / np.sqrt(3)  # no float32


def scaled(dtype):
    """A product times a constant, as attention has it."""
    x, y = (input(name, (8, 8), dtype) for name in "xy")
    return load(ir.to_proto(build({"z": (x @ y) * asarray(np.array(SCALE, dtype))}).model)).model


def run(model, outputs, **options):
    nodes = [n for n in model.graph if n.op_type == "MatMul" or outputs == ["z"]]
    return session_of(model, nodes, ["x", "y"], outputs, 20, SessionSettings(**options))


@pytest.mark.parametrize(
    ("dtype", "exact"),
    [
        pytest.param(np.float64, False, id="doubles, always"),
        pytest.param(np.float32, True, id="floats, where asked for"),
    ],
)
def test_a_product_and_its_scale_have_the_bits_that_they_have_one_by_one(dtype, exact):
    model = scaled(dtype)
    [product] = [n for n in model.graph if n.op_type == "MatMul"]
    x, y = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(dtype)
    [alone] = run(model, [product.outputs[0].name])(x, y)
    [together] = run(model, ["z"], exact=exact)(x, y)
    np.testing.assert_array_equal(together, alone * dtype(SCALE))


def test_a_constant_of_texts_is_taken():
    text = '(string[N] x) => (bool[N] y) { c = Constant <value_strings = ["a"]> () y = Equal (x, c) }'
    made = load(written(text, opset=19)).model
    session = session_of(made, list(made.graph), ["x"], ["y"], 19, SessionSettings(prepack=False))
    np.testing.assert_array_equal(session(np.array(["a", "b"], object))[0], [True, False])
