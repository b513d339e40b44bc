"""How a value gets from one placement to another: which steps, what they cost, and the nodes that do them.

    Partial -> Replicate   AllReduce        Shard(a) -> Shard(b)   AllToAll
    Partial -> Shard       ReduceScatter    Replicate -> Shard     Slice, which moves nothing
    Shard -> Replicate     AllGather        to Partial: no step leads there

A collective is one node of our domain, with the pieces of a group's ranks as inputs and outputs, in the order of
the ranks: `AllReduce(reduction)`, `ReduceScatter(reduction, axis)`, `AllGather(axis)`, `AllToAll(split_axis,
concat_axis)`.  Terms are added in that order, so sums are the same from run to run.  Slice is ONNX's own.

A mesh may have several axes; a step goes along one of them, and a dimension is split by one of them at most.
Bytes are those that each rank sends, seconds those of a ring (Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005); both are projections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Shard
from dask_ferro.policy.estimates import Link

Layout: TypeAlias = tuple[Placement, ...]  # one placement for each axis of the mesh

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
    >>> mesh = Mesh({"data": 2, "tensor": 2})
    >>> mesh.ranks, mesh.groups(0), mesh.groups(1)
    (4, ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    """

    axes: Mapping[str, int]

    def __post_init__(self) -> None:
        wrong = [f"{name!r}: {size!r}" for name, size in self.axes.items() if not _is_count(size)]
        if wrong or not self.axes:
            raise ConfigError(
                f"a mesh wants axes of 1 rank or more, as in {{'tensor': 4}}; got {', '.join(wrong) or 'none'}"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length of each axis."""
        return tuple(self.axes.values())

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return prod(self.sizes)

    @property
    def whole(self) -> Layout:
        """The layout of a value that every rank has."""
        return (WHOLE,) * len(self.axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the position of a rank on each axis."""
        return tuple(int(i) for i in np.unravel_index(rank, self.sizes))

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that differ in their position on one axis alone, group by group."""
        grid = np.arange(self.ranks).reshape(self.sizes)
        return tuple(
            tuple(map(int, row)) for row in np.moveaxis(grid, axis, -1).reshape(-1, self.sizes[axis])
        )


def _is_count(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def text(layout: Layout) -> str:
    """Return a layout as one word: "R", "S(0)", "S(0),P"."""
    return ",".join(map(str, layout))


# Steps.


class LayoutStep(NamedTuple):
    """A change of placement along one axis of the mesh."""

    kind: str
    axis: int
    source: Placement
    target: Placement


# What makes pieces smaller comes first, and what makes them larger last.
_ORDER = ("Slice", "ReduceScatter", "AllToAll", "AllReduce", "AllGather")


def kind(source: Placement, target: Placement) -> str | None:
    """Return the step from one placement to another, "" if they are one; None if no step leads there."""
    if source == target:
        return ""
    if isinstance(target, Partial):
        return None
    to_shard = isinstance(target, Shard)
    if isinstance(source, Partial):
        return "ReduceScatter" if to_shard else "AllReduce"
    if isinstance(source, Shard):
        return "AllToAll" if to_shard else "AllGather"
    return "Slice"


def steps(source: Layout, target: Layout) -> tuple[LayoutStep, ...]:
    """Return the steps from one layout to another, no dimension being split twice on the way.

    Raises
    ------
    ConfigError
        A value that is whole or sharded is wanted as Partial.
    """
    now, found = list(source), []
    while differing := [axis for axis, (a, b) in enumerate(zip(now, target, strict=True)) if a != b]:
        ready = [
            _step(axis, now[axis], target[axis]) for axis in differing if _is_free(now, axis, target[axis])
        ]
        if not ready:  # two axes wait for each other's dimension: one gives its own up first
            ready = [_step(differing[0], now[differing[0]], WHOLE)]
        step = min(ready, key=lambda s: _ORDER.index(s.kind))
        now[step.axis] = step.target
        found.append(step)
    return tuple(found)


def _step(axis: int, source: Placement, target: Placement) -> LayoutStep:
    found = kind(source, target)
    if not found:
        raise ConfigError(f"no step makes {source} into {target}; want Replicate() or Shard(dim) there")
    return LayoutStep(found, axis, source, target)


def _is_free(now: Sequence[Placement], axis: int, target: Placement) -> bool:
    return not isinstance(target, Shard) or all(p != target for i, p in enumerate(now) if i != axis)


# Prices.


class Price(NamedTuple):
    """What each rank sends, and how long it takes."""

    bytes: float
    seconds: float


FREE = Price(0.0, 0.0)


def price(found: str, nbytes: float, ranks: int, link: Link) -> Price:
    """Return the price of a step in a group of `ranks`.

    Parameters
    ----------
    found : str
        The kind of step.
    nbytes : float
        Of what the group holds together: the value itself, or its part along the other axes.
    ranks : int
    link : Link
        Between two ranks.

    Examples
    --------
    >>> price("AllReduce", 8e6, 4, Link(latency=0.0, bandwidth=1e9))
    Price(bytes=12000000.0, seconds=0.012)
    """
    if found in ("", "Slice") or ranks == 1:
        return FREE
    hops = ranks - 1
    sent = nbytes * hops / ranks
    if found == "AllReduce":
        hops, sent = 2 * hops, 2 * sent
    elif found == "AllToAll":  # of its part, each rank keeps one piece and sends the others
        sent /= ranks
    return Price(sent, hops * link.latency + sent / link.bandwidth)


def total(steps: Sequence[LayoutStep], source: Layout, nbytes: float, mesh: Mesh, link: Link) -> Price:
    """Return the price of steps one after the other, of a value of `nbytes` that starts at `source`."""
    now, sent, seconds = list(source), 0.0, 0.0
    for step in steps:
        others = prod(mesh.sizes[i] for i, p in enumerate(now) if i != step.axis and isinstance(p, Shard))
        each = price(step.kind, nbytes / others, mesh.sizes[step.axis], link)
        sent, seconds = sent + each.bytes, seconds + each.seconds
        now[step.axis] = step.target
    return Price(sent, seconds)


# Nodes.


def collective(step: LayoutStep, pieces: Sequence[ir.Value], made: Sequence[ir.Value], name: str) -> ir.Node:
    """Return the node that turns a group's pieces into those of another placement, both in rank order."""
    attributes: list[ir.Attr] = []
    if isinstance(step.source, Partial):
        attributes.append(ir.AttrString("reduction", step.source.reduction))
    if isinstance(step.source, Shard) and isinstance(step.target, Shard):
        attributes.append(ir.AttrInt64("split_axis", step.target.dim))
        attributes.append(ir.AttrInt64("concat_axis", step.source.dim))
    else:
        placements = (step.source, step.target)
        attributes += [ir.AttrInt64("axis", p.dim) for p in placements if isinstance(p, Shard)]
    return ir.Node(OWN_DOMAIN, step.kind, pieces, attributes, outputs=made, name=name)
