"""Random graphs, bundled at random, equal the unbundled reference; bundles are convex; keys are deterministic."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dask
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, parser
from onnx.reference import ReferenceEvaluator

import dask_ferro as ff
from tests.graphs import model
from tests.waiting import ended

ROOT = Path(__file__).parents[3]

UNARY = ["Relu", "Sin", "Tanh", "Neg", "Abs", "Sigmoid", "Identity"]
BINARY = ["Add", "Sub", "Mul", "Max", "Min"]


@st.composite
def graphs(draw) -> onnx.ModelProto:
    """Models of up to 14 elementwise nodes on [N, 3], two inputs, a weight, an If, and several outputs."""
    values = ["x", "z", "w"]
    nodes = []
    for i in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["unary", "binary", "split", "if", "constant"]))
        pick = st.sampled_from(values)
        name = f"v{i}"
        if kind == "unary":
            nodes.append(helper.make_node(draw(st.sampled_from(UNARY)), [draw(pick)], [name]))
        elif kind == "binary":
            nodes.append(helper.make_node(draw(st.sampled_from(BINARY)), [draw(pick), draw(pick)], [name]))
        elif kind == "split":
            source = draw(pick)
            nodes.append(helper.make_node("TopK", [source, "two"], [f"top{i}", f"where{i}"], axis=-1))
            nodes.append(helper.make_node("ReduceSum", [f"top{i}", "last"], [f"sum{i}"], keepdims=1))
            nodes.append(helper.make_node("Sub", [source, f"sum{i}"], [name]))
        elif kind == "constant":  # depends on no input
            nodes.append(helper.make_node("ConstantOfShape", ["three"], [f"zeros{i}"]))
            nodes.append(helper.make_node("Add", [f"zeros{i}", draw(pick)], [name]))
        else:
            nodes += _conditional(i, draw(pick), draw(pick), name)
        values.append(name)
    made = [v for v in values if v.startswith("v")]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    weights = {"w": np.float32([[0.5, -1.0, 2.0]]), "two": np.int64([2]), "last": np.int64([-1])}
    weights |= {"three": np.int64([3]), "zero": np.float32(0.0)}
    return model(nodes, {"x": ["N", 3], "z": ["N", 3]}, dict.fromkeys(outputs, None), weights)


def _conditional(i: int, a: str, b: str, name: str) -> list[onnx.NodeProto]:
    """Both branches capture values from outside."""
    then = f"then_branch = then () => (t{i}) {{ t{i} = Add ({a}, {b}) }}"
    other = f"else_branch = other () => (e{i}) {{ e{i} = Sub ({b}, {a}) }}"
    condition = f"s{i} = ReduceSum <keepdims = 0> ({a}) c{i} = Greater (s{i}, zero)"
    return list(parser.parse_graph(f"g () => () {{ {condition} {name} = If (c{i}) <{then}, {other}> }}").node)


GRANULARITY = st.one_of(st.sampled_from(["auto", "op", "model"]), st.floats(1e-7, 1e-4))


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(graphs(), GRANULARITY, st.integers(0, 2**32 - 1))
def test_bundled_equals_reference_and_bundles_are_convex(proto, granularity, seed):
    rng = np.random.default_rng(seed)
    feeds = {name: rng.standard_normal((4, 3)).astype(np.float32) for name in ("x", "z")}
    taken = {v.name for v in proto.graph.input}
    model = ff.from_onnx(proto, granularity=granularity)
    given = {name: feeds[name] for name in model.inputs}
    (got,) = dask.compute(model(given), scheduler="sync")
    wanted = ReferenceEvaluator(proto).run(None, {n: v for n, v in feeds.items() if n in taken})
    names = [v.name for v in proto.graph.output]
    for name, value in zip(names, wanted, strict=True):
        np.testing.assert_allclose(got if len(names) == 1 else got[name], value, rtol=1e-5, atol=1e-5)
    for number, bundle in enumerate(model.planned(given).bundles):
        assert all(source.bundle < number for source in bundle.sources)  # a topological order: convex


def keys(granularity: str, content: str) -> list[str]:
    """Return the keys of a call of a model, which is in hexadecimal digits."""
    made = ff.from_onnx(onnx.ModelProto.FromString(bytes.fromhex(content)), granularity=granularity)
    called = made({name: np.ones((2, 3), np.float32) for name in made.inputs})
    return sorted(map(str, dict(called.__dask_graph__())))


@pytest.fixture(scope="module")
def elsewhere():
    """A process that prints the keys of the model in each line."""
    code = (
        f"import sys, {__name__} as here\nfor line in sys.stdin: print(here.keys(*line.split()), flush=True)"
    )
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        yield process
        process.stdin.close()
        ended(process)


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(graphs(), st.sampled_from(["auto", "op"]))
def test_keys_are_the_same_in_another_process(elsewhere, proto, granularity):
    content = proto.SerializeToString(deterministic=True).hex()
    print(granularity, content, file=elsewhere.stdin, flush=True)
    found = keys(granularity, content)
    assert found
    assert elsewhere.stdout.readline() == f"{found}\n"
