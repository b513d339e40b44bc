"""Which nodes of a sharded graph travel together, and which of its collectives do.

A *segment* is what one rank can compute in one go: its nodes that wait for as many collectives, one behind the
other, and that are waited for by the same collective first.  So a collective starts as soon as what it needs is
there, and what nobody waits for yet, weight gradients mostly, is computed while it is under way.

    rank 0   [matmul] --> AllReduce --> [relu, matmul] --> AllReduce --> ...
    rank 1   [matmul] ------^                    [dW] -----------------> (nobody waits)

A *bucket* is collectives of one kind between the same ranks that do not wait for each other: they share their
messages, up to a size.  Where a plan has nodes elsewhere (`node_placement`), what comes from there counts as a
collective.
Numbers only rise along edges, so segments and buckets never wait in a circle.
Which worker a rank is, and how a bucket is exchanged, is not known here.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import chain
from math import inf, prod
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement, placements
from dask_ferro.graph.sharding.redistribute import COLLECTIVES
from dask_ferro.graph.sharding.spmd import RANK, RANKS

# Buckets are closed at this size: beyond it the wait for the last of a bucket's values costs more than the 10 ms
# or so of tasks and hops that another collective would.
_BUCKET_BYTES = 8 * 2**20
# The last bucket is so much smaller, and each before it twice the next: what is exchanged when there is nothing left
# to compute is little.
_TAPER = 4


class RankSegment(NamedTuple):
    """Nodes that a rank computes in one go.

    Attributes
    ----------
    rank : int
    nodes : tuple of int
        Positions in the graph, ascending.
    inputs, outputs : tuple of str
        The values between which they lie.
    before : int
        Number of the first bucket that waits for it; the number of buckets where none does.
    site : NodePlacement
    """

    rank: int
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    before: int
    site: NodePlacement = UNPLACED


class Bucket(NamedTuple):
    """Collectives that are exchanged together.

    Attributes
    ----------
    kind : str
        "AllReduce", "ReduceScatter", "AllGather" or "AllToAll".
    ranks : tuple of int
    attributes : tuple of mapping
        Of each collective.
    reads, makes : tuple of tuple of str
        For each rank the values that it gives and gets, one for each collective.
    nbytes : int
        Of what one rank gives; 0 where shapes are not known.
    site : NodePlacement
    """

    kind: str
    ranks: tuple[int, ...]
    attributes: tuple[Mapping[str, int | str], ...]
    reads: tuple[tuple[str, ...], ...]
    makes: tuple[tuple[str, ...], ...]
    nbytes: int
    site: NodePlacement = UNPLACED


class Cut(NamedTuple):
    """A sharded graph in pieces."""

    segments: tuple[RankSegment, ...]
    buckets: tuple[Bucket, ...]


def cut(model: ir.Model, *, bucket_bytes: int = _BUCKET_BYTES) -> Cut:
    """Return the segments and buckets of a sharded graph.

    Parameters
    ----------
    model : onnx_ir.Model
        As `spmd.lower` makes it, sorted; nodes say in their metadata for which rank they are.
    bucket_bytes : int, optional
        What each rank gives to a bucket at most, if that is more than one value; 0: nothing shares messages.
    """
    nodes = list(model.graph)
    where = placements(nodes)
    waits = _depths(nodes, where)
    groups = _grouped(nodes, waits, where, bucket_bytes)
    number: dict[ir.Node, int] = {}
    for i, group in enumerate(groups):
        number |= dict.fromkeys(group, i)
    first = _first_readers(nodes, number, len(groups))
    found: dict[tuple[int, tuple[int, int], int, NodePlacement], list[int]] = {}
    for position, node in enumerate(nodes):
        if node not in number:
            found.setdefault((_rank(node), waits[node], first[node], where[node]), []).append(position)
    segments = tuple(
        _segment(model, nodes, rank, mine, before)._replace(site=site)
        for (rank, _, before, site), mine in found.items()
    )
    return Cut(segments, tuple(_bucket(group)._replace(site=where[group[0]]) for group in groups))


def is_collective(node: ir.Node) -> bool:
    """Return whether a node is an exchange between ranks."""
    return node.domain == OWN_DOMAIN and node.op_type in COLLECTIVES


def _rank(node: ir.Node) -> int:
    return int(node.metadata_props.get(RANK, 0))


def _depths(
    nodes: Iterable[ir.Node], where: Mapping[ir.Node, NodePlacement]
) -> dict[ir.Node, tuple[int, int]]:
    """For each node how far down its site is, and how many collectives behind each other it waits for there.

    In a pipeline an action's nodes wait together, as a schedule counts them: what of it could begin sooner does not.
    Otherwise all sites are at 0, and a change of site counts as a collective.
    """
    level = _levels(nodes, where)
    found: dict[ir.Node, tuple[int, int]] = {}
    for node in nodes:
        here = level.get(where[node], 0)
        depth = 0
        for maker in _makers(node):
            apart = where[maker] != where[node]
            if not (apart and level):
                depth = max(depth, found[maker][1] + (is_collective(maker) or apart))
        found[node] = here, depth
    return found


def _levels(nodes: Iterable[ir.Node], where: Mapping[ir.Node, NodePlacement]) -> dict[NodePlacement, int]:
    """How many actions of a pipeline, one behind the other, each of them waits for; nothing without a pipeline."""
    if any(site.action is None for site in where.values()):
        return {}
    before: dict[NodePlacement, set[NodePlacement]] = {site: set() for site in where.values()}
    for node in nodes:
        before[where[node]].update(where[maker] for maker in _makers(node))
    others = {site: sites - {site} for site, sites in before.items()}
    found: dict[NodePlacement, int] = {}
    for site in TopologicalSorter(others).static_order():
        found[site] = max((found[other] + 1 for other in others[site]), default=0)
    return found


def _makers(node: ir.Node) -> list[ir.Node]:
    return [maker for v in node.inputs if v is not None and (maker := v.producer()) is not None]


def _grouped(
    nodes: Sequence[ir.Node],
    waits: Mapping[ir.Node, tuple[int, int]],
    where: Mapping[ir.Node, NodePlacement],
    bucket_bytes: int,
) -> list[list[ir.Node]]:
    """Collectives by bucket: by how many others they wait for, then by how soon what they exchange can be there.

    So the gradients of the last layers are under way while those of the first are computed, wherever they stand.
    """
    found: dict[ir.Node, int] = {}  # the longest chain of nodes before each
    for node in nodes:
        found[node] = max((found[maker] + 1 for maker in _makers(node)), default=0)
    groups: list[list[ir.Node]] = []
    filling: dict[tuple[tuple[int, int], str, str, NodePlacement], tuple[list[ir.Node], int, int]] = {}
    for node in sorted(filter(is_collective, nodes), key=found.__getitem__, reverse=True):
        key = (waits[node], node.op_type, node.metadata_props.get(RANKS, ""), where[node])
        nbytes = _bytes(node.inputs[0])
        group, held, most = filling.get(key, ([], inf, bucket_bytes // _TAPER))
        if held + nbytes > most:
            most = most if not group else min(2 * most, bucket_bytes)
            group, held = [], 0
            groups.append(group)
        group.append(node)
        filling[key] = group, int(held) + nbytes, most
    return sorted((group[::-1] for group in reversed(groups)), key=lambda group: waits[group[0]])


def _bytes(value: ir.Value | None) -> int:
    if value is None or value.shape is None or value.dtype is None or not value.shape.is_static():
        return 0
    return int(prod(value.shape.numpy()) * value.dtype.itemsize)


def _first_readers(nodes: list[ir.Node], number: Mapping[ir.Node, int], last: int) -> dict[ir.Node, int]:
    """For each node the number of the first bucket that needs what it makes; `last` if none does."""
    found: dict[ir.Node, int] = {}
    for node in reversed(nodes):
        readers = chain.from_iterable(value.consumers() for value in node.outputs)
        found[node] = min((number.get(r, found.get(r, last)) for r in readers), default=last)
    return found


def _segment(model: ir.Model, nodes: list[ir.Node], rank: int, mine: list[int], before: int) -> RankSegment:
    own = [nodes[position] for position in mine]
    inside, ends = set(own), set(model.graph.outputs)
    read = dict.fromkeys(chain.from_iterable(node.inputs for node in own))
    made = chain.from_iterable(node.outputs for node in own)
    inputs = [v for v in read if v is not None and v.producer() not in inside and not _is_weight(v)]
    outputs = [v for v in made if v in ends or not inside.issuperset(v.consumers())]
    return RankSegment(rank, tuple(mine), _named(inputs), _named(outputs), before)


def _is_weight(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input()


def _named(values: Iterable[ir.Value | None]) -> tuple[str, ...]:
    """Return the names of values, without those that are left out."""
    return tuple(value.name for value in values if value is not None and value.name)


def _bucket(group: list[ir.Node]) -> Bucket:
    first = group[0]
    ranks = tuple(map(int, first.metadata_props[RANKS].split(",")))
    return Bucket(
        first.op_type,
        ranks,
        tuple(map(_attributes, group)),
        # From values by collective to values by rank.
        tuple(map(_named, zip(*(node.inputs for node in group), strict=True))),
        tuple(map(_named, zip(*(node.outputs for node in group), strict=True))),
        sum(_bytes(node.inputs[0]) for node in group),
    )


def _attributes(node: ir.Node) -> dict[str, int | str]:
    return {name: attribute.value for name, attribute in node.attributes.items()}
