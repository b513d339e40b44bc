"""The built-in graphs: their tables of contents, their bounds, their numbers, and what is refused."""

from __future__ import annotations

import doctest
import hashlib
import sys
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from dask_ferro.errors import ConfigError
from dask_ferro.graph import workloads
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.model.load import load
from dask_ferro.graph.workloads import NAMES, WORKLOADS, build, lower_bound, tiny, work_and_path
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


@pytest.mark.parametrize(("name", "params", "contents"), CONTENTS)
def test_holds_the_ops_of_the_table(name, params, contents):
    model = build(name, **params)
    onnx.checker.check_model(model, full_check=True)
    assert op_types(model) == contents
    if not params:
        assert len(model.graph.node) == WORKLOADS[name].compute_ops


def test_the_table_has_ten_graphs():
    assert NAMES == (
        "transformer", "large-transformer", "xlarge-transformer", "wide", "large-wide", "xlarge-wide", "imbalanced",
        "matmul-chain", "matmul-parallel", "resnet",
    )  # fmt: skip
    assert SLEEPS == ("wide", "large-wide", "xlarge-wide", "imbalanced")


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


def test_lower_bound_is_the_work_on_one_worker_and_the_critical_path_on_many():
    work, path = work_and_path(build("wide"))
    assert (lower_bound("wide", 1), lower_bound("wide", 1000)) == (work, path)
    assert (work, path) == pytest.approx((0.080, 0.025))


def test_a_graph_of_real_kernels_has_no_bound():
    with pytest.raises(ConfigError, match=r"'resnet'.*one of wide, large-wide, xlarge-wide, imbalanced"):
        lower_bound("resnet", 4)


# ---- order and seconds -------------------------------------------------------------------------------------


def seconds_by_id(model: onnx.ModelProto) -> list[float]:
    """Of ids 1, 2, ...: id 0 is the root, which is the graph's input."""
    return [round(node.attribute[0].f, 6) for node in model.graph.node]


def test_imbalanced_has_the_longest_at_ids_1_to_4():
    model = build("imbalanced")
    assert seconds_by_id(model) == [0.2] * 4 + [0.001] * 200
    assert [node.name for node in model.graph.node][:5] == ["long_1", "long_2", "long_3", "long_4", "short_5"]
    assert {node.input[0] for node in model.graph.node} == {"x"}


def test_imbalanced_may_be_long_ops_alone():
    assert seconds_by_id(build("imbalanced", long=2, short=0, long_s=1)) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("branches", "skew", "slow"),
    [(8, 0.25, 2), (320, 0.47, 150), (1280, 0.003, 4), (5, 0.5, 3), (4, 0, 0), (4, 1, 4)],
)
def test_wide_slows_the_first_branches_rounded_half_up(branches, skew, slow):
    model = build("wide", branches=branches, length=1, skew=skew)
    assert seconds_by_id(model) == [0.005] * slow + [0.001] * (branches - slow)


def test_wide_is_made_of_chains_on_one_root():
    producer = {node.output[0]: node.name for node in build("wide").graph.node}
    parents = {node.name: producer.get(node.input[0], node.input[0]) for node in build("wide").graph.node}
    assert Counter(parents.values())["x"] == 8
    assert parents["slow_0/op_0"] == "x"
    assert parents["fast_7/op_4"] == "fast_7/op_3"
    assert len(build("wide").graph.output) == 8


def test_matmul_chains_share_their_weight_and_nothing_else():
    model = build("matmul-parallel", chains=3, length=2, m=4)
    assert [w.name for w in model.graph.initializer] == ["w"]
    assert {node.input[1] for node in model.graph.node} == {"w"}
    assert [i.name for i in model.graph.input] == ["x_0", "x_1", "x_2"]


def test_transformer_layers_form_a_chain_and_share_weights():
    one, many = (build("large-transformer", layers=n, d=8) for n in (1, 4))
    assert [w.SerializeToString() for w in one.graph.initializer] == [
        w.SerializeToString() for w in many.graph.initializer
    ]
    layer_inputs = [node.input[0] for node in many.graph.node if node.name.endswith("norm_in")]
    assert layer_inputs == ["x", "hidden_1", "hidden_2", "hidden_3"]


@pytest.mark.parametrize("name", NAMES)
def test_fits_in_a_message(name):
    assert build(name).ByteSize() < 6_000_000


@pytest.mark.parametrize("name", NAMES)
def test_loads_with_all_its_nodes(name):
    assert len(list(load(build(name)).model.graph)) == WORKLOADS[name].compute_ops


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


@pytest.mark.parametrize(("name", "params"), SMALL)
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


def test_a_transformer_layer_is_attention_and_feed_forward():
    """Against the formula, written without the graph."""
    model = build("transformer", seq=6, d=8)
    w = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    x = inputs_of(model)["x"].astype(np.float64)

    def norm(v):
        centred = v - v.mean(axis=-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)

    h = norm(x)
    mixed = norm(np.maximum(h @ w["w_q"] @ (w["w_k"] @ h), 0) @ (w["w_v"] @ h))
    expected = norm(np.maximum(mixed @ w["w_up"], 0) @ w["w_down"])
    np.testing.assert_allclose(evaluate(model)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_arguments_give_the_same_bytes(name):
    assert build(name).SerializeToString() == build(name).SerializeToString()


def test_another_process_builds_the_same_bytes():
    code = (
        "import hashlib; from dask_ferro.graph.workloads import build, tiny;"
        "print(*(hashlib.sha256(m.SerializeToString()).hexdigest() for m in (build('transformer'), tiny())))"
    )
    there = ran([sys.executable, "-c", code], check=True).stdout.split()
    here = [hashlib.sha256(m.SerializeToString()).hexdigest() for m in (build("transformer"), tiny())]
    assert there == here


def test_the_seed_changes_the_weights():
    assert build("resnet", seed=1).SerializeToString() != build("resnet").SerializeToString()


# ---- tiny ops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "width"), [(1280, 4), (1281, 4), (10, 1), (3, 8), (1, 1), (64, 64)])
def test_tiny_has_a_source_and_n_ops_of_two_inputs(n, width):
    model = tiny(n, width)
    onnx.checker.check_model(model, full_check=True)
    source, *ops = model.graph.node
    assert (source.op_type, list(source.input)) == ("Neg", ["x"])
    assert len(ops) == n
    assert {len(op.input) for op in ops} == {2}
    assert set(op_types(model)) <= {"Neg", "Add", "Sub", "Max", "Min"}
    assert [o.name for o in model.graph.output] == [f"y_{i}" for i in range(min(n, width))]


def test_tiny_has_width_ops_ready_at_a_time():
    depth = {"x": 0, "source": 0}
    for node in tiny(1280, 4).graph.node[1:]:
        depth[node.output[0]] = 1 + max(depth[value] for value in node.input)
    del depth["x"], depth["source"]
    assert Counter(depth.values()) == dict.fromkeys(range(1, 321), 4)


def test_no_op_of_tiny_goes_unused():
    model = tiny()
    used = {value for node in model.graph.node for value in node.input} | {o.name for o in model.graph.output}
    assert {node.output[0] for node in model.graph.node} <= used
    assert len(list(load(model).model.graph)) == 1281


def test_tiny_gives_finite_multiples_of_its_source():
    model = tiny(400, 4)
    x = np.full(256, 1.0, np.float32)
    for value in ReferenceEvaluator(model).run(None, {"x": x}):
        assert np.array_equal(value, np.round(value))
        assert 1 <= np.abs(value).max() <= 101


# ---- what is refused ---------------------------------------------------------------------------------------

REFUSED = [
    ("wyde", {}, r"no built-in graph 'wyde'; choose one of transformer, .*imbalanced.*resnet"),
    ("wide", {"widht": 3}, r"wide has no parameter 'widht'; it has branches=8, length=5, skew=0.25"),
    ("wide", {"skew": 1.5}, r"skew must be a number from 0 to 1, got 1.5"),
    ("wide", {"skew": float("nan")}, r"skew must be a number from 0 to 1, got nan"),
    ("wide", {"skew": "a lot"}, r"skew must be a number from 0 to 1, got 'a lot'"),
    ("wide", {"branches": 0}, r"branches must be at least 1, got 0"),
    ("wide", {"slow_s": -1}, r"slow_s must be a number from 0 to 3600, got -1"),
    ("imbalanced", {"long_s": float("inf")}, r"long_s must be a number from 0 to 3600, got inf"),
    ("transformer", {"d": 2.5}, r"d must be a whole number, got 2.5"),
    ("resnet", {"seed": -1}, r"seed must be at least 0, got -1"),
    ("imbalanced", {"long": 0}, r"long must be at least 1, got 0"),
]


@pytest.mark.parametrize(("name", "params", "message"), REFUSED)
def test_refuses(name, params, message):
    with pytest.raises(ConfigError, match=message):
        build(name, **params)


@pytest.mark.parametrize("workers", [0, -1, 1.5])
def test_lower_bound_refuses_workers(workers):
    with pytest.raises(ConfigError, match="workers must be"):
        lower_bound("wide", workers)


@pytest.mark.parametrize("arguments", [{"n": 0}, {"width": 0}, {"seed": -1}, {"n": 1.5}])
def test_tiny_refuses(arguments):
    with pytest.raises(ConfigError, match="must be"):
        tiny(**arguments)


def test_docstrings_tell_the_truth():
    told = doctest.testmod(workloads)
    assert told.attempted > 0
    assert told.failed == 0
