"""Summaries of a model's cost: per operator, the work, and the critical path.

Sums of what `cost` and `plan` project; nothing is decided here.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.graph.bundling.partition import Dag, finest, longest_path
from dask_ferro.graph.cost.roofline import ModelCost


class OpRow(NamedTuple):
    """Totals of one operator: nodes, FLOPs, bytes read and written, seconds on one thread."""

    op: str
    nodes: int
    flops: float
    bytes: float
    seconds: float


class Bound(NamedTuple):
    """Seconds of all ops one after the other, and along the critical path."""

    work: float
    path: float


def per_op(model: ir.Model, cost: ModelCost) -> list[OpRow]:
    """Return one row for each operator of the main graph, the most seconds first."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for node, own, seconds in zip(model.graph, *cost, strict=True):
        spent = (1, own.flops, own.read_bytes + own.write_bytes, seconds)
        row = sums[node.op_type]
        row[:] = [a + b for a, b in zip(row, spent, strict=True)]
    rows = (OpRow(op, int(n), flops, moved, busy) for op, (n, flops, moved, busy) in sums.items())
    return sorted(rows, key=lambda row: (-row.seconds, row.op))


def bound(dag: Dag) -> Bound:
    """Return the work and the critical path of a graph, without any overhead."""
    return Bound(sum(dag.seconds), longest_path(finest(dag)))
