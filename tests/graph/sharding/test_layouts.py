"""Layouts of one to three axes: whole models give the numbers of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from dask_ferro.graph.sharding.redistribute import Mesh
from tests.each import every

from .shard_run import Net, R, S
from .test_shard import mlp

MESHES = [Mesh({"a": 2}), Mesh({"a": 2, "b": 2}), Mesh({"a": 2, "b": 2, "c": 2})]


def elementwise(n: int) -> Net:
    net = Net({"x": (n, n)}, {"w": (n, n), "bias": (n,)})
    h = net.op("Relu", net.op("Add", "x", "bias"))
    net.end(y=net.op("Max", net.op("Mul", h, "w"), "x"), total=net.op("ReduceSum", h, [0], keepdims=0))
    return net


def gradients(n: int) -> Net:
    return mlp(2, backward=True, rows=n, d=n, hidden=2 * n)


def block(n: int) -> Net:
    """A norm, a softmax, and the mean over all rows."""
    net = Net({"x": (n, n)}, {"w": (n, n)})
    centred = net.op("Sub", "x", net.op("ReduceMean", "x", [-1]))
    deviation = net.op("Sqrt", net.op("ReduceMean", net.op("Mul", centred, centred), [-1]))
    p = net.op("Softmax", net.op("MatMul", net.op("Div", centred, deviation), "w"))
    rows = net.op("ReduceLogSumExp", p, [1], keepdims=0)
    net.end(
        y=net.op("Add", p, "x"), mean=net.op("ReduceMean", rows, [0]), of_columns=net.op("ReduceMean", p, [0])
    )
    return net


def convolution(n: int) -> Net:
    net = Net({"x": (n, n, 4, 4)}, {"w": (n, n, 3, 3), "bias": (n,), "v": (n, n, 1, 1)})
    h = net.op("Relu", net.op("Conv", "x", "w", "bias", pads=[1] * 4))
    net.end(y=net.op("GlobalAveragePool", net.op("Conv", h, "v")))
    return net


def shapes(n: int) -> Net:
    net = Net({"x": (n, n)}, {"w": (n, n)})
    flat = net.op("Neg", net.op("Reshape", "x", [n * n]))
    cube = net.op("Transpose", net.op("Reshape", flat, [n, 1, n]), perm=[2, 1, 0])
    both = net.op("Concat", net.op("Squeeze", cube, [1]), "w", axis=1)
    some = net.op("Slice", both, [1], [n + 2], [1])
    net.end(
        y=net.op("Exp", some), z=net.op("Gather", both, [0, 2, 2, 1], axis=0), t=net.op("Transpose", both)
    )
    return net


NETS = [elementwise, gradients, block, convolution, shapes]


def rows(mesh: Mesh, net: Net) -> dict[str, Any]:
    """All axes split the rows of the inputs."""
    return {name: (S(0),) * len(mesh.axes) for name in net.inputs}


def rows_and_weights(mesh: Mesh, net: Net) -> dict[str, Any]:
    """And the last one all weights."""
    sharded = (*(R,) * (len(mesh.axes) - 1), S(0))
    return rows(mesh, net) | {name: sharded for name, w in net.weights.items() if w.dtype.kind == "f"}


def columns(mesh: Mesh, net: Net) -> dict[str, Any]:
    """All axes split the columns of weights; the inputs are whole."""
    every = {name: (S(1),) * len(mesh.axes) for name, w in net.weights.items() if w.ndim > 1}
    return {name: at for name, at in every.items() if net.weights[name].dtype.kind == "f"}


def both(mesh: Mesh, net: Net) -> dict[str, Any]:
    """The first axis splits rows, and all others the columns of weights."""
    first, rest = (S(0),), len(mesh.axes) - 1
    laid = {name: (R, *at[1:]) for name, at in columns(mesh, net).items()}
    return laid | dict.fromkeys(net.inputs, first + (R,) * rest)


@every("mesh", MESHES, ids=lambda mesh: f"{len(mesh.axes)} axes")
@every("net", NETS, ids=lambda net: net.__name__)
def test_any_layout_gives_the_numbers_of_one_rank(net, mesh):
    made = net(8)
    for placed in (rows, rows_and_weights, columns, both):
        made.sharded(mesh, placed(mesh, made))


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{len(mesh.axes)} axes")
def test_rows_over_all_axes_are_reduced_once_a_weight(mesh):
    plan, _ = gradients(8).sharded(mesh, rows(mesh, gradients(8)))
    assert plan.collectives == {"AllReduce": 4}
