"""Faster nodes in place of slow ones: which nodes they replace, and that results stay."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from dask_ferro.engines.onnxruntime.faster_nodes import IN_PLACE_OF, faster
from dask_ferro.engines.onnxruntime.session import DEFAULTS
from dask_ferro.engines.onnxruntime.session_model import session_of
from dask_ferro.graph.model.load import load
from tests.each import every
from tests.graphs import written

INF, NAN = np.inf, np.nan


class Row(NamedTuple):
    """A model in ONNX's text form, with its inputs, and whether its node is replaced."""

    text: str
    inputs: tuple[np.ndarray, ...]
    replaced: bool = True
    opset: int = 21
    weights: dict[str, Any] | None = None


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def mask(*shape: int) -> np.ndarray:
    return normal(*shape) > 0


def special(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Numbers with infinities, NaN, zeros of both signs and the largest ones, at places that recur."""
    found = normal(*shape, dtype=dtype).ravel()
    most = np.finfo(dtype).max
    for i, value in enumerate((INF, -INF, NAN, 0.0, -0.0, most, -most)):
        found[i::11] = value
    return found.reshape(shape)


def coarse(*shape: int) -> np.ndarray:
    """Numbers of which many are equal, -inf among them."""
    found = np.round(normal(*shape))
    found[found < -1] = -INF
    return found


def run(model: ir.Model, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    graph = model.graph
    names = [v.name for v in graph.inputs], [v.name for v in graph.outputs]
    opset = model.opset_imports[""]
    return session_of(model, list(graph), *names, opset, DEFAULTS)(*inputs)


def plain(row: Row) -> list[np.ndarray]:
    """Return what ONNX Runtime makes of a model as it is written."""
    proto = written(row.text, row.weights, opset=row.opset)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return list(session.run(None, dict(zip(names, row.inputs, strict=True))))


def is_replaced(model: ir.Model) -> bool:
    nodes = list(model.graph)
    protos = [ir.serde.serialize_node(node) for node in nodes]
    found = faster(nodes, protos, model.opset_imports[""])
    assert (len(found) > len(protos)) == any(IN_PLACE_OF in name for node in found for name in node.output)
    return len(found) > len(protos)


# ---- Where -------------------------------------------------------------------------------------------------

CHOICE = "(bool[64,64] c, float[64,64] x) => (float[64,64] y) { y = Where (c, x, zero) }"
OTHER = CHOICE.replace("x, zero", "zero, x")
ZERO = {"zero": np.float32(0)}
CHOICES = {
    "x or 0, special values": Row(CHOICE, (mask(64, 64), special(64, 64)), weights=ZERO),
    "0 or x, special values": Row(OTHER, (mask(64, 64), special(64, 64)), weights=ZERO),
    "one NaN that is not chosen": Row(CHOICE, (np.zeros((64, 64), bool), np.full((64, 64), NAN, np.float32)),
        weights=ZERO),
    "finite, with a sum that overflows": Row(CHOICE, (mask(64, 64), np.full((64, 64), 3e38, np.float32)),
        weights=ZERO),
    "doubles": Row(CHOICE.replace("float", "double"), (mask(64, 64), special(64, 64, dtype=np.float64)),
        weights={"zero": np.float64(0)}),
    "a mask of one row": Row(CHOICE.replace("bool[64,64]", "bool[64]"), (mask(64), normal(64, 64)), weights=ZERO),
    "one row of a mask": Row(CHOICE.replace("float[64,64] x", "float[64] x"), (mask(64, 64), normal(64)),
        weights=ZERO),
    "sizes that are not known": Row(CHOICE.replace("64", "N"), (mask(3, 3), normal(3, 3)), weights=ZERO),
    "no rows": Row(CHOICE.replace("64", "N"), (mask(0, 0), normal(0, 0)), weights=ZERO),
    "few elements": Row(CHOICE.replace("64", "8"), (mask(8, 8), normal(8, 8)), False, weights=ZERO),
    "another number": Row(CHOICE, (mask(64, 64), normal(64, 64)), False, weights={"zero": np.float32(1)}),
    "zeros, one an element": Row(CHOICE, (mask(64, 64), normal(64, 64)), False,
        weights={"zero": np.zeros((64, 64), np.float32)}),
    "integers": Row(CHOICE.replace("float", "int64"), (mask(64, 64), normal(64, 64).astype(np.int64)), False,
        weights={"zero": np.int64(0)}),
    "an earlier opset": Row(CHOICE, (mask(64, 64), normal(64, 64)), False, opset=12, weights=ZERO),
}  # fmt: skip


@every("name", CHOICES)
def test_a_choice_between_numbers_and_0(name):
    row = CHOICES[name]
    model = load(written(row.text, row.weights, opset=row.opset)).model
    assert is_replaced(model) == row.replaced
    [got], [wanted] = run(model, row.inputs), plain(row)
    np.testing.assert_array_equal(got, wanted, strict=True)
    # What is not chosen is 0, not -0.
    assert not np.signbit(got[(wanted == 0) & ~np.signbit(wanted)]).any()


# ---- MaxPool -----------------------------------------------------------------------------------------------


def pool(shape: str, made: str, attributes: str, dtype: str = "float") -> str:
    return f"({dtype}[{shape}] x) => ({dtype}[{made}] y, int64[{made}] i) {{ y, i = MaxPool <{attributes}> (x) }}"


TWO = "kernel_shape = [2, 2], strides = [2, 2]"
POOLS = {
    "squares": Row(pool("2,3,8,6", "2,3,4,3", TWO), (normal(2, 3, 8, 6),)),
    "ties, and windows of -inf": Row(pool("2,3,8,6", "2,3,4,3", TWO), (coarse(2, 3, 8, 6),)),
    "all equal": Row(pool("2,3,8,6", "2,3,4,3", TWO), (np.zeros((2, 3, 8, 6), np.float32),)),
    "a rest in no window": Row(pool("2,3,9,7", "2,3,4,3", TWO), (coarse(2, 3, 9, 7),)),
    "rectangles": Row(pool("2,2,6,9", "2,2,2,9", "kernel_shape = [3, 1], strides = [3, 1]"), (coarse(2, 2, 6, 9),)),
    "a batch that is not known": Row(pool("N,3,8,6", "N,3,4,3", TWO), (coarse(5, 3, 8, 6),)),
    "windows that overlap": Row(pool("1,1,5,5", "1,1,2,2", "kernel_shape = [3, 3], strides = [2, 2]"),
        (normal(1, 1, 5, 5),), False),
    "gaps between windows": Row(pool("1,1,5,5", "1,1,2,2", "kernel_shape = [2, 2], strides = [3, 3]"),
        (normal(1, 1, 5, 5),), False),
    "padding": Row(pool("1,1,4,4", "1,1,3,3", TWO + ", pads = [1, 1, 1, 1]"), (normal(1, 1, 4, 4),), False),
    "a last window over the end": Row(pool("1,1,5,5", "1,1,3,3", TWO + ", ceil_mode = 1"),
        (normal(1, 1, 5, 5),), False),
    "one dimension": Row(pool("1,1,6", "1,1,3", "kernel_shape = [2], strides = [2]"), (normal(1, 1, 6),), False),
    "doubles": Row(pool("1,1,4,4", "1,1,2,2", TWO, "double"), (normal(1, 1, 4, 4, dtype=np.float64),), False),
    "sizes that are not known": Row(pool("1,1,H,W", "1,1,h,w", TWO), (normal(1, 1, 4, 4),), False),
}  # fmt: skip


@every("name", POOLS)
def test_the_first_maximum_of_each_window(name):
    row = POOLS[name]
    model = load(written(row.text)).model
    assert is_replaced(model) == row.replaced
    for got, wanted in zip(run(model, row.inputs), plain(row), strict=True):
        np.testing.assert_array_equal(got, wanted, strict=True)


def test_an_index_of_a_window_with_nan_is_in_the_window():
    x = special(4, 2, 8, 6)
    row = Row(pool("N,2,8,6", "N,2,4,3", TWO), (x,))
    _, places = run(load(written(row.text)).model, row.inputs)
    plane, inside = np.divmod(places, 8 * 6)
    np.testing.assert_array_equal(plane, np.broadcast_to(np.arange(8).reshape(4, 2, 1, 1), places.shape))
    line, column = np.divmod(inside, 6)
    np.testing.assert_array_equal(line // 2, np.broadcast_to(np.arange(4)[:, None], places.shape))
    np.testing.assert_array_equal(column // 2, np.broadcast_to(np.arange(3), places.shape))


def test_maxima_alone_are_left_as_they_are():
    text = f"(float[1,1,4,4] x) => (float[1,1,2,2] y) {{ y = MaxPool <{TWO}> (x) }}"
    assert not is_replaced(load(written(text)).model)


# ---- Conv --------------------------------------------------------------------------------------------------


def conv(x: str, w: str, made: str, attributes: str = "", bias: str = "") -> str:
    more, given = (f", float[{bias}] b", ", b") if bias else ("", "")
    how = f"<{attributes}>" if attributes else ""
    return f"(float[{x}] x, float[{w}] w{more}) => (float[{made}] y) {{ y = Conv {how} (x, w{given}) }}"


CONVOLUTIONS = {
    "the gradient of a kernel": Row(conv("3,4,6,5", "2,4,6,5", "3,2,3,3", "pads = [1, 1, 1, 1]"),
        (normal(3, 4, 6, 5), normal(2, 4, 6, 5))),
    "a batch that is not known": Row(conv("3,N,6,5", "2,N,6,5", "3,2,3,3", "pads = [1, 1, 1, 1]"),
        (normal(3, 7, 6, 5), normal(2, 7, 6, 5))),
    "uneven padding and a bias": Row(conv("3,4,6,5", "2,4,6,4", "3,2,2,3", "pads = [0, 1, 1, 0]", "2"),
        (normal(3, 4, 6, 5), normal(2, 4, 6, 4), normal(2)), False),
    "steps and uneven padding": Row(conv("3,4,7,7", "2,4,5,5", "3,2,2,3", "pads = [0, 1, 1, 1], strides = [3, 2]"),
        (normal(3, 4, 7, 7), normal(2, 4, 5, 5))),
    "one dimension": Row(conv("3,4,9", "2,4,7", "3,2,5", "pads = [1, 1]"), (normal(3, 4, 9), normal(2, 4, 7))),
    "one image": Row(conv("1,4,6,5", "2,4,6,5", "1,2,3,3", "pads = [1, 1, 1, 1]"),
        (normal(1, 4, 6, 5), normal(2, 4, 6, 5))),
    "many places": Row(conv("1,4,17,17", "2,4,9,9", "1,2,9,9"), (normal(1, 4, 17, 17), normal(2, 4, 9, 9)), False),
    "holes": Row(conv("3,4,9,9", "2,4,4,4", "3,2,3,3", "dilations = [2, 2]"), (normal(3, 4, 9, 9), normal(2, 4, 4, 4))),
    "groups": Row(conv("3,4,6,5", "6,2,5,4", "3,6,2,2", "group = 2"), (normal(3, 4, 6, 5), normal(6, 2, 5, 4)), False),
    "a kernel smaller than the result": Row(conv("3,4,8,8", "2,4,3,3", "3,2,6,6"),
        (normal(3, 4, 8, 8), normal(2, 4, 3, 3)), False),
    "a kernel that is a weight": Row("(float[3,4,6,5] x) => (float[3,2,1,1] y) { y = Conv (x, w) }",
        (normal(3, 4, 6, 5),), False, weights={"w": normal(2, 4, 6, 5)}),
    "padding that is computed": Row(conv("3,4,6,5", "2,4,6,5", "3,2,2,2", 'auto_pad = "SAME_UPPER", strides = [3, 3]'),
        (normal(3, 4, 6, 5), normal(2, 4, 6, 5)), False),
}  # fmt: skip


@every("name", CONVOLUTIONS)
def test_a_convolution_by_a_large_kernel(name):
    row = CONVOLUTIONS[name]
    model = load(written(row.text, row.weights)).model
    assert is_replaced(model) == row.replaced
    [got], [wanted] = run(model, row.inputs), plain(row)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
