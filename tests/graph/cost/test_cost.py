"""Costs: FLOPs counted by hand, bytes by definition, and both for every operator that ONNX has."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from dask_ferro import testing
from dask_ferro.graph.bundling.partition import Dag
from dask_ferro.graph.bundling.plan import choose, dag
from dask_ferro.graph.cost.roofline import (
    CPU,
    Cost,
    DeviceProfile,
    model_cost,
    node_cost,
    seconds,
    value_bytes,
)
from dask_ferro.graph.ir.inference import ValueType, infer
from dask_ferro.graph.ir.nodes import uses
from dask_ferro.graph.model.load import load
from dask_ferro.graph.ops import families
from dask_ferro.graph.ops.facts import EXP, SOFTMAX
from dask_ferro.graph.ops.table import TABLE, facts_of
from tests.each import each, every
from tests.graphs import written
from tests.programs import ran

FLOAT = ir.DataType.FLOAT
BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "device_profile.py"


def tensor(*shape: int | str | None, dtype: ir.DataType = FLOAT) -> ValueType:
    return ValueType("tensor", dtype, shape)


def one(
    op: str, inputs: list[Any], outputs: list[Any], **attributes: Any
) -> tuple[ir.Node, dict[str, ValueType]]:
    """A node by the shapes of its operands (None: an input that is left out), and its types."""
    names = ["" if shape is None else f"i{k}" for k, shape in enumerate(inputs)]
    made = [f"o{k}" for k in range(len(outputs))]
    domain = attributes.pop("domain", "")
    node = ir.from_proto(helper.make_node(op, names, made, domain=domain, **attributes))
    assert isinstance(node, ir.Node)
    shapes = dict(zip([*names, *made], [*inputs, *outputs], strict=True))
    return node, {name: tensor(*shape) for name, shape in shapes.items() if name}


def loaded(text: str, opset: int = 18) -> ir.Model:
    return load(written(text, opset=opset)).model


# --- FLOPs --------------------------------------------------------------------------------------------------


@every(
    ("op", "inputs", "outputs", "attributes", "count"),
    [
        pytest.param("MatMul", [(3, 4), (4, 5)], [(3, 5)], {}, 2 * 3 * 4 * 5, id="a product"),
        pytest.param("MatMul", [(7, 1, 3, 4), (2, 4, 5)], [(7, 2, 3, 5)], {}, 14 * 2 * 60,
            id="products that broadcast"),
        pytest.param("MatMul", [(4,), (4,)], [()], {}, 2 * 4, id="a dot product"),
        pytest.param("QLinearMatMul", [(3, 4), (), (), (4, 5), (), (), (), ()], [(3, 5)], {}, 120, id="in int8"),
        pytest.param("Gemm", [(3, 4), (4, 5)], [(3, 5)], {}, 120, id="gemm without a bias"),
        pytest.param("Gemm", [(3, 4), (4, 5), (5,)], [(3, 5)], {}, 135, id="gemm with a bias"),
        pytest.param("Gemm", [(4, 3), (5, 4)], [(3, 5)], {"transA": 1, "transB": 1}, 120, id="gemm, transposed"),
        pytest.param("Conv", [(2, 8, 9, 9), (16, 8, 3, 3)], [(2, 16, 7, 7)], {}, 2 * 2 * 16 * 49 * 72, id="conv"),
        pytest.param("Conv", [(1, 8, 9), (8, 1, 3), (8,)], [(1, 8, 7)], {"group": 8}, 56 * 7,
            id="depthwise, with a bias"),
        pytest.param("QLinearConv", [(1, 8, 9), (), (), (4, 8, 3), (), (), (), (), (4,)], [(1, 4, 7)], {}, 28 * 49,
            id="conv in int8"),
        pytest.param("ConvTranspose", [(1, 8, 5, 5), (8, 4, 2, 2)], [(1, 4, 10, 10)], {}, 2 * 200 * 16,
            id="conv, transposed"),
        pytest.param("CausalConvWithState", [(2, 6, 5), (6, 1, 4), (6,)], [(2, 6, 5), (2, 6, 3)], {}, 60 * 9,
            id="causal conv"),
        pytest.param("Einsum", [(3, 4), (4, 5)], [(3, 5)], {"equation": "ij,jk->ik"}, 120, id="einsum, a product"),
        pytest.param("Einsum", [(3, 4), (4, 5)], [(3, 5)], {"equation": "ij,jk"}, 120, id="einsum, implicit"),
        pytest.param("Einsum", [(3,), (4,)], [(3, 4)], {"equation": "i,j->ij"}, 12, id="einsum, outer"),
        pytest.param("Einsum", [(4, 4)], [()], {"equation": "ii->"}, 4, id="einsum, a trace"),
        pytest.param("Einsum", [(7, 1, 3, 4), (2, 4, 5)], [(7, 2, 3, 5)], {"equation": "...ij,...jk->...ik"},
            14 * 120, id="einsum, an ellipsis that broadcasts"),
        pytest.param("Attention", [(2, 8, 5, 16), (2, 8, 7, 16), (2, 8, 7, 32)], [(2, 8, 5, 32)], {},
            2 * 8 * 5 * 7 * (2 * 16 + 2 * 32 + 1 + SOFTMAX), id="attention"),
        pytest.param("Attention", [(2, 5, 128), (2, 7, 32), (2, 7, 64)], [(2, 5, 256)],
            {"q_num_heads": 8, "kv_num_heads": 2}, 2 * 8 * 5 * 7 * (2 * 16 + 2 * 32 + 1 + SOFTMAX),
            id="attention, packed heads in groups"),
        pytest.param("Attention", [(1, 2, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8), None, (1, 2, 9, 8), (1, 2, 9, 8)],
            [(1, 2, 1, 8), (1, 2, 10, 8), (1, 2, 10, 8)], {}, 2 * 10 * (4 * 8 + 1 + SOFTMAX),
            id="attention over a past"),
        pytest.param("LSTM", [(5, 2, 3), (1, 16, 3), (1, 16, 4), (1, 32)], [(5, 1, 2, 4)], {"hidden_size": 4},
            10 * 4 * (4 * (2 * 3 + 2 * 4 + 2) + 5 * EXP + 4), id="lstm"),
        pytest.param("GRU", [(5, 2, 3), (2, 12, 3), (2, 12, 4)], [(5, 2, 2, 4)], {"hidden_size": 4},
            10 * 2 * 4 * (3 * (2 * 3 + 2 * 4) + 3 * EXP + 5), id="gru, both ways"),
        pytest.param("RNN", [(5, 2, 3), (1, 4, 3), (1, 4, 4)], [(5, 1, 2, 4)], {}, 40 * (14 + EXP), id="rnn"),
        pytest.param("MaxPool", [(1, 2, 9, 9)], [(1, 2, 3, 3)], {"kernel_shape": [3, 3]}, 18 * 9, id="pooling"),
        pytest.param("ReduceSum", [(3, 4, 5)], [(3,)], {}, 60, id="a sum over axes"),
        pytest.param("Add", [(3, 1), (1, 5)], [(3, 5)], {}, 15, id="a sum that broadcasts"),
        pytest.param("Sum", [(3,), (3,), (3,)], [(3,)], {}, 6, id="a sum of three"),
        pytest.param("Mean", [(3,), (3,), (3,)], [(3,)], {}, 9, id="a mean of three"),
        pytest.param("Softmax", [(3, 4)], [(3, 4)], {}, 12 * SOFTMAX, id="softmax"),
        pytest.param("Reshape", [(3, 4), (1,)], [(12,)], {}, 0, id="a reshape"),
        pytest.param("Resize", [(1, 1, 4, 4)], [(1, 1, 8, 8)], {"mode": "linear"}, 2 * 64 * 4, id="bilinear"),
        pytest.param("Resize", [(1, 1, 4, 4)], [(1, 1, 8, 8)], {}, 0, id="nearest"),
        pytest.param("LinearClassifier", [(6, 4)], [(6,), (6, 3)],
            {"domain": "ai.onnx.ml", "coefficients": [0.5] * 12}, 2 * 6 * 12, id="a linear classifier"),
        pytest.param("Mystery", [(3, 4)], [(3, 5)], {"domain": "com.example"}, 15, id="an operator of others"),
    ],
)  # fmt: skip
def test_flops(op: str, inputs: list[Any], outputs: list[Any], attributes: Any, count: float) -> None:
    node, types = one(op, inputs, outputs, **attributes)
    assert node_cost(node, types).flops == pytest.approx(count)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_a_batched_product_costs_the_same_under_any_name(b: int, m: int, k: int, n: int) -> None:
    shapes: tuple[list[Any], list[Any]] = ([(b, m, k), (b, k, n)], [(b, m, n)])
    product, einsum = one("MatMul", *shapes), one("Einsum", *shapes, equation="bij,bjk->bik")
    assert node_cost(*product) == node_cost(*einsum)
    image: tuple[list[Any], list[Any]] = ([(b, k, m), (n, k, 1)], [(b, n, m)])
    assert node_cost(*one("Conv", *image)).flops == node_cost(*product).flops


SCHEMAS = {(s.domain, s.name): s for s in onnx.defs.get_all_schemas()}
FAMILIES = [module.TABLE for module in vars(families).values() if hasattr(module, "TABLE")]


# FLOPs of the standard's function body for each element.
BY_BODY = {
    "HardSigmoid": 4,
    "HardSwish": 5,
    "LeakyRelu": 2,
    "Mish": 3 * EXP + 2,
    "PRelu": 2,
    "Softplus": 2 * EXP + 1,
    "Softsign": 3,
    "SwiGLU": EXP + 4,
    "ThresholdedRelu": 1,
}


def test_every_operator_is_in_one_family() -> None:
    known = [name for table in FAMILIES for name in table]
    assert len(known) == len(set(known))
    assert set(known) == set(TABLE)
    assert set(TABLE) == {name for _, name in SCHEMAS} | {"Sleep"}


@every("op", BY_BODY)
def test_an_activation_costs_what_its_body_does(op: str) -> None:
    inputs = ["a", "b"] if op in ("PRelu", "SwiGLU") else ["a"]
    node = ir.Node("", op, [ir.Value(name=name) for name in inputs], outputs=[ir.Value(name="y")])
    for shape in ((4, 8), (), None):
        types = dict.fromkeys([*inputs, "y"], ValueType("tensor", FLOAT, shape))
        assert node_cost(node, types).flops == BY_BODY[op] * math.prod(shape or ()), shape


SHAPES: list[tuple[int, ...] | None] = [(2, 3, 4, 4), (2, 8, 8), (5, 4), (6,), (), None]


def test_every_operator_has_a_finite_cost() -> None:
    each(SCHEMAS, _has_a_finite_cost, lambda key: ".".join(filter(None, key)))


def _has_a_finite_cost(key: tuple[str, str]) -> None:
    domain, name = key
    inputs = [f"i{k}" for k in range(len(SCHEMAS[key].inputs) + 1)]
    outputs = [f"o{k}" for k in range(len(SCHEMAS[key].outputs))]
    operands = [[ir.Value(name=n) for n in names] for names in (inputs, outputs)]
    node = ir.Node(domain, name, operands[0], outputs=operands[1])
    for shape in SHAPES:
        types = dict.fromkeys([*inputs, *outputs], ValueType("tensor", FLOAT, shape))
        cost = node_cost(node, types)
        assert all(math.isfinite(part) and part >= 0 for part in cost)
        assert math.isfinite(seconds(node, cost, CPU))
        assert shape is not None or cost[1:] == (0, 0)
        by_attributes = {"Einsum", "Resize", "Upsample", "Scatter", "ScatterElements", "ScatterND"}
        if shape == SHAPES[0] and domain != "ai.onnx.ml":
            assert (cost.flops > 0) == (facts_of(node).flops != 0) or name in by_attributes


# --- bytes --------------------------------------------------------------------------------------------------


@every(
    ("value", "size"),
    [
        pytest.param(tensor(3, 4), 48, id="float32"),
        pytest.param(tensor(dtype=ir.DataType.DOUBLE), 8, id="a scalar"),
        pytest.param(tensor(3, 0), 0, id="no elements"),
        pytest.param(tensor("N", 4, None), 16, id="what is not known counts as one"),
        pytest.param(tensor(3, 3, dtype=ir.DataType.INT4), 5, id="nine nibbles are five bytes"),
        pytest.param(tensor(5, dtype=ir.DataType.INT2), 2, id="five quarters are two bytes"),
        pytest.param(tensor(3, dtype=ir.DataType.FLOAT4E2M1), 2, id="float4"),
        pytest.param(tensor(3, dtype=ir.DataType.BOOL), 3, id="bool"),
        pytest.param(tensor(2, dtype=ir.DataType.COMPLEX128), 32, id="complex"),
        pytest.param(tensor(2, dtype=ir.DataType.STRING), 32, id="strings are a pointer and a length"),
        pytest.param(ValueType("tensor", FLOAT, None), 0, id="unknown rank"),
        pytest.param(ValueType("tensor", None, (3,)), 0, id="unknown dtype"),
        pytest.param(ValueType("sequence", FLOAT, None), 0, id="a sequence"),
        pytest.param(ValueType("unknown", None, None), 0, id="nothing known"),
    ],
)
def test_value_bytes(value: ValueType, size: int) -> None:
    assert value_bytes(value) == size


def test_every_dtype_has_a_size() -> None:
    sizes = {d: value_bytes(tensor(16, dtype=d)) for d in ir.DataType if d != ir.DataType.UNDEFINED}
    assert {dtype: size for dtype, size in sizes.items() if not 0 < size <= 16 * 16} == {}


WEIGHTED = """(float[N, 4] x, int64[2] i) => (float[N, 3] y, float[2, 3] g)
<float[4, 3] w = {1,2,3, 4,5,6, 7,8,9, 1,2,3}> {
    y = MatMul(x, w)
    g = Gather(w, i) }"""


def test_weights_are_read() -> None:
    model = loaded(WEIGHTED)
    product, gather = model_cost(model, infer(model, dims={"N": 10})).nodes
    assert product == Cost(240, 160 + 48, 120)
    assert gather == Cost(0, 24 + 16, 24), "a gather reads the rows that it picks"


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "read", "written"),
    [
        pytest.param("Reshape", [(3, 4), (1,)], [(12,)], 0, 0, id="a reshape is another name"),
        pytest.param("Shape", [(3, 4)], [(2,)], 0, 8, id="a shape is read off the type"),
        pytest.param("Slice", [(99, 4), (1,), (1,)], [(2, 4)], 40, 32, id="a slice reads what it cuts out"),
        pytest.param("Concat", [(3, 4), (1, 4)], [(4, 4)], 64, 64, id="a concatenation reads all"),
        pytest.param("ScatterND", [(9, 4), (1, 1), (1, 4)], [(9, 4)], 164, 144, id="a scatter copies all"),
    ],
)
def test_bytes(op: str, inputs: list[Any], outputs: list[Any], read: int, written: int) -> None:
    node, types = one(op, inputs, outputs)
    assert node_cost(node, types)[1:3] == (read, written)


# --- as functions of batch ----------------------------------------------------------------------------------


def mlp() -> ir.Model:
    text = "(float[N,8] x) => (float[N,3] y) { h = Gemm (x,w,b)  r = Relu (h)  l = MatMul (r,v)  y = Softmax (l) }"
    sizes = {"w": (8, 16), "b": (16,), "v": (16, 3)}
    return load(written(text, {k: np.full(s, 0.5, np.float32) for k, s in sizes.items()}, opset=18)).model


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(1, 10_000))
@settings(max_examples=25, deadline=None)
def test_costs_of_a_perceptron_are_affine_in_the_batch(a: int, b: int, c: int) -> None:
    model = mlp()
    at = {n: model_cost(model, infer(model, dims={"N": n})).nodes for n in (a, b, c)}
    for first, second, third in zip(at[a], at[b], at[c], strict=True):
        for x, y, z in zip(first, second, third, strict=True):
            assert (y - x) * (c - a) == (z - x) * (b - a)


# --- control flow -------------------------------------------------------------------------------------------

BRANCHES = """(bool c, float[N, 4] x, float[4, 8] w) => (float[N, 8] y) {
    y = If(c) <
        then_branch = cheap () => (float[N, 8] t) { t = Concat <axis = 1> (x, x) },
        else_branch = dear () => (float[N, 8] e) { p = MatMul(x, w)  e = Relu(p) }
    > }"""

LOOP = """(float[4] x, {limit}bool go) => (float[4] y) {start} {{
    y = Loop(m, go, x) <body = step (int64 i, bool k, float[4] s) => (bool k2, float[4] s2) {{
        k2 = Identity(k)
        s2 = Add(s, s) }}> }}"""

SCAN = """(float[4] x, float[N, 4] steps) => (float[4] y, float[N, 4] z) {
    y, z = Scan(x, steps) <
        num_scan_inputs = 1, body = step (float[4] s, float[4] e) => (float[4] t, float[4] u) {
            t = Add(s, e)
            u = Mul(t, e) }> }"""


def test_an_if_costs_its_dearest_branch_at_this_batch() -> None:
    model = loaded(BRANCHES)
    (cost,) = model_cost(model, infer(model, dims={"N": 10})).nodes
    assert cost.flops == 2 * 10 * 4 * 8 + 80
    assert cost.read_bytes == 1 + (160 + 128) + 320


@pytest.mark.parametrize(
    ("limit", "start", "trips"),
    [
        pytest.param("", "<int64 m = {7}>", 7, id="a constant trip count"),
        pytest.param("int64 m, ", "", 1, id="an unknown trip count"),
        pytest.param("", "<int64 m = {9223372036854775807}>", 1, id="until its condition ends it"),
    ],
)
def test_a_loop_costs_its_body_for_each_trip(limit: str, start: str, trips: int) -> None:
    model = loaded(LOOP.format(limit=limit, start=start))
    (cost,) = model_cost(model, infer(model)).nodes
    assert cost.flops == 4 * trips


def test_a_scan_costs_its_body_for_each_step() -> None:
    model = loaded(SCAN)
    (cost,) = model_cost(model, infer(model, dims={"N": 10})).nodes
    assert cost.flops == 10 * (4 + 4)


# --- seconds ------------------------------------------------------------------------------------------------

SLOW = DeviceProfile(
    "slow", flops_per_s=100.0, bytes_per_s=10.0, node_overhead_s=1.0, efficiency={"MatMul": 0.5}, other=0.1
)


@pytest.mark.parametrize(
    ("op", "cost", "expected"),
    [
        pytest.param("MatMul", Cost(200, 10, 10), 4 + 1, id="bound by arithmetic"),
        pytest.param("MatMul", Cost(10, 30, 20), 5 + 1, id="bound by memory"),
        pytest.param("Add", Cost(20, 1, 1), 2 + 1, id="an operator that is not named"),
        pytest.param("Reshape", Cost(0, 0, 0), 1, id="nothing but the start"),
    ],
)
def test_seconds_follow_the_roofline(op: str, cost: Cost, expected: float) -> None:
    assert seconds(ir.Node("", op, []), cost, SLOW) == pytest.approx(expected)


def test_a_sleep_costs_what_it_says() -> None:
    model = load(testing.build("imbalanced")).model
    each = zip(model.graph, model_cost(model, infer(model)).nodes, strict=True)
    slept = [seconds(node, cost) for node, cost in each if node.op_type == "Sleep"]
    assert sorted(slept)[-4:] == pytest.approx([0.2] * 4)
    assert sorted(slept)[:200] == pytest.approx([0.001] * 200)


def test_a_loop_has_the_efficiency_of_its_body_and_starts_each_node_each_trip() -> None:
    body = """(float[8, 8] x, float[8, 8] w, bool go) => (float[8, 8] y) <int64 m = {5}> {
        y = Loop(m, go, x) <body = step (int64 i, bool k, float[8, 8] s) => (bool k2, float[8, 8] s2) {
            k2 = Identity(k)
            s2 = MatMul(s, w) }> }"""
    model = loaded(body)
    (cost,) = model_cost(model, infer(model)).nodes
    (loop,) = model.graph
    fast = DeviceProfile("fast", 100.0, 1e12, 1.0, {"MatMul": 0.5}, 0.1)
    assert seconds(loop, cost, fast) == pytest.approx(5 * 1024 / 50 + (1 + 5 * 2), rel=1e-6)


def test_a_depthwise_convolution_has_an_efficiency_of_its_own() -> None:
    weight = ir.Value(name="w", shape=ir.Shape((8, 1, 3)), type=ir.TensorType(FLOAT))
    node = ir.Node("", "Conv", [ir.Value(name="x"), weight], [ir.AttrInt64("group", 8)])
    profile = DeviceProfile("p", 1.0, 1.0, 0.0, {"Conv": 1.0, "DepthwiseConv": 0.5})
    assert seconds(node, Cost(3, 0, 0), profile) == 6


# --- the graph of a model -----------------------------------------------------------------------------------

DIAMOND = """(float[N, 4] x) => (float[N, 4] y) <float[4] w = {1, 2, 3, 4}> {
    a = Mul(x, w)
    b = Mul(a, w)
    c = Mul(a, a)
    y = Add(b, c) }"""

CAPTURE = """(bool c, float[4] x) => (float[4] y) {
    a = Neg(x)
    y = If(c) <
        then_branch = t () => (float[4] u) { u = Abs(a) },
        else_branch = e () => (float[4] v) { v = Add(a, x) }> }"""

SEQUENCE = """(float[4] x) => (float[4] y) {
    a = Neg(x)
    s = SequenceConstruct(a, x)
    i = Constant<value: tensor = int64 {0}>()
    b = SequenceAt(s, i)
    y = Neg(b) }"""


def dag_of(model: ir.Model, types: Mapping[str, ValueType]) -> Dag:
    return dag(model, types, model_cost(model, types).seconds)


def test_edges_are_one_for_each_value_and_consumer() -> None:
    model = loaded(DIAMOND)
    graph = dag_of(model, infer(model, dims={"N": 2}))
    assert graph.edges == [(0, 1, 32.0), (0, 2, 32.0), (1, 3, 32.0), (2, 3, 32.0)], "weights are no edges"
    assert len(set(graph.values)) == 3
    assert len(graph.seconds) == 4


def test_a_branch_reads_what_it_captures() -> None:
    model = loaded(CAPTURE)
    assert dag_of(model, infer(model)).edges == [(0, 1, 16.0)]
    assert {"c", "a", "x"} <= set(uses(list(model.graph)[1]))


def test_sequences_are_not_cut() -> None:
    model = loaded(SEQUENCE)
    graph = dag_of(model, infer(model))
    assert graph.glued == [(1, 2)]
    cut = [[list(model.graph)[i].op_type for i in b] for b in choose(graph, "op", workers=2).bundles()]
    assert cut == [["Neg"], ["SequenceConstruct", "SequenceAt"], ["Neg"]]


def test_the_flops_of_a_convolutional_net_are_those_of_its_paper() -> None:
    # ResNet-50: 4.1 G multiply-adds for a 224 x 224 image (He et al. 2015 say 3.8 without the projections)
    light = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"
    model = load(light).model
    assert sum(c.flops for c in model_cost(model, infer(model)).nodes) == pytest.approx(2 * 4.1e9, rel=0.05)


# --- the script that measures -------------------------------------------------------------------------------


def test_the_device_profile_is_measured_at_toy_size(tmp_path: Path) -> None:
    done = ran([sys.executable, BENCHMARK, "--toy", "--quiet", "--json", tmp_path / "profile.json"])
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "profile.json").read_text())
    assert record["flops_per_s"] > 0
    assert record["bytes_per_s"] > 0
    measured = set(record["operators"])
    assert {name for name in CPU.efficiency if name in measured} >= {"Conv", "Exp", "LSTM", "Softmax"}
    assert "efficiency" in done.stdout
