"""Terms that stay terms: the collectives that a graph needs where linear nodes pass a Partial on, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.sharding.placements import Partial
from dask_ferro.graph.sharding.plan import Sharding
from dask_ferro.graph.sharding.redistribute import Mesh
from tests.each import every
from tests.graph.sharding.shard_run import Net, P, R, S

ROWS, INNER, COLUMNS = 4, 8, 6


def products() -> tuple[Net, str, str]:
    """Two products of split inner dimensions, whose results are terms of (4, 6)."""
    shapes = {"x0": (ROWS, INNER), "x1": (ROWS, INNER), "c": (1,), "m": (ROWS, COLUMNS)}
    net = Net(shapes, {"u": (INNER, COLUMNS), "v": (INNER, COLUMNS)})
    return net, net.op("MatMul", "x0", "u"), net.op("MatMul", "x1", "v")


def sharded(net: Net, ranks: int, **options: Any) -> Sharding:
    """The plan with split inner dimensions, after the ranks gave the numbers of one process."""
    split = {name: S(0) for name in ("u", "v") if name in net.model.graph.initializers}
    plan, _ = net.sharded(Mesh({"t": ranks}), split, **options)
    return plan


# What is made of two values in terms, by linear nodes alone.
LINEAR: dict[str, Callable[[Net, str, str], str]] = {
    "Neg": lambda net, a, b: net.op("Neg", a),
    "Add": lambda net, a, b: net.op("Add", a, b),
    "Sub": lambda net, a, b: net.op("Sub", a, b),
    "Sum": lambda net, a, b: net.op("Sum", a, b, a),
    "Mul by a scalar": lambda net, a, b: net.op("Mul", "c", a),
    "Mul by a mask": lambda net, a, b: net.op("Mul", a, "m"),
    "Div by a scalar": lambda net, a, b: net.op("Div", a, "c"),
    "Transpose": lambda net, a, b: net.op("Transpose", a),
    "Reshape": lambda net, a, b: net.op("Reshape", a, [2, 12]),
    "Unsqueeze and Squeeze": lambda net, a, b: net.op("Squeeze", net.op("Unsqueeze", a, [1]), [1]),
    "Expand": lambda net, a, b: net.op("Expand", a, [2, ROWS, COLUMNS]),
    "Pad": lambda net, a, b: net.op("Pad", a, [0, 1, 0, 1]),
    "Concat": lambda net, a, b: net.op("Concat", a, b, axis=0),
    "Slice": lambda net, a, b: net.op("Slice", a, [1], [3], [0]),
    "Gather": lambda net, a, b: net.op("Gather", a, [2, 0], axis=0),
    "ReduceSum": lambda net, a, b: net.op("ReduceSum", a, [1]),
    "ReduceMean": lambda net, a, b: net.op("ReduceMean", a, [0]),
    "MatMul": lambda net, a, b: net.op("MatMul", a, net.op("Transpose", "m")),
}


@every("ranks", [2, 4])
@every("name", LINEAR)
def test_linear_nodes_pass_terms_on(name, ranks):
    """One all-reduce of the result, or none where terms are requested; nothing is reduced on the way."""
    net, *terms = products()
    net.end(y=net.op("Relu", LINEAR[name](net, *terms)))
    assert sharded(net, ranks).collectives == {"AllReduce": 1}
    net, *terms = products()
    net.end(y=LINEAR[name](net, *terms))
    plan = sharded(net, ranks, outputs={"y": P})
    # Terms are reduced before they grow.
    grows = name in ("Expand", "Pad")
    assert (plan.collectives, plan.outputs) == (({"AllReduce": 1}, ((R,),)) if grows else ({}, ((P,),)))


BRANCHES = {
    "one that needs it complete": lambda net, a: net.op(
        "Sub", net.op("Relu", a), net.op("Relu", net.op("Neg", a))
    ),
    "two that end apart": lambda net, a: net.op(
        "Add", net.op("Relu", net.op("Neg", a)), net.op("Relu", net.op("Mul", a, "c"))
    ),
    "one that grows": lambda net, a: net.op("Relu", net.op("Expand", a, [2, ROWS, COLUMNS])),
    "a sum and what it is taken of": lambda net, a: net.op(
        "Relu", net.op("Add", a, net.op("ReduceSum", a, [1]))
    ),
}


def norm_backward(net: Net, a: str) -> str:
    """The gradient of a norm: all of it is linear in `a`, and a mean is smaller than what is made of it again."""
    along = net.op("Mul", "m", net.op("ReduceMean", net.op("Mul", a, "m"), [1]))
    return net.op("Relu", net.op("Sub", net.op("Sub", a, net.op("ReduceMean", a, [1])), along))


BRANCHES["the gradient of a norm"] = norm_backward


@pytest.mark.parametrize("name", BRANCHES)
def test_a_value_is_reduced_once_and_at_its_own_size_at_most(name):
    net, a, _ = products()
    net.end(y=BRANCHES[name](net, a))
    plan = sharded(net, 2)
    assert plan.collectives == {"AllReduce": 1}
    assert plan.bytes == ROWS * COLUMNS * 8


def test_an_output_that_is_wanted_split_is_scattered_and_a_maximum_is_reduced():
    net, a, _ = products()
    net.end(y=net.op("Neg", a), top=net.op("ReduceMax", "m", [0]))
    plan = sharded(net, 2, outputs={"y": S(0), "top": P})
    assert (plan.collectives, plan.outputs) == ({"ReduceScatter": 1}, ((S(0),), (R,)))
    rows, _ = net.sharded(Mesh({"t": 2}), {"m": S(0)}, outputs={"y": P, "top": P})
    assert (rows.collectives, rows.outputs) == ({"AllReduce": 1}, ((R,), (R,)))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(R, {"AllReduce": 1}), (S(0), {"ReduceScatter": 1}), (S(1), {"ReduceScatter": 1})],
)
def test_an_input_that_comes_in_terms_is_redistributed_once(given, wanted):
    """Two readers, one of them linear: both read the given layout."""
    net = Net({"x": (4, 4)})
    net.end(y=net.op("Add", net.op("Mul", "x", "x"), net.op("Neg", "x")))
    plan, spmd = net.sharded(Mesh({"t": 2}), {"x": given}, starts={"x": P})
    assert (plan.collectives, plan.outputs) == (wanted, ((given,),))
    assert spmd.inputs[0].layout == (P,)


def test_an_output_that_may_stay_in_terms_may_be_a_mean_or_complete():
    net = Net({"x": (4, 6)})
    net.end(y=net.op("ReduceMean", "x", [0]))
    plan, _ = net.sharded(Mesh({"t": 2}), {"x": S(0)}, outputs={"y": P})
    assert plan.outputs == ((Partial("mean"),),)
    plan, _ = net.sharded(Mesh({"t": 2}), {"x": S(1)}, outputs={"y": P})
    assert (plan.collectives, plan.outputs) == ({"AllGather": 1}, ((R,),))
    with pytest.raises(InputError, match=r"is R and wanted as P: a complete value"):
        net.sharded(Mesh({"t": 2}), {"reducemean_0": P})


def test_a_placement_by_axis_says_nothing_about_the_other_axes_of_a_result():
    """Rows stay split over a while the result is placed along b; for all axes at once it is gathered."""
    mesh, placed = Mesh({"a": 2, "b": 2}), {"x": {"a": S(0)}}
    net = Net({"x": (4, 8)}, {"w": (8, 6)})
    net.end(y=net.op("Relu", net.op("MatMul", "x", "w")))
    plan, _ = net.sharded(mesh, {**placed, "matmul_0": {"b": S(1)}})
    assert (plan.collectives, plan.outputs) == ({}, ((S(0), S(1)),))
    plan, _ = net.sharded(mesh, {**placed, "matmul_0": [R, S(1)]})
    assert (plan.collectives, plan.outputs) == ({"AllGather": 1}, ((R, S(1)),))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_bias_is_added_to_the_shards_that_a_result_is_wanted_in(ranks):
    """The terms of a row-parallel product are scattered in front of it, not reduced and then cut."""
    net = Net({"x": (4, 8)}, {"w": (8, 6), "b": (6,)})
    net.end(y=net.op("Relu", net.op("Add", net.op("MatMul", "x", "w"), "b")))
    plan, _ = net.sharded(Mesh({"t": ranks}), {"w": S(0), "add_1": S(0)})
    assert (plan.collectives, plan.outputs) == ({"ReduceScatter": 1}, ((S(0),),))
