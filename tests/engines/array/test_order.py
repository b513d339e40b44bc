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
from tests.engines.device.test_device import OPSET, F, model_of, node

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
