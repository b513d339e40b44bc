"""Redistribution of a value from one layout to another: its steps, their cost, and their nodes.

    Partial -> Replicate   AllReduce        Shard(a) -> Shard(b)   AllToAll
    Partial -> Shard       ReduceScatter    Replicate -> Shard     Slice, without communication
    Shard -> Replicate     AllGather        anything -> Partial    impossible

A collective is one node of the domain `ai.dask_ferro`, with the pieces of a group's ranks as inputs and outputs, in
the order of the ranks: `AllReduce(reduction)`, `ReduceScatter(reduction, axis)`, `AllGather(axis)`,
`AllToAll(split_axis, concat_axis)`.  Terms are added in that order, so sums are reproducible.  Slice is ONNX's own.

A mesh may have several axes.  Those that split one dimension are nested in their order in the mesh, so they form a
stack: the last of them is removed first, and none is added before or between others.  A step is along one axis, but
successive AllGathers of one dimension, and AllReduces, are one collective of all their ranks.

Bytes are the bytes that each rank sends, seconds the projection of a ring algorithm (Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH", 2005); both are projections.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import InputError, is_count
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Replicate, Shard
from dask_ferro.policy.estimates import Link

# One placement for each axis of the mesh.
Layout: TypeAlias = tuple[Placement, ...]
# Placements of a value along the axes that are named.
ByAxis: TypeAlias = Mapping[str, Placement]

COLLECTIVES = ("AllReduce", "ReduceScatter", "AllGather", "AllToAll")


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid with named axes; the last axis runs fastest.

    Parameters
    ----------
    axes : mapping of str to int
        Name and length of each axis, such as ``{"data": 2, "tensor": 4}``.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.parallel as fp
    >>> mesh = fp.Mesh({"data": 2, "tensor": 2})
    >>> mesh.ranks, mesh.groups(0), mesh.groups(1)
    (4, ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    """

    axes: Mapping[str, int]

    def __post_init__(self) -> None:
        wrong = [f"{name!r}: {size!r}" for name, size in self.axes.items() if not is_count(size)]
        if wrong or not self.axes:
            raise InputError(
                f"a mesh needs axes of 1 rank or more, as in {{'tensor': 4}}; got"
                f" {', '.join(wrong) or 'none'}"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length of each axis."""
        return tuple(self.axes.values())

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    @property
    def whole(self) -> Layout:
        """The layout of a value that is replicated on every rank."""
        return (WHOLE,) * len(self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the position of a rank on each axis."""
        return tuple(int(i) for i in np.unravel_index(rank, self.sizes))

    def rank(self, coordinates: Sequence[int]) -> int:
        """Return the rank at a position."""
        return int(np.ravel_multi_index(tuple(coordinates), self.sizes))

    def groups(self, *axes: int) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only in their position on these axes, the last one fastest."""
        grid = np.arange(self.ranks).reshape(self.sizes)
        rows = np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(
            -1, prod(self.sizes[axis] for axis in axes)
        )
        return tuple(map(tuple, rows.tolist()))


def layout_of(placed: ByAxis, mesh: Mesh) -> Layout:
    """Return a placement by axis as a layout: whole along axes that are not named, or have one rank."""
    axes = mesh.axes.items()
    return tuple(placed.get(axis, WHOLE) if ranks > 1 else WHOLE for axis, ranks in axes)


def text(layout: Sequence[Placement]) -> str:
    """Return a layout as text: "R", "S(0)", "S(0),P"."""
    return ",".join(map(str, layout))


# Steps.


class LayoutStep(NamedTuple):
    """A change of placement along axes of the mesh, ascending."""

    kind: str
    axes: tuple[int, ...]
    source: Placement
    target: Placement

    def after(self, layout: Sequence[Placement]) -> Layout:
        """Return the layout that it turns another layout into."""
        return tuple(self.target if axis in self.axes else p for axis, p in enumerate(layout))


# Along several axes these are the same as one after the other: parts are joined, or terms added, in the order of ranks.
_ONE_COLLECTIVE = ("AllGather", "AllReduce")
# Steps that shrink pieces come first, and steps that enlarge them last.
_ORDER = ("Slice", "ReduceScatter", "AllToAll", "AllReduce", "AllGather")


_KINDS = {
    (Partial, Replicate): "AllReduce",
    (Partial, Shard): "ReduceScatter",
    (Shard, Replicate): "AllGather",
    (Shard, Shard): "AllToAll",
    (Replicate, Shard): "Slice",
}


def is_reachable(source: Layout, target: Layout) -> bool:
    """Return whether there are steps: no complete value is split into terms, which would only cost memory."""
    return all(a == b or not isinstance(b, Partial) for a, b in zip(source, target, strict=True))


@lru_cache(4096)
def steps(source: Layout, target: Layout) -> tuple[LayoutStep, ...]:
    """Return the steps from one layout to another that is reachable (`is_reachable`)."""
    now = source
    path: list[LayoutStep] = []
    while differing := [axis for axis, (a, b) in enumerate(zip(now, target, strict=True)) if a != b]:
        ready = [_step(axis, now[axis], target[axis]) for axis in differing if _is_ready(now, target, axis)]
        # Then the first one waits for later axes of its dimensions only: the last of these gathers its parts.
        # `_is_ready` lets it split that dimension again when the axes before it are settled, so none does so twice.
        if not ready:
            ready = [_step(last := _last_later(now, target, differing[0]), now[last], WHOLE)]
        # Steps that shrink the parts come first, so that later steps send less.
        step = min(ready, key=lambda s: _ORDER.index(s.kind))
        now = step.after(now)
        if path and step.kind in _ONE_COLLECTIVE and path[-1]._replace(axes=step.axes) == step:
            step = step._replace(axes=tuple(sorted((*path.pop().axes, *step.axes))))
        path.append(step)
    return tuple(path)


def _step(axis: int, source: Placement, target: Placement) -> LayoutStep:
    return LayoutStep(_KINDS[type(source), type(target)], (axis,), source, target)


def _is_ready(now: Sequence[Placement], target: Layout, axis: int) -> bool:
    """Return whether an axis may have its target: its dimensions are split by no later axis, and settled before it."""
    goal = target[axis]
    is_settled = not isinstance(goal, Shard) or all(
        (a == goal) == (b == goal) for a, b in zip(now[:axis], target[:axis], strict=True)
    )
    return is_settled and _last_later(now, target, axis) == axis


def _last_later(now: Sequence[Placement], target: Layout, axis: int) -> int:
    """Return the last later axis that splits a dimension of an axis, now or in the target; without one, that axis."""
    dims = [p for p in (now[axis], target[axis]) if isinstance(p, Shard)]
    return max((later for later in range(axis + 1, len(now)) if now[later] in dims), default=axis)


# Prices.


class Price(NamedTuple):
    """The bytes that each rank sends in a step, and its seconds."""

    bytes: float
    seconds: float


def price(kind: str, nbytes: float, ranks: int, link: Link) -> Price:
    """Return the price of a step in a group of `ranks` that holds `nbytes` together.

    Examples
    --------
    >>> price("AllReduce", 8e6, 4, Link(latency=0.0, bandwidth=1e9))
    Price(bytes=12000000.0, seconds=0.012)
    """
    if kind == "Slice" or ranks == 1:
        return Price(0.0, 0.0)
    hops = ranks - 1
    sent = nbytes * hops / ranks
    # A ring all-reduce is a reduce-scatter and an all-gather, one after the other.
    if kind == "AllReduce":
        hops, sent = 2 * hops, 2 * sent
    elif kind == "AllToAll":
        # Each rank keeps one piece of its part and sends the others.
        sent /= ranks
    return Price(sent, hops * link.latency + sent / link.bandwidth)


def count_parts(layout: Sequence[Placement], mesh: Mesh, *, without: Collection[int] = ()) -> int:
    """Return the number of parts of a value, not counting the axes `without`."""
    pairs = enumerate(zip(layout, mesh.sizes, strict=False))
    return prod(size for axis, (p, size) in pairs if isinstance(p, Shard) and axis not in without)


def price_steps(steps: Sequence[LayoutStep], source: Layout, nbytes: float, mesh: Mesh, link: Link) -> Price:
    """Return the price of successive steps for a value of `nbytes` that starts at `source`."""
    now, sent, seconds = source, 0.0, 0.0
    for step in steps:
        ranks = prod(mesh.sizes[axis] for axis in step.axes)
        each = price(step.kind, nbytes / count_parts(now, mesh, without=step.axes), ranks, link)
        sent, seconds = sent + each.bytes, seconds + each.seconds
        now = step.after(now)
    return Price(sent, seconds)


# Nodes.


def collective(
    step: LayoutStep, pieces: Sequence[ir.Value], outputs: Sequence[ir.Value], name: str
) -> ir.Node:
    """Return the node that redistributes a group's pieces; inputs and outputs are in rank order."""
    attributes: list[ir.Attr] = []
    if isinstance(step.source, Partial):
        attributes.append(ir.AttrString("reduction", step.source.reduction))
    if isinstance(step.source, Shard) and isinstance(step.target, Shard):
        attributes.append(ir.AttrInt64("split_axis", step.target.dim))
        attributes.append(ir.AttrInt64("concat_axis", step.source.dim))
    else:
        placements = (step.source, step.target)
        attributes += [ir.AttrInt64("axis", p.dim) for p in placements if isinstance(p, Shard)]
    return ir.Node(OWN_DOMAIN, step.kind, pieces, attributes, outputs=outputs, name=name)
