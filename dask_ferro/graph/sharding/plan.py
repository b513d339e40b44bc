"""The plan of a sharding as data: the entries that every rank executes in order, with their counts and costs.

An entry is a node with the layouts of its operands, or a redistribution.  Nothing is decided here:
`sharding.propagate` creates a plan, and `spmd.lower` writes it as a graph.  Durations are seconds, sizes bytes, both
projected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, starmap
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.ir.nodes import Types, type_of, value_bytes
from dask_ferro.graph.ir.regions import BACKWARD, region_of
from dask_ferro.graph.sharding.redistribute import (
    COLLECTIVES,
    Layout,
    LayoutStep,
    Mesh,
    Price,
    count_parts,
)

Numbers: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Compute(NamedTuple):
    """A node on every rank: layouts of its operands (None: omitted or not read), its seconds on each rank.

    `once` has an (axis, input) for each optional input that only the first rank of that axis adds.
    """

    node: ir.Node
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout, ...]
    once: frozenset[tuple[int, int]]
    seconds: float


class LayoutChange(NamedTuple):
    """A redistribution of a value."""

    value: ir.Value
    source: Layout
    steps: tuple[LayoutStep, ...]
    price: Price


Entry: TypeAlias = Compute | LayoutChange


@dataclass(frozen=True, repr=False)
class Sharding:
    """The plan of a sharding: the entries that every rank executes, in order.

    `inputs` has the layouts of graph inputs and initializers, `known` the values that are known before the run: shapes
    of whole values.
    """

    model: ir.Model
    types: Types
    mesh: Mesh
    inputs: Mapping[str, Layout]
    outputs: tuple[Layout, ...]
    entries: tuple[Entry, ...]
    known: Mapping[ir.Value, Numbers] = field(default_factory=dict)

    def __repr__(self) -> str:
        mesh = " x ".join(f"{axis} {ranks}" for axis, ranks in self.mesh.axes.items())
        counts = ", ".join(f"{count} {kind}" for kind, count in self.collectives.items()) or "no collectives"
        return (
            f"<Sharding of {len(self.model.graph)} nodes on {mesh}: {counts}, {self.bytes:,.0f} bytes a rank>"
        )

    @property
    def moves(self) -> tuple[LayoutChange, ...]:
        """The redistributions."""
        return tuple(entry for entry in self.entries if isinstance(entry, LayoutChange))

    @property
    def collectives(self) -> Counter[str]:
        """The number of collectives of each kind; one collective in all groups of an axis counts as one."""
        steps = chain.from_iterable(move.steps for move in self.moves)
        return Counter(step.kind for step in steps if step.kind in COLLECTIVES)

    @property
    def bytes(self) -> float:
        """The bytes that each rank sends."""
        return sum(move.price.bytes for move in self.moves)

    @property
    def activations(self) -> tuple[float, ...]:
        """The bytes of each result of the forward on a rank."""
        sizes: list[float] = []
        for entry in self.entries:
            if isinstance(entry, Compute) and region_of(entry.node).phase != BACKWARD:
                sizes += starmap(self.part_bytes, zip(entry.node.outputs, entry.outputs, strict=True))
        return tuple(sizes)

    def part_bytes(self, value: ir.Value, layout: Layout) -> float:
        """Return the bytes of a value on a rank."""
        return value_bytes(type_of(value, self.types)) / count_parts(layout, self.mesh)


def select_nodes(
    reads: Mapping[ir.Node, Sequence[ir.Value | None]], outputs: Iterable[ir.Value]
) -> list[ir.Node]:
    """Return the nodes that outputs depend on, in order; `reads` has the operands of all nodes in topological order."""
    values: set[ir.Value | None] = set(outputs)
    nodes = []
    for node in reversed(list(reads)):
        if values.intersection(node.outputs):
            values.update(reads[node])
            nodes.append(node)
    return nodes[::-1]
