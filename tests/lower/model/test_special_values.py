"""Special values give one result wherever a model is cut: small pieces run on other engines than whole models do."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

import dask_ferro as ff
from tests.each import every
from tests.graphs import model

NAN, INF = float("nan"), float("inf")
ROWS = np.float32([
    [1.0, NAN, -2.0, 4.0, 0.5, -0.0], [NAN, 1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 4.0, 3.0, 2.0, 1.0, NAN],
    [INF, -INF, 0.0, -0.0, 1.0, -1.0], [-INF] * 6, [NAN] * 6, [3e38, -3e38, 1e-45, -1e-45, 1.0, 2.0],
])  # fmt: skip
GRANULARITIES = ["op", "auto", "model", 1e-6]

# By name: the operator of the last node, its attributes, and what numpy makes of the rows.
OPS = {
    "ArgMax": ({"axis": 1, "keepdims": 0}, lambda x: np.argmax(x, axis=1)),
    "ArgMin": ({"axis": 1, "keepdims": 0}, lambda x: np.argmin(x, axis=1)),
    "ReduceMin": ({"keepdims": 0}, lambda x: np.min(x, axis=1)),
    "ReduceMax": ({"keepdims": 0}, lambda x: np.max(x, axis=1)),
    **dict.fromkeys(["ReduceL1", "ReduceSumSquare", "ReduceLogSumExp"], ({"keepdims": 0}, None)),
    **dict.fromkeys(["Softmax", "LogSoftmax", "Hardmax"], ({"axis": 1}, None)),
    **dict.fromkeys(["Sigmoid", "Erf"], ({}, None)),
    "Sign": ({}, np.sign),
    "Sqrt": ({}, np.sqrt),
    "Round": ({}, np.round),
    "Tanh": ({}, np.tanh),
    "IsNaN": ({}, np.isnan),
    "Abs": ({}, np.abs),
    "Reciprocal": ({}, lambda x: 1 / x),
    "Relu": ({}, lambda x: np.where(np.isnan(x), x, np.maximum(x, 0))),
    "LeakyRelu": ({}, lambda x: np.where(x < 0, x * np.float32(0.01), x)),
}


def ending_in(op: str):
    """Return a model of an Identity, a doubling, and the operator; reductions are of the features."""
    attributes, _ = OPS[op]
    reduces = op.startswith("Reduce")
    inputs, weights = ["twice", *(["axes"] * reduces)], {"axes": np.array([1])} if reduces else {}
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Add", ["same", "same"], ["twice"]),
        helper.make_node(op, inputs, ["y"], **attributes),
    ]
    others = {"ArgMax": TensorProto.INT64, "ArgMin": TensorProto.INT64, "IsNaN": TensorProto.BOOL}
    shape = ["N"] if attributes.get("keepdims") == 0 else ["N", 6]
    proto = model(nodes, {"x": ["N", 6]}, {"y": shape}, weights)
    proto.graph.output[0].type.tensor_type.elem_type = others.get(op, TensorProto.FLOAT)
    return proto


@every("op", OPS)
@every("batch", [None, 2])
def test_a_special_value_gives_one_result_wherever_a_model_is_cut(op, batch):
    lazy = {g: ff.from_onnx(ending_in(op), granularity=g)(ROWS, batch_size=batch) for g in GRANULARITIES}
    results = {granularity: late.compute(scheduler="sync") for granularity, late in lazy.items()}
    wanted = results["model"]
    for granularity, got in results.items():
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), granularity
        np.testing.assert_allclose(
            got, wanted, rtol=1e-6, atol=1e-40, equal_nan=True, err_msg=f"{granularity}"
        )
    if (by_numpy := OPS[op][1]) is not None:
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(wanted, by_numpy(ROWS + ROWS), rtol=1e-6, atol=1e-40, equal_nan=True)
