"""Special values give one result wherever a model is cut: small pieces run on other engines than whole models do."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import dask_ferro as ff
from tests.graphs import model

NAN, INF = float("nan"), float("inf")
ROWS = np.array(
    [
        [1.0, NAN, -2.0, 4.0, 0.5, -0.0],
        [NAN, 1.0, 2.0, 3.0, 4.0, 5.0],
        [5.0, 4.0, 3.0, 2.0, 1.0, NAN],
        [INF, -INF, 0.0, -0.0, 1.0, -1.0],
        [-INF, -INF, -INF, -INF, -INF, -INF],
        [NAN, NAN, NAN, NAN, NAN, NAN],
        [3e38, -3e38, 1e-45, -1e-45, 1.0, 2.0],
    ],
    np.float32,
)
GRANULARITIES = ["op", "auto", "model", 1e-6]

# By name: the operator of the last node, its attributes, and what numpy makes of the rows.
OPS = {
    "ArgMax": ({"axis": 1, "keepdims": 0}, lambda x: np.argmax(x, axis=1)),
    "ArgMin": ({"axis": 1, "keepdims": 0}, lambda x: np.argmin(x, axis=1)),
    "ReduceMin": ({"keepdims": 0}, lambda x: np.min(x, axis=1)),
    "ReduceMax": ({"keepdims": 0}, lambda x: np.max(x, axis=1)),
    "ReduceL1": ({"keepdims": 0}, None),
    "ReduceSumSquare": ({"keepdims": 0}, None),
    "ReduceLogSumExp": ({"keepdims": 0}, None),
    "Softmax": ({"axis": 1}, None),
    "LogSoftmax": ({"axis": 1}, None),
    "Hardmax": ({"axis": 1}, None),
    "Sign": ({}, np.sign),
    "Sqrt": ({}, np.sqrt),
    "Reciprocal": ({}, lambda x: 1 / x),
    "Round": ({}, np.round),
    "Relu": ({}, lambda x: np.where(np.isnan(x), x, np.maximum(x, 0))),
    "LeakyRelu": ({}, lambda x: np.where(x < 0, x * np.float32(0.01), x)),
    "Sigmoid": ({}, None),
    "Tanh": ({}, np.tanh),
    "Erf": ({}, None),
    "IsNaN": ({}, np.isnan),
    "Abs": ({}, np.abs),
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
    dtype = {"ArgMax": TensorProto.INT64, "ArgMin": TensorProto.INT64, "IsNaN": TensorProto.BOOL}.get(
        op, TensorProto.FLOAT
    )
    shape = ["N"] if attributes.get("keepdims") == 0 else ["N", 6]
    proto = model(nodes, {"x": ["N", 6]}, {"y": shape}, weights)
    proto.graph.output[0].type.tensor_type.elem_type = dtype
    return proto


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("batch", [None, 2])
def test_a_special_value_gives_one_result_wherever_a_model_is_cut(op, batch):
    results = {
        granularity: ff.from_onnx(ending_in(op), granularity=granularity)(ROWS, batch=batch).compute(
            scheduler="sync"
        )
        for granularity in GRANULARITIES
    }
    wanted = results["model"]
    for granularity, got in results.items():
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), granularity
        np.testing.assert_allclose(
            got, wanted, rtol=1e-6, atol=1e-40, equal_nan=True, err_msg=f"granularity {granularity}"
        )
    if (by_numpy := OPS[op][1]) is not None:
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(wanted, by_numpy(ROWS + ROWS), rtol=1e-6, atol=1e-40, equal_nan=True)
