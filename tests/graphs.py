"""Small models for the tests, with their results in plain numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

FLOAT = TensorProto.FLOAT


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, Sequence[Any]],
    outputs: dict[str, Sequence[Any] | None],
    weights: dict[str, np.ndarray] | None = None,
    *,
    opset: int = 21,
    name: str = "graph",
    dtype: int = FLOAT,
) -> onnx.ModelProto:
    """Return a model whose inputs and outputs have one dtype."""
    graph = helper.make_graph(
        list(nodes),
        name,
        [helper.make_tensor_value_info(n, dtype, shape) for n, shape in inputs.items()],
        [helper.make_tensor_value_info(n, dtype, shape) for n, shape in outputs.items()],
        [numpy_helper.from_array(w, n) for n, w in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("ai.dask_ferro", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def written(
    text: str,
    weights: dict[str, Any] | None = None,
    *,
    opset: int = 21,
    name: str = "graph",
    domains: str = "",
) -> onnx.ModelProto:
    """Return the model of ONNX's text form, "(float[N,6] x) => (float[N,6] y) { y = Relu (x) }", with weights by name.

    `domains`: further ones with their versions, as '"ai.onnx.ml": 3'.
    """
    imports = ", ".join([f'"": {opset}', '"ai.dask_ferro": 1', *([domains] if domains else [])])
    made = parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {name} {text}")
    for key, value in (weights or {}).items():
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(value), key))
    return made


def close(got: Any, wanted: Any) -> None:
    """Assert that arrays are equal up to the last bits of float32."""
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def mlp(
    features: int = 6, hidden: int = 8, classes: int = 3, rows: Any = "N", seed: int = 0
) -> onnx.ModelProto:
    """Return a model x[rows, features] -> scores[rows, classes]."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.standard_normal((features, hidden), dtype=np.float32),
        "b1": rng.standard_normal(hidden, dtype=np.float32),
        "w2": rng.standard_normal((hidden, classes), dtype=np.float32),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["s"]),
        helper.make_node("Softmax", ["s"], ["scores"]),
    ]
    return model(nodes, {"x": [rows, features]}, {"scores": [rows, classes]}, weights, name="mlp")


def mlp_reference(
    x: np.ndarray, features: int = 6, hidden: int = 8, classes: int = 3, seed: int = 0
) -> np.ndarray:
    """Return the result of `mlp`, computed in plain numpy."""
    rng = np.random.default_rng(seed)
    w1 = rng.standard_normal((features, hidden), dtype=np.float32)
    b1 = rng.standard_normal(hidden, dtype=np.float32)
    w2 = rng.standard_normal((hidden, classes), dtype=np.float32)
    s = np.maximum(x @ w1 + b1, 0) @ w2
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def diamond(width: int = 3) -> onnx.ModelProto:
    """Return a model of one input and `width` branches of two nodes; outputs are their sum and each branch's end."""
    nodes = [helper.make_node("Relu", ["x"], ["root"])]
    for i in range(width):
        nodes.append(helper.make_node("Sin", ["root"], [f"a{i}"]))
        nodes.append(helper.make_node("Mul", [f"a{i}", "root"], [f"b{i}"]))
    nodes.append(helper.make_node("Sum", [f"b{i}" for i in range(width)], ["total"]))
    outputs: dict[str, Any] = {"total": ["N", 4], **{f"b{i}": ["N", 4] for i in range(width)}}
    return model(nodes, {"x": ["N", 4]}, outputs, name="diamond")


def diamond_reference(x: np.ndarray, width: int = 3) -> dict[str, np.ndarray]:
    """Return the results of `diamond`, computed in plain numpy."""
    root = np.maximum(x, 0)
    branch = np.sin(root) * root
    return {"total": branch * width, **{f"b{i}": branch for i in range(width)}}
