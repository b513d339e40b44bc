"""Sharded equals unsharded for whole models, with as few collectives as their parallel forms are known to have."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.errors import InputError, UnsupportedOpError
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.model.load import load
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import Mesh, text
from dask_ferro.graph.sharding.spmd import lower
from tests.each import every
from tests.graphs import written

from .shard_run import MESHES, Net, R, S, by_axis, evaluate, evaluate_sharded, layouts

# ---- models -------------------------------------------------------------------------------------------------


def mlp(
    blocks: int = 1,
    *,
    bias: bool = True,
    backward: bool = False,
    rows: int | str = 8,
    d: int = 8,
    hidden: int = 16,
) -> Net:
    """Column-row pairs: y = relu(x @ up + b) @ down + c for each; with the gradients of sum(y * dy)."""
    shapes = {"up": (d, hidden), "b": (hidden,), "down": (hidden, d), "c": (d,)}
    net = Net(
        {"x": (rows, d)} | ({"dy": (rows, d)} if backward else {}),
        {f"{role}{i}": shape for i in range(blocks) for role, shape in shapes.items()},
    )
    saved, x = [], "x"
    for i in range(blocks):
        h = net.op("MatMul", x, f"up{i}")
        h = net.op("Add", h, f"b{i}") if bias else h
        a = net.op("Relu", h)
        y = net.op("MatMul", a, f"down{i}")
        saved.append((x, h, a))
        x = net.op("Add", y, f"c{i}") if bias else y
    outputs = {"y": x}
    if backward:
        outputs |= _mlp_backward(net, saved)
    net.end(**outputs)
    return net


def _mlp_backward(net: Net, saved: list[tuple[str, str, str]]) -> dict[str, str]:
    dy, outputs = "dy", {}
    for i, (x, h, a) in reversed(list(enumerate(saved))):
        mask = net.op("Cast", net.op("Greater", h, net.op("Sub", h, h)), to=onnx.TensorProto.DOUBLE)
        outputs[f"d_down{i}"] = net.op("MatMul", net.op("Transpose", a), dy)
        dh = net.op("Mul", net.op("MatMul", dy, net.op("Transpose", f"down{i}")), mask)
        outputs[f"d_up{i}"] = net.op("MatMul", net.op("Transpose", x), dh)
        dy = net.op("MatMul", dh, net.op("Transpose", f"up{i}"))
    return outputs | {"dx": dy}


def column_row(blocks: int = 1, *, bias: bool = True) -> dict[str, Any]:
    """Column-parallel up, row-parallel down."""
    placed = {f"up{i}": S(1) for i in range(blocks)} | {f"down{i}": S(0) for i in range(blocks)}
    return placed | ({f"b{i}": S(0) for i in range(blocks)} if bias else {})


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_column_row_pair_has_one_all_reduce(ranks, blocks):
    plan, _ = mlp(blocks).sharded(Mesh({"tensor": ranks}), column_row(blocks))
    assert plan.collectives == {"AllReduce": blocks}


@pytest.mark.parametrize("ranks", [2, 4])
def test_and_one_backward_while_weight_gradients_stay_where_the_weights_are(ranks):
    net = mlp(2, backward=True)
    plan, spmd = net.sharded(Mesh({"tensor": ranks}), column_row(2))
    assert plan.collectives == {"AllReduce": 4}
    at = {port.name: text(port.layout) for port in spmd.outputs}
    placed = {"d_up0": "S(1)", "d_up1": "S(1)", "d_down0": "S(0)", "d_down1": "S(0)"}
    assert at == {"y": "R", "dx": "R"} | placed


@pytest.mark.parametrize("ranks", [2, 4])
def test_row_parallel_output_is_the_sum_and_the_bias_is_added_once(ranks):
    net = Net({"x": (4, 8)}, {"w": (8, 4), "b": (4,)})
    net.end(y=net.op("Gemm", "x", "w", "b"))
    plan, spmd = net.sharded(Mesh({"tensor": ranks}), {"w": S(0)})
    assert plan.collectives == {"AllReduce": 1}
    gemms = [node for node in spmd.model.graph if node.op_type == "Gemm"]
    biased = [len(node.inputs) == 3 and node.inputs[2] is not None for node in gemms]
    assert biased == [True] + [False] * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_gradients_are_reduced_once_a_weight(ranks):
    plan, spmd = mlp(2, backward=True).sharded(Mesh({"data": ranks}), {"x": S(0), "dy": S(0)})
    assert plan.collectives == {"AllReduce": 4}
    assert {port.name for port in spmd.outputs if port.layout == (S(0),)} == {"y", "dx"}


FSDP = Mesh({"data": 2, "fsdp": 2})
ROWS = {"data": S(0), "fsdp": S(0)}


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        # For each of two weights: gathered forward and backward, and its gradient reduced.
        pytest.param({"fsdp": S(0)}, {"AllGather": 4, "ReduceScatter": 2, "AllReduce": 2}, id="weights over one axis"),
        pytest.param({"data": S(0), "fsdp": S(0)}, {"AllGather": 4, "ReduceScatter": 4}, id="weights over both axes"),
        pytest.param({}, {"AllReduce": 2}, id="weights on every rank"),
    ],
)  # fmt: skip
def test_rows_over_two_axes(weights, counts):
    net = mlp(backward=True, rows=64, bias=False)
    placed = {"x": ROWS, "dy": ROWS, "up0": weights, "down0": weights}
    plan, spmd = net.sharded(FSDP, placed, outputs={"d_up0": weights, "d_down0": weights})
    assert plan.collectives == counts
    at = {port.name: text(port.layout) for port in spmd.outputs}
    lies = ",".join(str(weights.get(axis, R)) for axis in FSDP.axes)
    assert at == {"y": "S(0),S(0)", "dx": "S(0),S(0)", "d_up0": lies, "d_down0": lies}


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallel_trades_an_all_reduce_for_a_gather_and_a_scatter(ranks):
    net = mlp(rows=8, d=32, hidden=64, bias=False)
    plan, _ = net.sharded(Mesh({"tensor": ranks}), column_row(bias=False) | {"x": S(0)}, outputs={"y": S(0)})
    assert plan.collectives == {"AllGather": 1, "ReduceScatter": 1}


def test_a_sharded_weight_is_gathered_where_it_is_smaller_than_what_it_meets():
    net = Net({"x": (64, 4)}, {"w": (4, 4)})
    net.end(y=net.op("Relu", net.op("MatMul", "x", "w")))
    plan, spmd = net.sharded(Mesh({"data": 4}), {"x": S(0), "w": S(0)})
    assert [(move.value.name, [s.kind for s in move.steps]) for move in plan.moves] == [("w", ["AllGather"])]
    assert spmd.outputs[0].layout == (S(0),)


def test_what_was_reduced_once_is_not_reduced_again():
    net = Net({"x": (4, 8)}, {"w": (8, 8)})
    y = net.op("MatMul", "x", "w")
    net.end(a=net.op("Relu", y), b=net.op("Exp", y), c=net.op("Neg", y))
    plan, _ = net.sharded(Mesh({"tensor": 2}), {"w": S(0)})
    assert plan.collectives == {"AllReduce": 1}


def test_a_weight_is_cut_before_anything_runs():
    net = Net({"x": (8, 8)}, {"w": (8, 8)})
    net.end(y=net.op("Add", "x", "w"), z=net.op("Tanh", net.op("Mul", "w", "x")))
    _, spmd = net.sharded(Mesh({"a": 2, "b": 2}), {"x": (S(0), S(1))})
    assert sorted(spmd.model.graph.initializers) == [f"w@S(0),S(1)@{rank}" for rank in range(4)]


@pytest.mark.parametrize(
    ("columns", "reduced"), [(64, "matmul_0"), (2, "y")], ids=["before it grows", "after it shrinks"]
)
def test_a_partial_value_is_reduced(columns, reduced):
    net = Net({"x": (8, 8)}, {"w": (8, 4), "head": (4, columns)})
    net.end(y=net.op("MatMul", net.op("MatMul", "x", "w"), "head"))
    plan, _ = net.sharded(Mesh({"tensor": 2}), {"w": S(0)})
    assert [move.value.name for move in plan.moves if move.steps[0].kind == "AllReduce"] == [reduced]


def test_shapes_computed_in_the_graph_are_those_of_the_whole():
    net = Net({"x": (4, 8)})
    shape = net.op("Shape", "x")
    rows = net.op("Gather", shape, net.op("Constant", value_int=0))
    target = net.op("Concat", net.op("Unsqueeze", rows, [0]), [2, 4], axis=0)
    h = net.op("Reshape", "x", target)
    count = net.op("Add", rows, net.op("Size", "x"))
    net.end(y=net.op("Mul", h, net.op("Cast", count, to=onnx.TensorProto.DOUBLE)))
    plan, _ = net.sharded(Mesh({"data": 4}), {"x": S(0)})
    assert not plan.collectives


# ---- properties ---------------------------------------------------------------------------------------------

KEEPING = ["Relu", "Tanh", "Neg", "Transpose", "Identity"]
MIXING = ["Add", "Sub", "Mul", "MatMul", "Max"]


@st.composite
def nets(draw: st.DrawFn) -> Net:
    """Graphs of up to 8 ops on square matrices, which become shapes that ranks do not divide."""
    n = 24
    net = Net({"x0": (n, n), "x1": (n, n)}, {"w0": (n, n), "w1": (n, n), "row": (1, n)})
    known = ["x0", "x1", "w0", "w1"]
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from([*KEEPING, *MIXING, "Sum", "Softmax", "Mean", "Reshape", "Bias"]))
        a, b = draw(st.sampled_from(known)), draw(st.sampled_from(known))
        if kind in KEEPING:
            made = net.op(kind, a)
        elif kind in MIXING:
            made = net.op(kind, a, b)
        elif kind == "Softmax":
            made = net.op("Softmax", a, axis=draw(st.sampled_from([0, 1])))
        elif kind == "Bias":
            made = net.op("Add", a, "row")
        elif kind == "Reshape":
            shape = draw(st.sampled_from([[n * n], [n, n, 1], [4, 6, 24], [9, 64]]))
            made = net.op("Reshape", net.op("Relu", net.op("Reshape", a, shape)), [n, n])
        else:
            op = "ReduceSum" if kind == "Sum" else "ReduceMean"
            reduced = net.op(op, a, [draw(st.sampled_from([0, 1]))])
            made = net.op("Add", reduced, b)
        known.append(made)
    net.end(y=known[-1], z=draw(st.sampled_from(known)))
    return net


@settings(max_examples=60, deadline=None)
@given(nets(), st.data())
def test_any_graph_with_any_placements_gives_the_same_numbers(net, data):
    mesh = data.draw(st.sampled_from(MESHES))
    inside = [v.name for node in net.model.graph for v in node.outputs if v.shape == net.inputs["x0"]]
    placed = {name: data.draw(layouts(mesh, 2, partial=True)) for name in net.inputs}
    placed |= {w: data.draw(layouts(mesh, 2)) for w in ("w0", "w1") if w in net.model.graph.initializers}
    chosen = data.draw(st.sets(st.sampled_from(inside), max_size=2))
    placed |= {name: data.draw(layouts(mesh, 2)) for name in chosen}
    placed = by_axis(mesh, placed)
    plan = propagate(net.model, infer(net.model), mesh, placed)
    wanted = evaluate(net.proto, net.feeds)
    for name, got in evaluate_sharded(lower(plan), net.feeds).items():
        np.testing.assert_allclose(got, wanted[name], rtol=1e-9, atol=1e-9)
    assert repr(plan.moves) == repr(propagate(net.model, infer(net.model), mesh, placed).moves)


# ---- the graph that comes out -------------------------------------------------------------------------------


def test_a_weight_that_ranks_share_is_there_once_and_shards_are_views_until_they_are_read():
    _, spmd = mlp().sharded(Mesh({"tensor": 2}), column_row())
    assert sorted(spmd.model.graph.initializers) == [
        "b0@S(0)@0", "b0@S(0)@1", "c0@R@0", "down0@S(0)@0", "down0@S(0)@1", "up0@S(1)@0", "up0@S(1)@1",
    ]  # fmt: skip
    assert isinstance(spmd.model.graph.initializers["up0@S(1)@0"].const_value, ir.LazyTensor)


# ---- errors -------------------------------------------------------------------------------------------------


MESH3 = Mesh({"tensor": 3})


@every(
    ("placed", "said"),
    [
        pytest.param({"w": S(0)}, "'w': no such value in the model; it has ", id="an unknown name"),
        pytest.param({"x": S(2)}, "no dimension 2", id="a dimension beyond the rank"),
        pytest.param(
            {"up0": {"rows": S(0)}}, "no axis ['rows']; its axes are ['tensor']", id="an unknown axis"
        ),
        pytest.param(
            {"x": S(0)}, "is 2, which 3 ranks do not divide; pad it", id="shards that are not equal"
        ),
    ],
)
def test_placements_that_cannot_be_are_named(placed, said):
    net = mlp(rows=2)
    with pytest.raises(InputError, match=re.escape(said)):
        propagate(net.model, infer(net.model), MESH3, by_axis(MESH3, placed))


def test_all_wrong_placements_are_told_at_once():
    net = mlp()
    with pytest.raises(InputError) as caught:
        propagate(net.model, infer(net.model), MESH3, by_axis(MESH3, {"a": R, "up0": S(5), "x": S(9)}))
    assert len(str(caught.value).splitlines()) == 4


def test_axes_that_do_not_divide_together_are_refused():
    net = mlp(rows=6)
    with pytest.raises(InputError, match="its dimension 0 is 6, which 4 ranks do not divide"):
        propagate(net.model, infer(net.model), Mesh({"a": 2, "b": 2}), {"x": {"a": S(0), "b": S(-2)}})


def test_an_open_batch_has_to_be_given_a_size():
    net = mlp(rows="N")
    with pytest.raises(InputError, match=r"'N'; give it a size, as in dims=\{'N': 16\}"):
        propagate(net.model, infer(net.model), Mesh({"data": 2}), {"x": {"data": S(0)}})
    plan = propagate(net.model, infer(net.model, dims={"N": 4}), Mesh({"data": 2}), {"x": {"data": S(0)}})
    assert plan.outputs == ((S(0),),)


def test_what_is_not_split_may_stay_open():
    net = mlp(rows="N")
    spmd = lower(propagate(net.model, infer(net.model), Mesh({"tensor": 2}), {"x": {"tensor": S(1)}}))
    x = np.random.default_rng(0).standard_normal((3, 8))
    np.testing.assert_allclose(evaluate_sharded(spmd, {"x": x})["y"], evaluate(net.proto, {"x": x})["y"])
    assert [tuple(map(str, v.shape)) for v in spmd.model.graph.inputs] == [("N", "4")] * 2


def test_random_numbers_and_a_graph_that_is_sharded_are_refused():
    net = Net({"x": (4, 8)})
    net.end(y=net.op("Add", "x", net.op("RandomNormalLike", "x")))
    with pytest.raises(UnsupportedOpError, match="different ones on each rank; give it the attribute `seed`"):
        propagate(net.model, infer(net.model), Mesh({"data": 2}), {})
    _, spmd = mlp().sharded(Mesh({"tensor": 2}), column_row())
    with pytest.raises(UnsupportedOpError, match="sharded already"):
        propagate(spmd.model, infer(spmd.model), Mesh({"tensor": 2}), {})


def test_control_flow_is_refused():
    text = """(float[4] x, bool c) => (float[4] y) {
        y = If (c) <then_branch = t () => (float[4] a) {a = Relu(x)}, else_branch = e () => (float[4] b) {b = Neg(x)}>
    }"""
    model = load(written(text)).model
    with pytest.raises(UnsupportedOpError, match="has bodies; only graphs without control flow are sharded"):
        propagate(model, infer(model), Mesh({"data": 2}), {"x": {"data": S(0)}})


@pytest.mark.parametrize(("feeds", "got"), [({}, "nothing"), ({"x": np.zeros((4, 4))}, "shape (4, 4)")])
def test_inputs_that_do_not_fit_are_named(feeds, got):
    _, spmd = mlp().sharded(Mesh({"tensor": 2}), column_row())
    with pytest.raises(InputError, match=re.escape(f"input 'x': want shape (8, 8), got {got}")):
        spmd.split(feeds)
