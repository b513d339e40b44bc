"""Where batched products stand: together, in the order of the model, and without keeping much alive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import NodeProto

from dask_ferro.engines.array.passes import batch as batching
from dask_ferro.engines.array.passes import order
from dask_ferro.engines.array.passes.unit import Unit, units_of
from dask_ferro.testing.emulated_device import StandIn
from tests.engines.array.cases import compiled
from tests.engines.device.test_device import OPSET, F, agree, both, model_of, node

WIDE = 4096  # a row of 16 kB


def branches(count: int, *, named: bool = False) -> ir.Model:
    """Each widens its input, narrows it again and adds the sum up; its two last products are small ones."""
    nodes = []
    for i in range(count):
        nodes += [
            node("Tile", f"x{i} repeats", f"wide{i}"),
            node("Softmax", f"wide{i}", f"soft{i}"),
            node("MatMul", f"soft{i} down", f"low{i}"),
            node("MatMul", f"low{i} square", f"z{i}"),
            node("Add", f"z{i} {'x0' if not i else f's{i - 1}'}", f"s{i}"),
        ]
    weights = {
        "repeats": np.array([1, WIDE // 4]),
        "down": np.full((WIDE, 4), 0.5, F),
        "square": np.eye(4, dtype=F),
    }
    rows: Any = "N" if named else 16
    return model_of(nodes, {f"x{i}": (rows, 4) for i in range(count)}, [f"s{count - 1}"], **weights)


def peak(model: ir.Model, count: int, rows: int = 16) -> int:
    """The most bytes that were alive while the model ran on a device, beyond its inputs and weights."""

    class Peak(StandIn):
        most = 0

        def _claim(self, owner: int, nbytes: int) -> None:
            super()._claim(owner, nbytes)
            self.most = max(self.most, self._live_bytes)

    device = Peak()
    bound = compiled(model, on_device=True).bind(device.namespace, device.to_device)
    arrays = [device.to_device(np.full((rows, 4), i, F)) for i in range(count)]
    before = device.most = device.memory().live
    bound(*arrays)
    return device.most - before


@pytest.mark.parametrize("named", [False, True], ids=["sizes known", "a dimension with a name"])
def test_many_branches_do_not_live_at_the_same_time(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_BYTES", 0)
    one = peak(branches(1, named=named), 1)
    assert peak(branches(20, named=named), 20) <= 1.5 * one


def test_one_pair_of_products_leaves_the_rest_in_order() -> None:
    """Two products of 32 in one program: everything else stands where it stood."""
    nodes = [node("MatMul", "x w", "a"), node("Exp", "a", "first")]
    for i in range(15):
        nodes += [node("Softmax", "x", f"e{i}", axis=i % 2), node("ReduceSum", f"e{i}", f"r{i}", keepdims=0)]
    nodes += [node("MatMul", "x v", "b")]
    outputs = ["first", *(f"r{i}" for i in range(15)), "b"]
    model = model_of(nodes, {"x": (4, 4)}, outputs, w=np.eye(4, dtype=F), v=np.ones((4, 4), F))
    steps = [step.unit for step in compiled(model, on_device=True)._steps]
    assert [len(unit.outputs) for unit in steps] == [2] + [1] * 31
    assert [unit.outputs[0] for unit in steps[1:]] == [n.output[0] for n in nodes[1:-1]]
    agree(both(model, StandIn(), np.full((4, 4), 0.5, F)))


def test_only_what_a_group_needs_is_pulled_forward() -> None:
    nodes = "a = MatMul (x, w) b = Softmax (a) c = Softmax (x) rest = Softmax (c) d = Transpose (y) e = MatMul (d, v)"
    weights = {"w": np.eye(4, dtype=F), "v": np.ones((4, 4), F)}
    model = model_of(nodes, {"x": (4, 4), "y": (4, 4)}, ["b", "rest", "e"], **weights)
    units = units_of(list(model.graph), OPSET)
    assert order.ordered(units, [[0, 5]], ["b", "rest", "e"]) == [(4,), (0, 5), (1,), (2,), (3,)]


def test_a_group_of_which_all_would_be_too_much_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of branches whose wide values would all wait, as many go together as the bound allows."""
    model = branches(8)
    row = 16 * WIDE * 4
    sizes = {}
    for bound in (0, row, 3 * row, 100 * row):
        monkeypatch.setattr(order, "_BYTES", bound)
        units = batching.batch(units_of(list(model.graph), OPSET), ["s7"])
        sizes[bound // row] = sorted({len(u.outputs) for u in units if u.several})
    assert sizes[100] == [8]
    assert all(max(few, default=1) <= max(more) for few, more in pairwise(sizes.values()))


def test_what_is_of_unknown_shape_is_not_moved() -> None:
    nodes = "a = MatMul (x, w) c = NonZero (x) b = MatMul (y, w)"
    model = model_of(nodes, {"x": (4, 4), "y": (4, 4)}, ["a", "b", "c"], w=np.eye(4, dtype=F))
    for made in model.graph[2].outputs:
        made.shape = None
    units = units_of(list(model.graph), OPSET)
    assert order.ordered(units, [[0, 2]], ["a", "b", "c"]) == [(0,), (1,), (2,)]


def test_results_of_a_group_live_as_long_as_the_last_of_them() -> None:
    """They are parts of one array: where one of 8 waits for the end, the other seven do too."""
    nodes = [node("MatMul", f"x{i} w", f"p{i}") for i in range(8)]
    nodes += [node("Softmax", f"p{i}", f"q{i}") for i in range(1, 8)]
    nodes += [
        node("Tile", "x0 repeats", "wide"),
        node("Softmax", "wide", "soft"),
        node("Add", "soft p0", "y"),
    ]
    inputs, weights = (
        {f"x{i}": (4, 1) for i in range(8)},
        {"w": np.ones((1, 1), F), "repeats": np.array([1, 1])},
    )
    model = model_of(nodes, inputs, ["y"], **weights)
    units = units_of(list(model.graph), OPSET)
    alive = order._Places(units, [list(range(8))], ["y"])._alive
    most = [alive.after([f"p{i}" for i in range(8)], [], several=True)]
    most += [alive.after([f"q{i}"], [f"p{i}"], several=False) for i in range(1, 8)]
    assert most == [8 * 16] + [9 * 16] * 7  # a q goes at once; no p before p0


def _model(edges: Sequence[tuple[int, int]], small: Sequence[bool]) -> ir.Model:
    names = ["x"]
    nodes: list[NodeProto] = []
    for i, ((a, b), product) in enumerate(zip(edges, small, strict=True)):
        reads = f"{names[a % len(names)]} {names[b % len(names)]}"
        nodes.append(node("MatMul" if product else "Add", reads, f"v{i}"))
        names.append(f"v{i}")
    read = {name for n in nodes for name in n.input}
    return model_of(nodes, {"x": (3, 3)}, [n for n in names[1:] if n not in read])


@given(st.data(), st.integers(1, 24), st.sampled_from([0, 100, 64 << 20]))
@settings(max_examples=60, deadline=None)
def test_whatever_the_graph_each_unit_runs_once_and_after_what_it_reads(data, count, more):
    ends = st.tuples(st.integers(0, 99), st.integers(0, 99))
    model = _model(
        data.draw(st.lists(ends, min_size=count, max_size=count)),
        data.draw(st.lists(st.booleans(), min_size=count, max_size=count)),
    )
    units: list[Unit] = units_of(list(model.graph), OPSET)
    outputs = [str(v.name) for v in model.graph.outputs]
    before, order._BYTES = order._BYTES, more
    try:
        batched = batching.batch(units, outputs)
    finally:
        order._BYTES = before
    made = {"x"}
    for unit in batched:
        assert made.issuperset(n for n in unit.inputs if n is not None)
        made.update(unit.outputs)
    assert sorted(n for u in batched for n in u.outputs) == sorted(n for u in units for n in u.outputs)
