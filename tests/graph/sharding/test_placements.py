"""The placement table: each strategy of each row gives the numbers of the whole, on 2 and on 4 ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from dask_ferro.graph.ir.inference import ValueType
from dask_ferro.graph.ops.families.layout import regroup
from dask_ferro.graph.ops.labels import TypedNode
from dask_ferro.graph.ops.table import TABLE, rule
from dask_ferro.graph.sharding.placements import Partial
from dask_ferro.graph.sharding.plan import Compute, Sharding
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.sharding.spmd import Spmd, lower
from dask_ferro.graph.sharding.strategies import Strategy, strategies
from tests.each import every

from .shard_cases import CASES, Case, Weight
from .shard_run import assert_same, evaluate, joined


class Built:
    """A case as a model of one node, with its inputs, its outputs as computed whole, and their types."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(0)
        arrays: dict[str, Any] = {}
        for i, operand in enumerate(case.operands):
            if isinstance(operand, tuple):
                operand = rng.standard_normal(operand)
            arrays[f"x{i}"] = operand
        names = ["" if a is None else name for name, a in arrays.items()]
        made = [f"y{i}" for i in range(case.outputs)]
        self.weights = {n: a.array for n, a in arrays.items() if isinstance(a, Weight)}
        self.feeds = {n: a for n, a in arrays.items() if a is not None and n not in self.weights}
        node = helper.make_node(case.op, names, made, name="node", **case.attributes)
        graph = helper.make_graph(
            [node],
            "case",
            [_info(n, a) for n, a in self.feeds.items()],
            [onnx.ValueInfoProto(name=n) for n in made],
            [numpy_helper.from_array(a, n) for n, a in self.weights.items()],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=10)
        self.wanted = evaluate(proto, self.feeds)
        self.model = ir.from_proto(proto)
        self.types = {
            name: ValueType("tensor", ir.DataType.from_numpy(array.dtype), array.shape)
            for name, array in {**self.feeds, **self.weights, **self.wanted}.items()
        }
        self.node = next(iter(self.model.graph))
        self.site = TypedNode(self.node, self.types, case.opset)

    def plan(self, strategy: Strategy, ranks: int) -> Sharding:
        """The plan that follows one strategy."""
        read = list(zip(self.node.inputs, strategy.inputs, strict=True))
        given = {v.name: (p,) for v, p in read if v is not None and v.name}
        found = rule(self.site)
        spelled = None if found is None else found.shape
        inputs = tuple(
            (p,) if v is not None and v.name and i != spelled else None for i, (v, p) in enumerate(read)
        )
        outputs = tuple((p,) for p in strategy.outputs)
        entry = Compute(self.node, inputs, outputs, frozenset((0, i) for i in strategy.once), 0.0)
        return Sharding(self.model, self.types, Mesh({"x": ranks}), given, outputs, (entry,))


def _info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def terms(array: np.ndarray, reduction: str, ranks: int) -> list[np.ndarray]:
    """Different terms that reduce to `array`."""
    rng = np.random.default_rng(3)
    others = [rng.integers(-3, 4, array.shape).astype(array.dtype) for _ in range(ranks - 1)]
    if reduction in ("max", "min"):
        sign = -1 if reduction == "max" else 1
        at = np.arange(array.size).reshape(array.shape) % ranks
        return [np.where(at == i, array, array + sign * abs(o)) for i, o in enumerate([*others, others[0]])]
    whole = array * ranks if reduction == "mean" else array
    return [*others, whole - sum(others)]


def feeds_of(spmd: Spmd, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As `split`, with Partial inputs in different terms rather than in zeros."""
    found = spmd.split(feeds)
    for port in spmd.inputs:
        (placement,) = port.layout
        if isinstance(placement, Partial):
            each = terms(feeds[port.name], placement.reduction, spmd.mesh.ranks)
            found.update(zip(port.parts, each, strict=True))
    return found


@every("case", CASES, ids=str)
def test_each_strategy_of_a_row_gives_the_same_numbers(case):
    built = Built(case)
    for ranks in (2, 4):
        for strategy in strategies(built.site, ranks):
            spmd = lower(built.plan(strategy, ranks))
            parts = evaluate(ir.to_proto(spmd.model), feeds_of(spmd, built.feeds))
            try:
                assert_same(joined(spmd, parts), built.wanted)
            except AssertionError as error:
                raise AssertionError(f"{strategy} on {ranks} ranks: {error}") from error


# Of texts, which ranks do not split.
TEXTS = {"StringConcat", "RegexFullMatch", "StringNormalizer", "StringSplit"}


def test_all_labels_have_a_case():
    labelled = {op for op, facts in TABLE.items() if facts.labels is not None} - TEXTS
    assert {case.op for case in CASES} == labelled


def test_texts_are_whole_on_each_rank():
    texts, joined = (ir.Value(name=n, type=ir.TensorType(ir.DataType.STRING)) for n in "xy")
    node = ir.Node("", "Concat", [texts, texts], {"axis": ir.AttrInt64("axis", 1)}, outputs=[joined])
    types = {n: ValueType("tensor", ir.DataType.STRING, s) for n, s in {"x": (4, 8), "y": (4, 16)}.items()}
    assert [str(s) for s in strategies(TypedNode(node, types, 24), 2)] == ["R, R -> R"]


def listed(op: str, *shapes: Any, opset: int = 24, **attributes: Any) -> list[str]:
    return [str(s) for s in strategies(Built(Case(op, shapes, attributes, opset=opset)).site, 2)]


@every(
    ("found", "wanted"),
    [
        pytest.param(listed("MatMul", (4, 8), (8, 12)),
            [*("R, R -> R", "S(0), R -> S(0)", "S(1), S(0) -> P", "R, S(1) -> S(1)"),
            *("P, R -> P", "P(mean), R -> P(mean)", "R, P -> P", "R, P(mean) -> P(mean)")],
            id="a product is row-, inner- and column-parallel, and linear in each factor"),
        pytest.param(listed("Transpose", (4, 8)), ["R -> R", "S(0) -> S(1)", "S(1) -> S(0)",
            *(f"{p} -> {p}" for p in ("P", "P(mean)", "P(max)", "P(min)"))],
            id="a transpose swaps the dimension, and passes terms on"),
        pytest.param(listed("Add", (4, 8), (8,)),
            ["R, R -> R", "S(0), R -> S(0)", "S(1), S(0) -> S(1)", "P, P -> P", "P(mean), P(mean) -> P(mean)"],
            id="a bias is not added to one of the terms"),
        pytest.param(listed("Relu", (4, 8)), ["R -> R", "S(0) -> S(0)", "S(1) -> S(1)"], id="relu takes no terms"),
        pytest.param(listed("Relu", (5, 8)), ["R -> R", "S(1) -> S(1)"], id="odd sizes are not split"),
        pytest.param(listed("Relu", (0, 8)), ["R -> R", "S(1) -> S(1)"], id="nor nothing"),
        pytest.param(listed("Attention", (4, 5, 9), (4, 5, 9), (4, 5, 9), q_num_heads=3, kv_num_heads=3),
            ["R, R, R -> R", "S(0), S(0), S(0) -> S(0)"], id="nor heads"),
        pytest.param(listed("Softmax", (4, 8)), ["R -> R", "S(0) -> S(0)"], id="softmax keeps its axis whole"),
        pytest.param(listed("Gather", (8, 4), np.array([1]))[:3], ["R, R -> R", "S(1), R -> S(1)", "P, R -> P"],
            id="a dimension that indices pick along is whole"),
        pytest.param(listed("ScatterND", (8, 4), np.array([[1]]), (1, 4))[:3],
            ["R, R, R -> R", "S(1), R, S(1) -> S(1)", "P, R, P -> P"], id="or are written along"),
        pytest.param(listed("ReduceMean", (4, 8), opset=13, axes=[0], keepdims=0)[:3],
            ["R -> R", "S(0) -> P(mean)", "S(1) -> S(0)"], id="a mean over shards is a mean of means"),
    ],
)  # fmt: skip
def test_the_table_lists(found, wanted):
    assert found == wanted


@pytest.mark.parametrize(("count", "labels"), [(1, ("0", "1", "2")), (5, (None, "1", None))])
def test_a_batch_normalization_of_opset_9_trains_if_it_returns_statistics(count, labels):
    inputs, outputs = [f"x{i}" for i in range(5)], [f"y{i}" for i in range(count)]
    values = [[ir.Value(name=name) for name in names] for names in (inputs, outputs)]
    node = ir.Node("", "BatchNormalization", values[0], outputs=values[1])
    types = dict.fromkeys([*inputs, *outputs], ValueType("tensor", ir.DataType.FLOAT, (8,)))
    types |= dict.fromkeys(["x0", "y0"], ValueType("tensor", ir.DataType.FLOAT, (4, 8, 12)))
    found = rule(TypedNode(node, types, 9))
    assert found is not None
    assert found.inputs[0] == found.outputs[0] == labels


@pytest.mark.parametrize(
    ("before", "after", "labels"),
    [
        pytest.param((8, 12), (8, 3, 4), (("0", "1"), ("0", "1", None)), id="a head count takes the shards"),
        pytest.param((8, 3, 4), (8, 12), (("0", "1", None), ("0", "1")), id="and gives them back"),
        pytest.param((4, 6), (24,), (("0", None), ("0",)), id="merged dimensions are split by the first"),
        pytest.param(
            (1, 4, 1, 6), (4, 6, 1), ((None, "0", None, "1"), ("0", "1", None)), id="ones are skipped"
        ),
        pytest.param((6, 4), (4, 6), (("0", None), ("0", None)), id="a mixed run is split by its first"),
        pytest.param((0, 4), (4, 0), ((None, None), (None, None)), id="nothing is not split"),
        pytest.param((), (1, 1), ((), (None, None)), id="a scalar is not split"),
    ],
)
def test_reshape_keeps_the_shards_where_runs_begin(before, after, labels):
    assert regroup(before, after) == labels
