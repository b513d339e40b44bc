"""A vocabulary that ranks split: embeddings, losses and gradients exchange numbers of rows, never the vocabulary."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.parallel.apply import apply
from dask_ferro.graph.sharding.plan import Compute
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.sharding.spmd import lower
from dask_ferro.policy.estimates import Link
from tests.each import each, every

from .language import ENTRIES, LENGTH, MESHES, ROWS, WIDTH, assert_close, language, sharded
from .shard_run import Net, R, S, assert_same, evaluate, evaluate_sharded

LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": -100},
    "ignored class": {"ignore_index": 3, "reduction": "sum"},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed and ignored": {"label_smoothing": 0.3, "ignore_index": -1},
}


@every(
    ("loss", "mesh"),
    [
        *((loss, "4 ranks, the batch over 2") for loss in LOSSES if loss != "mean"),
        *(("mean", m) for m in MESHES),
    ],
)
def test_a_step_with_a_split_vocabulary_is_that_of_one_process(loss, mesh):
    step = language(**LOSSES[loss])
    _, spmd = sharded(step, MESHES[mesh])
    assert_close(evaluate_sharded(spmd, step.feeds), evaluate(ir.to_proto(step.model), step.feeds), 1e-10)
    # No value of a rank has all entries: neither the zeros that gradients are added into, nor logits.
    values = (value for node in spmd.model.graph for value in node.outputs)
    assert not [value.name for value in values if ENTRIES in value.shape.numpy()]


@pytest.mark.parametrize("loss", ["mean", "smoothed and ignored"])
@pytest.mark.parametrize(
    "mesh", [Mesh({"tensor": 4}), Mesh({"tensor": 2, "data": 2})], ids=["4 ranks", "2 by 2"]
)
def test_and_where_ranks_do_not_divide_the_vocabulary(mesh, loss):
    step = language(entries=ENTRIES - 1, **LOSSES[loss])
    plan, spmd = sharded(step, mesh)
    assert_close(evaluate_sharded(spmd, step.feeds), evaluate(ir.to_proto(step.model), step.feeds), 1e-10)
    assert "AllGather" not in plan.collectives or "data" in mesh.axes
    values = (value for node in spmd.model.graph for value in node.outputs)
    assert not [value.name for value in values if ENTRIES - 1 in value.shape.numpy()]


def test_and_over_two_axes():
    step, mesh, placed = language(), Mesh({"a": 2, "b": 2}), {"table": (S(0), S(0))}
    # So small a table would be gathered rather than wait for another hop.
    plan = propagate(step.model, infer(step.model), mesh, placed, link=Link(latency=0.0, bandwidth=1e9))
    assert_same(evaluate_sharded(lower(plan), step.feeds), evaluate(ir.to_proto(step.model), step.feeds))
    assert set(plan.collectives) == {"AllReduce"}


def test_a_table_is_gathered_for_indices_that_the_same_axis_splits():
    step = language()
    placed = {"table": S(0), "ids": S(0), "labels": S(0)}
    plan = propagate(step.model, infer(step.model), Mesh({"data": 2}), placed)
    picked = {entry.node.op_type: entry.outputs for entry in plan.entries if isinstance(entry, Compute)}
    assert picked["Gather"] == ((S(0),),)


# What a rank sends of each value, in numbers: rows of the batch by the width of the model, or one for each row.
OF_ROWS, OF_A_NUMBER = ROWS * LENGTH * WIDTH, ROWS * LENGTH


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_collective_carries_the_vocabulary(ranks):
    plan, _ = sharded(language(), Mesh({"tensor": ranks}))
    assert {step.kind for move in plan.moves for step in move.steps} == {"AllReduce"}
    # A ring all-reduce sends 2 (T - 1) / T of a value.
    each = Counter(round(move.price.bytes / 8 * ranks / (2 * (ranks - 1))) for move in plan.moves)
    # Forward: the embedding, the block, a maximum and a sum of each row, the loss.  Backward: a sum of each row, and
    # the gradients of what the logits, the block and the embedding read.
    assert each == {OF_ROWS: 4, OF_A_NUMBER: 3, 1: 1}


@pytest.mark.parametrize(
    ("placed", "kinds"),
    [
        pytest.param({"table": S(0)}, [], id="written out along a split dimension"),
        pytest.param({"table": S(1)}, ["LogSoftmax"], id="one node where terms of logits are added up"),
        pytest.param({"ids": S(0), "labels": S(0)}, ["LogSoftmax"], id="one node where the batch is split"),
    ],
)
def test_a_softmax_is(placed, kinds):
    step = language()
    before = [node.op_type for node in step.model.graph]
    plan = propagate(step.model, infer(step.model), Mesh({"x": 2}), placed)
    computed = (entry.node.op_type for entry in plan.entries if isinstance(entry, Compute))
    assert [kind for kind in computed if "Softmax" in kind] == kinds
    assert [node.op_type for node in step.model.graph] == before
    assert (plan.model is step.model) == bool(kinds)


@pytest.mark.parametrize("label", [ENTRIES, -1])
def test_a_label_that_is_no_class_makes_its_sample_nan_on_every_rank(label):
    step = language(reduction="none")
    step.feeds["labels"][2, 1] = label
    _, spmd = sharded(step, MESHES["4 ranks"])
    found = evaluate_sharded(spmd, step.feeds)["loss"]
    assert np.argwhere(np.isnan(found)).tolist() == [[2, 1]]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("index", [ENTRIES, -1])
def test_an_index_beyond_the_table_is_refused(index, ranks):
    step = language()
    step.feeds["ids"][1, 2] = index
    _, spmd = sharded(step, Mesh({"tensor": ranks}))
    with pytest.raises(IndexError, match="out of bounds"):
        evaluate_sharded(spmd, step.feeds)


def test_a_plan_splits_it_by_the_name_of_the_table():
    step = language()
    plan = {"words": {"shard": {"table": 0}, "workers": [0, 1]}}
    sharding = apply(step.model, plan).shard()
    assert set(sharding.collectives) == {"AllReduce"}
    assert_same(evaluate_sharded(lower(sharding), step.feeds), evaluate(ir.to_proto(step.model), step.feeds))


# Losses of models from files.

SCORES = (4, 8, 3)


def classified(kind: str, weighted: bool, **attributes: Any) -> Net:
    """A loss of ONNX's own with 8 classes, two of whose labels are not counted."""
    net = Net({"x": SCORES}, {"w": (8,)} if weighted else {})
    labels = np.random.default_rng(1).integers(0, 8, (4, 3))
    labels[0, 1] = labels[2, 2] = attributes.get("ignore_index", 0)
    net.weights["labels"] = labels
    scores = net.op("Identity", "x") if kind[0] == "S" else net.op("LogSoftmax", "x", axis=1)
    net.end(y=net.op(kind, scores, "labels", *(["w"] if weighted else []), **attributes))
    return net


@pytest.mark.parametrize("kind", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_losses_of_onnx_gather_no_scores(kind):
    def gathers_none(row):
        reduction, weighted, ignored = row
        loss = classified(kind, weighted, reduction=reduction, **ignored)
        plan, _ = loss.sharded(Mesh({"x": 2}), {"x": S(1)})
        assert set(plan.collectives) == {"AllReduce"}
        rows = 8 * SCORES[0] * SCORES[2]
        assert max(move.price.bytes for move in plan.moves) <= rows

    ignored = [{}, {"ignore_index": 7}, {"ignore_index": -2}]
    each(itertools.product(["none", "sum", "mean"], [False, True], ignored), gathers_none)


def test_a_value_that_is_repeated_is_made_in_parts_and_whole_where_both_are_read():
    net = Net({"x": (8, 4), "s": (1, 4)})
    many = net.op("Expand", "s", [8, 4])
    net.end(z=net.op("Neg", many), y=net.op("Add", "x", many))
    plan, spmd = net.sharded(Mesh({"x": 2}), {"x": S(0)})
    assert not plan.collectives
    made = [node.outputs[0].shape.numpy() for node in spmd.model.graph if node.op_type == "Expand"]
    assert sorted(made) == [(4, 4), (4, 4), (8, 4)]
    names = [node.name for node in spmd.model.graph]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_softmax_along_a_split_dimension_exchanges_two_numbers_of_each_row(ranks):
    net = Net({"x": SCORES})
    net.end(y=net.op("Softmax", "x", axis=1))
    plan, spmd = net.sharded(Mesh({"x": ranks}), {"x": S(1)})
    assert plan.collectives == {"AllReduce": 2}
    assert plan.bytes == 2 * 2 * (ranks - 1) / ranks * 8 * SCORES[0] * SCORES[2]
    assert spmd.outputs[0].layout == (S(1),)


# Any pick.


class Picked(NamedTuple):
    """A node that picks or adds by index along an axis, signed indices, a mesh, and its axes that split that axis."""

    kind: str
    axis: int
    shape: tuple[int, ...]
    indices: np.ndarray
    mesh: Mesh
    split: str


@st.composite
def picks(draw: st.DrawFn) -> Picked:
    kind = draw(st.sampled_from(["Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"]))
    axes, split = draw(
        st.sampled_from([((2,), "a"), ((4,), "a"), ((2, 2), "a"), ((2, 2), "b"), ((2, 2), "ab")])
    )
    rank = draw(st.integers(1, 3))
    axis = 0 if kind[-2:] == "ND" else draw(st.integers(0, rank - 1))
    shape = tuple(draw(st.integers(4, 9)) if i == axis else draw(st.integers(1, 3)) for i in range(rank))
    if "Elements" in kind:
        at = tuple(draw(st.integers(1, 5)) if i == axis else size for i, size in enumerate(shape))
    else:
        at = tuple(draw(st.lists(st.integers(1, 3), min_size=kind[-2:] == "ND", max_size=2)))
    seed = draw(st.integers(0, 99))
    dtype = draw(st.sampled_from([np.int32, np.int64])) if kind[-2:] != "ND" else np.int64
    indices = np.random.default_rng(seed).integers(-shape[axis], shape[axis], at).astype(dtype)
    mesh = Mesh(dict(zip("ab", axes, strict=False)))
    return Picked(kind, axis, shape, indices[..., None] if kind[-2:] == "ND" else indices, mesh, split)


@settings(max_examples=50, deadline=None)
@given(picks())
def test_picks_along_a_split_dimension_exchange_no_more_than_what_is_picked(case):
    net = Net({"x": case.shape})
    net.weights["i"] = case.indices
    attributes: dict[str, Any] = {} if case.kind[-2:] == "ND" else {"axis": case.axis}
    read = ["x", "i"]
    if case.kind[0] == "S":
        at = case.indices.shape if "Elements" in case.kind else (*case.indices.shape[:-1], *case.shape[1:])
        net.weights["u"] = np.random.default_rng(0).standard_normal(at)
        read, attributes = [*read, "u"], {**attributes, "reduction": "add"}
    net.end(y=net.op(case.kind, *read, **attributes))
    placed = dict.fromkeys(case.split, S(case.axis))
    plan, spmd = net.sharded(case.mesh, {"x": placed})
    if case.kind[0] == "S":
        assert not plan.collectives
        assert spmd.outputs[0].layout == tuple(placed.get(axis, R) for axis in case.mesh.axes)
    else:
        assert plan.collectives == {"AllReduce": 1}
