"""Integers that graphs compute from constants and known dimensions."""

from __future__ import annotations

import numpy as np
import pytest

import dask_ferro.tensor as ft
from dask_ferro.graph.autodiff.rule import known_value
from dask_ferro.graph.model.load import load
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.lower.tensor import compute
from tests.each import every
from tests.graphs import written


def value_of(body, **constants):
    """The known value of `y` in a graph of x, whose first two dimensions are not known."""
    text = f"(float[N,M,6,8] x, int64[1] late) => (int64[K] y) {{ {body} }}"
    return known_value(from_model(load(written(text, constants)).model).outputs["y"])


ONE, TWO = np.array([1]), np.array([2])
NUMBERS = {
    "zero": [0],
    "one": [1],
    "two": [2],
    "three": [3],
    "four": [4],
    "seven": [7],
    "many": [100_000_000],
}
ROWS = "s = Shape (x) n = Gather (s, zero)"
DOUBLED = "c0 = Concat <axis = 0> (two, two) " + " ".join(
    f"c{i} = Concat <axis = 0> (c{i - 1}, c{i - 1})" for i in range(1, 20)
)


@every(
    ("body", "wanted"),
    [
        pytest.param("s = Shape (x) n = Gather (s, three) h = Div (n, two) y = Add (h, one)", [5], id="a dimension"),
        pytest.param("y = Shape <start = 2> (x)", [6, 8], id="a part of a shape"),
        pytest.param("y = Shape <start = -3, end = -1> (x)", None, id="a part with an unknown dimension"),
        pytest.param(f"{ROWS} y = Sub (n, n)", [0], id="an unknown one that cancels out"),
        pytest.param(f"{ROWS} y = Add (n, one)", None, id="an unknown one"),
        pytest.param(f"{ROWS} m = Gather (s, one) y = Sub (n, m)", None, id="the difference of two unknown ones"),
        pytest.param(f"{ROWS} m = Gather (s, one) y = Div (n, m)", None, id="their ratio"),
        pytest.param(f"{ROWS} h = Mul (n, two) y = Mod (h, two)", [0], id="the parity of its double"),
        pytest.param(f"{ROWS} y = Mod (n, two)", None, id="its parity"),
        pytest.param(f"{ROWS} y = Div (n, seven)", None, id="a quotient"),
        pytest.param("y = Add (late, one)", None, id="an argument"),
        pytest.param("z = ConstantOfShape <value = int64[1] {0}> (four) y = Concat <axis = 0> (z, one)",
            [0, 0, 0, 0, 1], id="a padding"),
        pytest.param("y = ConstantOfShape <value = int64[1] {0}> (many)", None, id="too many numbers"),
        pytest.param("y = Tile (two, many)", None, id="a size that only a value tells"),
        pytest.param(f"{DOUBLED} y = Add (c19, one)", None, id="a length that doubles twenty times"),
    ],
)  # fmt: skip
def test_a_value_is_known_or_not(body, wanted):
    found = value_of(body, **{name: np.array(number) for name, number in NUMBERS.items()})
    assert (found if wanted is None else found.tolist()) == wanted


def test_a_slice_that_an_exporter_computes_has_a_gradient():
    text = """(float[N,8] x) => (float[N,4] y) {
        s = Shape (x) g = Gather (s, one) h = Div (g, two) y = Slice (x, zero, h, one)
    }"""
    model = from_model(load(written(text, {"zero": np.array([0]), "one": ONE, "two": TWO})).model)
    x = np.ones((2, 8), np.float32)
    got = compute(ft.grad(model.outputs["y"].sum(), model.inputs["x"]), {"x": x}, scheduler="sync")
    assert got.tolist() == [[1] * 4 + [0] * 4] * 2


def test_a_node_that_the_converter_adapts_keeps_its_name():
    text = '(float[1,1,4,4] x) => (float[1,1,K,8] y) { y = Resize <mode = "linear"> (x, , , sizes) }'
    proto = written(text, {"sizes": np.array([1, 1, 8, 8])}, opset=13)
    proto.graph.node[0].name = "up_1"
    (node,) = [
        step for step in [from_model(load(proto).model).outputs["y"].origin] if step.op_type == "Resize"
    ]
    assert node.name == "up_1"
