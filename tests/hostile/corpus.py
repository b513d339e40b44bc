"""Hostile model files, by family: each name says what is wrong with the file, each value makes its bytes.

Everything is made anew from fixed seeds, so that the corpus is the same on every machine and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper, parser

FLOAT = TensorProto.FLOAT
HEAD = '<ir_version: 9, opset_import: ["": 17]> g '
# Numbers that a size, an axis or a count is not meant to be.
ODD = (-(1 << 63), -(1 << 31), -3, 0, 1 << 31, (1 << 63) - 1)


def value(name: str, shape: Any = ("N", 4), dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(*nodes: onnx.NodeProto, weights: Any = (), opset: int = 17, shape: Any = ("N", 4)) -> bytes:
    graph = helper.make_graph(list(nodes), "g", [value("x", shape)], [value("y", None)], list(weights))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return bytes(made.SerializeToString())


def text(source: str) -> bytes:
    return bytes(parser.parse_model(HEAD + source).SerializeToString())


def array(name: str, values: Any, dtype: Any = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def sound() -> bytes:
    """A small network with a weight, a constant and a shape that is computed."""
    return text(
        "(float[N, 4] x) => (float[N, K] y) <float[4, 3] w = {1,2,3,4,5,6,7,8,9,10,11,12}> { h = MatMul(x, w)"
        " r = Relu(h) s = Shape(r) z = Reshape(r, s) t = Transpose(z) u = Transpose(t) y = Softmax <axis = 1> (u) }"
    )


def corpus() -> dict[str, bytes]:
    """The bytes of each file by its name."""
    return dict(_all())


def _all() -> Iterator[tuple[str, bytes]]:
    families = _damaged, _attributes, _operands, _bombs, _equations, _shapes, _types, _control, _odd_opsets
    for family in families:
        for name, content in family():
            yield f"{family.__name__[1:]}: {name}", content


def _damaged() -> Iterator[tuple[str, bytes]]:
    """A sound file with bytes flipped, cut, doubled or put in, by seed."""
    whole = sound()
    for seed in range(100):
        rng = np.random.default_rng(seed)
        data = bytearray(whole)
        for _ in range(1 + seed % 3):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        yield f"flipped {seed}", bytes(data)
    for seed in range(20):
        at = int(np.random.default_rng(seed).integers(1, len(whole)))
        yield f"cut at {at}, {seed}", whole[:at]
        yield f"doubled from {at}, {seed}", whole[:at] + whole[at // 2 :]


NUMBERS: dict[str, tuple[str, ...]] = {
    "Concat": ("axis",), "Flatten": ("axis",), "Softmax": ("axis",),
    "ArgMax": ("axis", "keepdims", "select_last_index"), "Hardmax": ("axis",), "DepthToSpace": ("blocksize",),
    "SpaceToDepth": ("blocksize",), "LRN": ("size",), "EyeLike": ("k", "dtype"), "Shape": ("start", "end"),
    "Gelu": ("approximate",),
}  # fmt: skip
LISTS: dict[str, tuple[str, ...]] = {
    "Transpose": ("perm",),
    "MaxPool": ("kernel_shape", "strides", "dilations", "pads"),
    "AveragePool": ("kernel_shape", "strides", "pads"),
    "LpPool": ("kernel_shape", "strides"),
    "ReduceMean": ("axes",),
}


def _attributes() -> Iterator[tuple[str, bytes]]:
    """Numbers in attributes that are out of every range."""
    image = ("N", 4, 8, 8)
    for op, names in NUMBERS.items():
        for name in names:
            for odd in ODD:
                inputs = ["x", "x"] if op == "Concat" else ["x"]
                shape = image if op in ("DepthToSpace", "SpaceToDepth", "LRN") else ("N", 4)
                node = helper.make_node(op, inputs, ["y"], name="n", **{name: odd})
                if op == "LRN" or name != "size":
                    yield f"{op}.{name} = {odd}", model(node, shape=shape)
    for op, names in LISTS.items():
        for name in names:
            for odd in ODD:
                fixed = {"kernel_shape": [2, 2]} if "Pool" in op else {}
                numbers = [odd] * (4 if name == "pads" else 2)
                node = helper.make_node(op, ["x"], ["y"], name="n", **{**fixed, name: numbers})
                yield f"{op}.{name} = {odd}", model(node, shape=image if "Pool" in op else ("N", 4))


def _operands() -> Iterator[tuple[str, bytes]]:
    """Sizes, axes and indices in stored operands."""
    ops = "Reshape Expand Tile Squeeze Unsqueeze Gather ReduceSum Pad Slice TopK Split"
    for op in ops.split():
        for odd in ODD:
            size = {"Tile": 2, "Pad": 4, "TopK": 1}.get(op, 1)
            stored = [array("s", [odd] * size, np.int64), array("one", [1], np.int64)]
            inputs = {"Slice": ["x", "s", "one"]}.get(op, ["x", "s"])
            outputs = ["y", "other"] if op == "TopK" else ["y"]
            yield f"{op} of {odd}", model(helper.make_node(op, inputs, outputs, "n"), weights=stored)


def _bombs() -> Iterator[tuple[str, bytes]]:
    """A few bytes that ask inference, folding or a run for gigabytes."""
    big = 1 << 28
    for op, call in {
        "Tile": "Tile(o, s)",
        "Expand": "Expand(o, s)",
        "ConstantOfShape": "ConstantOfShape <value = int64[1] {1}> (s)",
        "Range": "Range(z, b, u)",
    }.items():
        constants = (
            f"s = Constant <value = int64[1] {{{big}}}> () o = Constant <value = int64[1] {{1}}> ()"
            f" z = Constant <value = int64 {{0}}> () b = Constant <value = int64 {{{big}}}> ()"
            " u = Constant <value = int64 {1}> ()"
        )
        for then in ("Add(c, x)", "Mul(c, x)", "Concat <axis = 0> (c, x)", "Sub(x, c)"):
            nodes = f"{constants} c = {call} y = {then}"
            yield f"{op}, {then}", text(f"(int64[N] x) => (int64[K] y) {{ {nodes} }}")
    for size in (1 << 24, 1 << 28, 1 << 40):
        yield f"Add of {size}", text(f"(float[{size}] x) => (float[K] y) {{ y = Add(x, x) }}")
    for times in (10, 30, 60):
        chain = " ".join(f"s{i + 1} = Concat <axis = 0> (s{i}, s{i})" for i in range(times))
        yield f"{times} Concats", text(f"(int64[1] s0) => (int64[K] y) {{ {chain} y = Identity(s{times}) }}")


def _equations() -> Iterator[tuple[str, bytes]]:
    equations = (
        "....a->a", "....a->>a,,", "a...a...->a", "->->", ",", "", "a->b", "aa->a", "ab->aab", "a,b->ab", "i.j->ij",
        "...", "...->...", "a b -> a b", "ab->", "Ab->bA", "1a->a", "a" * 60, "ab->\x00", "é->é", "-", ">", "..a->a",
    )  # fmt: skip
    for equation in equations:
        node = helper.make_node("Einsum", ["x"], ["y"], "n", equation=equation)
        yield f"Einsum {equation!r}", model(node)


def _shapes() -> Iterator[tuple[str, bytes]]:
    """Declared shapes that the graph contradicts."""
    for shape in ("[N]", "[4, N]", "[0]", "[N, 5]", "[1, 1, 1]", "[N, N]", ""):
        yield f"an output {shape}", text(f"(float[N, 4] x) => (float{shape} y) {{ y = Relu(x) }}")
    for left, right in (("[2]", "[3]"), ("[N, 4]", "[5]"), ("[0]", "[7]"), ("[4, 1]", "[1, 4]")):
        for sign, op in (("+", "Add"), ("@", "MatMul")):
            inputs = f"float{left} x, float{right} z"
            yield f"{left} {sign} {right}", text(f"({inputs}) => (float y) {{ y = {op}(x, z) }}")


def _types() -> Iterator[tuple[str, bytes]]:
    """Operators on dtypes that they do not take, and casts to dtypes that are none."""
    for op in ("Relu", "Sqrt", "Not", "Erf", "Round", "IsNaN", "Det", "Hardmax", "StringNormalizer"):
        for dtype in ("int64", "bool", "string", "float16", "complex64", "uint8"):
            yield f"{op} of {dtype}", text(f"({dtype}[N, 4] x) => ({dtype}[N, 4] y) {{ y = {op}(x) }}")
    for to in (-1, 0, 8, 14, 99, 1 << 31):
        yield f"Cast to {to}", model(helper.make_node("Cast", ["x"], ["y"], "n", to=to))


def _control() -> Iterator[tuple[str, bytes]]:
    """Loops and branches whose bodies do not fit, and one that never ends."""
    for count in (1 << 60, -1, 0):
        source = (
            f"(float[N] x) => (float[M] y) {{ m = Constant <value = int64 {{{count}}}> ()"
            " c = Constant <value = bool {1}> ()"
            " y = Loop(m, c, x) <body = b (int64 i, bool ci, float[N] v) => (bool co, float[N] vo)"
            " { co = Identity(ci) vo = Mul(v, v) }> }"
        )
        yield f"a Loop of {count}", text(source)
    for then in ("Relu(x)", "Shape(x)", "Concat <axis = 0> (x, x)"):
        source = (
            "(float[N] x) => (float[M] y) { c = Constant <value = bool {1}> () y = If(c) <then_branch = t () =>"
            f" (float[M] a) {{ a = {then} }}, else_branch = e () => (float[M] b) {{ b = Neg(x) }}> }}"
        )
        yield f"an If with {then}", text(source)


def _odd_opsets() -> Iterator[tuple[str, bytes]]:
    for opset in (-1, 0, 1, 5, 7, 10, 12, 22, defs.onnx_opset_version(), 1 << 40):
        yield f"opset {opset}", model(helper.make_node("Softmax", ["x"], ["y"], "n"), opset=opset)
    for seconds in (float("nan"), float("inf"), -1.0, 1e9):
        node = helper.make_node("Sleep", ["x"], ["y"], "n", domain="ai.dask_ferro", seconds=seconds)
        made = onnx.ModelProto.FromString(model(node))
        made.opset_import.add(domain="ai.dask_ferro", version=1)
        yield f"Sleep of {seconds}", bytes(made.SerializeToString())
