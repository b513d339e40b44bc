"""Labels of a function body are those of its nodes together: which dimensions of it can be split at all."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import pytest
from onnx import helper, parser

from dask_ferro.graph.ir.inference import ValueType
from dask_ferro.graph.ops.function_bodies import Body, inferred, labels_in
from dask_ferro.graph.ops.lookup import rule
from tests.each import every

OPSET = 24


def labels(nodes: str, *shape: int) -> Mapping[str, tuple[str | None, ...]]:
    """Return the labels of a body that reads `x` and gives `y`."""
    graph = parser.parse_graph(f"body () => (y) {{ {nodes} }}")

    def body(types: Mapping[str, ValueType]) -> Body:
        del graph.input[:]
        graph.input.append(helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, types["x"].shape))
        return inferred(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)]), OPSET)

    return labels_in(body({"x": ValueType("tensor", None, shape)}), rule, body)


@every(
    ("nodes", "wanted"),
    [
        pytest.param("a = Tanh (x) y = Mul (x, a)", ("0", "1"), id="element by element"),
        pytest.param("m = ReduceMax <keepdims = 1> (x, axis) y = Sub (x, m)", ("0", None), id="a row's maximum"),
        pytest.param("t = Transpose (x) y = Tanh (t)", ("0", "1"), id="a transpose"),
        pytest.param("t = Transpose (x) y = MatMul (x, t)", (None, None), id="each row with each"),
        pytest.param("t = Transpose (x) y = Add (x, t)", (None, None), id="a dimension that is two of one value"),
        pytest.param("s = Size (x) f = Cast <to = 1> (s) y = Div (x, f)", (None, None), id="divided by a size"),
        pytest.param("s = Shape (x) y = Cast <to = 1> (s)", (None, None), id="the size itself"),
        pytest.param("s = Shape (x) r = Reshape (x, s) y = Tanh (r)", ("0", "1"), id="a shape that was read"),
        pytest.param("y = Reshape (x, spelled)", (None, None), id="a shape that is spelled out"),
        pytest.param("y = Reshape (x, copied)", ("0", None), id="a shape of which one size is copied"),
        pytest.param("y = NonZero (x)", (None, None), id="an operator without labels"),
    ],
)  # fmt: skip
def test_what_of_an_operand_may_be_split(nodes: str, wanted: tuple[str | None, ...]) -> None:
    constants = """
        axis = Constant <value_ints = [1]> ()
        spelled = Constant <value_ints = [8, 8]> ()
        copied = Constant <value_ints = [0, 8]> ()"""
    assert labels(f"{constants} {nodes}", 8, 8)["x"] == wanted
