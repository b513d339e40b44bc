"""The built-in graphs: their tables of contents, their bounds, their numbers, and what is refused."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from tiny_graph import tiny_graph

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.model.load import load
from dask_ferro.testing import NAMES, WORKLOADS, build, lower_bound
from tests.each import every
from tests.programs import ran

SLEEPS = tuple(name for name in NAMES if WORKLOADS[name].sleeps)
LARGE_WIDE_FLAT = {"branches": 320, "length": 1, "skew": 0.47}
XLARGE_WIDE_DEEP = {"branches": 64, "length": 10, "skew": 0.5}


class Sleep(OpRun):
    """A copy without the sleep: what the op gives, not how long it takes."""

    op_domain = OWN_DOMAIN

    def _run(self, x, seconds=None):
        return (x.copy(),)


def inputs_of(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def evaluate(model: onnx.ModelProto, seed: int = 0) -> list[np.ndarray]:
    return ReferenceEvaluator(model, new_ops=[Sleep]).run(None, inputs_of(model, seed))


def op_types(model: onnx.ModelProto) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph.node))


CONTENTS = [
    ("transformer", {}, {"MatMul": 7, "Relu": 2, "LayerNormalization": 3}),
    ("large-transformer", {}, {"MatMul": 56, "Relu": 16, "LayerNormalization": 24}),
    ("xlarge-transformer", {}, {"MatMul": 224, "Relu": 64, "LayerNormalization": 96}),
    ("wide", {}, {"Sleep": 40}),
    ("large-wide", {}, {"Sleep": 320}),
    ("large-wide", LARGE_WIDE_FLAT, {"Sleep": 320}),
    ("xlarge-wide", {}, {"Sleep": 1280}),
    ("xlarge-wide", XLARGE_WIDE_DEEP, {"Sleep": 640}),
    ("imbalanced", {}, {"Sleep": 204}),
    ("matmul-chain", {}, {"MatMul": 50}),
    ("matmul-parallel", {}, {"MatMul": 128}),
    ("resnet", {}, {"MatMul": 3, "Relu": 1, "LayerNormalization": 1}),
]


@every(("name", "params", "contents"), CONTENTS)
def test_holds_the_ops_of_the_table(name, params, contents):
    model = build(name, **params)
    onnx.checker.check_model(model, full_check=True)
    assert op_types(model) == contents


# Seconds at 2, 4, 8 and 16 workers.
BOUNDS = [
    ("wide", {}, [0.040, 0.025, 0.025, 0.025]),
    ("large-wide", {}, [0.480, 0.240, 0.120, 0.060]),
    ("large-wide", LARGE_WIDE_FLAT, [0.460, 0.230, 0.115, 0.0575]),
    ("xlarge-wide", XLARGE_WIDE_DEEP, [0.960, 0.480, 0.240, 0.120]),
    ("xlarge-wide", {}, [0.648, 0.324, 0.162, 0.081]),
    ("imbalanced", {}, [0.500, 0.250, 0.200, 0.200]),
]


@pytest.mark.parametrize(("name", "params", "seconds"), BOUNDS)
def test_lower_bound(name, params, seconds):
    assert [lower_bound(name, workers, **params) for workers in (2, 4, 8, 16)] == pytest.approx(
        seconds, rel=1e-12
    )


# ---- order and seconds -------------------------------------------------------------------------------------


@every("name", NAMES)
def test_loads_with_all_its_nodes(name):
    model = build(name)
    assert len(list(load(model).model.graph)) == len(model.graph.node)


# ---- numbers -----------------------------------------------------------------------------------------------

SMALL = [
    ("transformer", {"seq": 16, "d": 32}),
    ("large-transformer", {"layers": 8, "d": 32}),
    ("xlarge-transformer", {"layers": 32, "d": 32}),
    ("wide", {}),
    ("large-wide", {}),
    ("xlarge-wide", {}),
    ("imbalanced", {}),
    ("matmul-chain", {"m": 64}),
    ("matmul-parallel", {"m": 32}),
    ("resnet", {"channels": 16}),
]


@every(("name", "params"), SMALL)
def test_values_stay_of_order_one_to_the_end(name, params):
    for value in evaluate(build(name, **params)):
        assert np.isfinite(value).all()
        assert 0.05 < value.std() < 20


@pytest.mark.parametrize("name", SLEEPS)
def test_a_sleep_graph_copies_its_input_to_every_output(name):
    model = build(name)
    x = inputs_of(model)["x"]
    assert x.shape == (256,)
    assert all(np.array_equal(y, x) for y in evaluate(model))


def test_another_process_builds_the_same_bytes():
    code = (
        "import hashlib; from dask_ferro.testing import build;"
        "print(*(hashlib.sha256(m.SerializeToString()).hexdigest() for m in (build('transformer'), build('wide'))))"
    )
    there = ran([sys.executable, "-c", code], check=True).stdout.split()
    here = [hashlib.sha256(m.SerializeToString()).hexdigest() for m in (build("transformer"), build("wide"))]
    assert there == here


# ---- tiny ops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "width"), [(1280, 4), (1281, 4), (10, 1), (3, 8), (1, 1), (64, 64)])
def test_tiny_has_a_source_and_n_ops_of_two_inputs(n, width):
    model = tiny_graph(n, width)
    onnx.checker.check_model(model, full_check=True)
    source, *ops = model.graph.node
    assert (source.op_type, list(source.input)) == ("Neg", ["x"])
    assert len(ops) == n
    assert {len(op.input) for op in ops} == {2}
    assert set(op_types(model)) <= {"Neg", "Add", "Sub", "Max", "Min"}
    assert [o.name for o in model.graph.output] == [f"y_{i}" for i in range(min(n, width))]


# ---- what is refused ---------------------------------------------------------------------------------------

REFUSED = [
    ("wyde", {}, r"no built-in graph 'wyde'; choose one of transformer, .*imbalanced.*resnet"),
    ("wide", {"widht": 3}, r"wide has no parameter 'widht'; it has branches=8, length=5, skew=0.25"),
    ("wide", {"skew": 1.5}, r"skew must be a number from 0 to 1, got 1.5"),
    ("wide", {"skew": float("nan")}, r"skew must be a number from 0 to 1, got nan"),
    ("wide", {"skew": "a lot"}, r"skew must be a number from 0 to 1, got 'a lot'"),
    ("wide", {"branches": 0}, r"branches must be a whole number of at least 1, got 0"),
    ("wide", {"slow_s": -1}, r"slow_s must be a number from 0 to 3600, got -1"),
    ("imbalanced", {"long_s": float("inf")}, r"long_s must be a number from 0 to 3600, got inf"),
    ("transformer", {"d": 2.5}, r"d must be a whole number of at least 1, got 2.5"),
    ("resnet", {"seed": -1}, r"seed must be a whole number of at least 0, got -1"),
    ("imbalanced", {"long": 0}, r"long must be a whole number of at least 1, got 0"),
]


@every(("name", "params", "message"), REFUSED)
def test_refuses(name, params, message):
    with pytest.raises(InputError, match=message):
        build(name, **params)
