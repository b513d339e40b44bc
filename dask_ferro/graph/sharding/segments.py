"""Segments and buckets of a sharded graph: nodes that run as one task, and collectives that share messages.

A *segment* is a set of nodes of one rank that run as one task: the longest chain of collectives before each of them is
equally long, and the same collective needs them first.  So a collective starts as soon as its operands exist, and
nodes that it does not need, mostly weight gradients, are computed during the exchange, if they take as long as a task
does; shorter work is in the segment of its readers.  A transpose or reshape is in the segment of its reader, whose
engine may need no copy.

    rank 0   [matmul] --> AllReduce --> [relu, matmul] --> AllReduce --> ...
    rank 1   [matmul] ------^                    [dW] -----------------> (nothing waits)

A *bucket* is a set of collectives of one kind between the same ranks that do not depend on each other: they share
their messages, up to a size.  A value from another placement (`node_placement`) counts as a collective.  Numbers only
rise along edges, so segments and buckets form no cycle.  The worker of a rank and the exchange of a bucket are decided
elsewhere.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import chain
from math import inf, prod
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement, placements
from dask_ferro.graph.sharding.redistribute import COLLECTIVES
from dask_ferro.graph.sharding.spmd import RANK, RANKS

# A bucket takes no further value from this size on: the wait for its last one would cost more than another collective,
# which takes about 10 ms where Dask runs it.  Where there are more bytes than for so many buckets, buckets are larger.
_BUCKET_BYTES, _BUCKETS = 8 * 2**20, 8
# A value that is smaller than a bucket by this factor is computed with those of another one if no other collective
# waits for it: the loss.
_SMALL = 2048
# A task of Dask's with its hop takes longer than this.
_SHORT_S = 2e-3
# Nodes whose result has the elements of their input, in another order or shape.
_LAYOUT = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


class RankSegment(NamedTuple):
    """Nodes of one rank that run as one task.

    Attributes
    ----------
    rank : int
    nodes : tuple of int
        Positions in the graph, ascending.
    inputs, outputs : tuple of str
        Names of the values that it reads and makes.
    before : int
        The number of the first bucket that needs it; the number of buckets if none does.
    site : NodePlacement
    """

    rank: int
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    before: int
    site: NodePlacement = UNPLACED


class Bucket(NamedTuple):
    """Collectives that share their messages.

    Attributes
    ----------
    kind : str
        "AllReduce", "ReduceScatter", "AllGather" or "AllToAll".
    ranks : tuple of int
    attributes : tuple of mapping
        Of each collective.
    reads, makes : tuple of tuple of str
        For each rank the values that it sends and receives, one for each collective.
    nbytes : int
        The bytes that one rank sends; values of unknown shape count as 0.
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
    """The segments and buckets of a sharded graph."""

    segments: tuple[RankSegment, ...]
    buckets: tuple[Bucket, ...]


def cut(model: ir.Model, *, bucket_bytes: int | None = None, seconds: Sequence[float] | None = None) -> Cut:
    """Return the segments and buckets of a sharded graph.

    Parameters
    ----------
    model : onnx_ir.Model
        From `spmd.lower`, sorted; the metadata of a node has its rank.
    bucket_bytes : int, optional
        The bytes of a rank after which a bucket takes no further value; 0: no collectives share messages.  By default
        by the bytes of all collectives.
    seconds : sequence of float, optional
        The projected seconds of each node.  Short work that no collective needs is then no segment of its own.
    """
    nodes = list(model.graph)
    where = placements(nodes)
    waits = _depths(nodes, where)
    if bucket_bytes is None:
        total = sum(_bytes(node.inputs[0]) for node in nodes if is_collective(node))
        bucket_bytes = max(_BUCKET_BYTES, total // _BUCKETS)
    groups = _grouped(nodes, waits, where, bucket_bytes)
    number = _numbers(groups, waits, where, _minor(nodes, bucket_bytes // _SMALL))
    first = _first_readers(nodes, number, len(groups))
    if seconds is not None:
        # What the collectives of its own depth do not need can wait for its readers.
        depth = {i: waits[group[0]] for i, group in enumerate(groups)}
        free = {n: first[n] for n in nodes if n not in number and depth.get(first[n]) != waits[n]}
        waits = _joined(free, waits, where, dict(zip(nodes, seconds, strict=True)))
    found: dict[tuple[int, tuple[int, int], int, NodePlacement], list[int]] = {}
    for position, node in enumerate(nodes):
        if node not in number:
            found.setdefault((_rank(node), waits[node], first[node], where[node]), []).append(position)
    segments = tuple(
        _segment(model, nodes, rank, mine, before, site) for (rank, _, before, site), mine in found.items()
    )
    return Cut(segments, tuple(_bucket(group, where[group[0]]) for group in groups))


def is_collective(node: ir.Node) -> bool:
    """Return whether a node is an exchange between ranks."""
    return node.domain == OWN_DOMAIN and node.op_type in COLLECTIVES


def _rank(node: ir.Node) -> int:
    return int(node.metadata_props.get(RANK, 0))


def _depths(
    nodes: Iterable[ir.Node], where: Mapping[ir.Node, NodePlacement]
) -> dict[ir.Node, tuple[int, int]]:
    """Return for each node the level of its placement, and the longest chain of collectives before it there.

    In a pipeline all nodes of an action have one level, because the action starts as a whole.  Otherwise all placements
    have level 0, and a change of placement counts as a collective.
    """
    level = _levels(nodes, where)
    found: dict[ir.Node, tuple[int, int]] = {}
    for node in nodes:
        here = level.get(where[node], 0)
        depth = 0
        for maker in node.predecessors():
            apart = where[maker] != where[node]
            if not (apart and level):
                depth = max(depth, found[maker][1] + (is_collective(maker) or apart))
        found[node] = here, depth
    return _beside_readers(found, where)


def _beside_readers(
    depths: dict[ir.Node, tuple[int, int]], where: Mapping[ir.Node, NodePlacement]
) -> dict[ir.Node, tuple[int, int]]:
    """Return the depths of nodes in order, of a transpose or reshape that of its first reader.

    An engine reads a transposed factor in place where product and transpose are in one segment; apart from it, the copy
    is made, kept and passed on.
    """
    found = dict(depths)
    for node in reversed(depths):
        readers = node.successors()
        if node.domain or node.op_type not in _LAYOUT or not readers or node.outputs[0].is_graph_output():
            continue
        homes = {(where[reader], _rank(reader), is_collective(reader)) for reader in readers}
        if homes == {(where[node], _rank(node), False)}:
            found[node] = min(found[reader] for reader in readers)
    return found


def _levels(nodes: Iterable[ir.Node], where: Mapping[ir.Node, NodePlacement]) -> dict[NodePlacement, int]:
    """Return the length of the longest chain of actions before each action; nothing without a pipeline."""
    if any(site.action is None for site in where.values()):
        return {}
    before: dict[NodePlacement, set[NodePlacement]] = {site: set() for site in where.values()}
    for node in nodes:
        before[where[node]].update(where[maker] for maker in node.predecessors())
    others = {site: sites - {site} for site, sites in before.items()}
    found: dict[NodePlacement, int] = {}
    for site in TopologicalSorter(others).static_order():
        found[site] = max((found[other] + 1 for other in others[site]), default=0)
    return found


def _grouped(
    nodes: Sequence[ir.Node],
    waits: Mapping[ir.Node, tuple[int, int]],
    where: Mapping[ir.Node, NodePlacement],
    bucket_bytes: int,
) -> list[list[ir.Node]]:
    """Return the collectives of each bucket, by depth in collectives and then by how early their operands are ready.

    So the gradients of the last layers are exchanged while those of the first are computed, whatever their order.
    """
    # The length of the longest chain of nodes before each.
    found: dict[ir.Node, int] = {}
    for node in nodes:
        found[node] = max((found[maker] + 1 for maker in node.predecessors()), default=0)
    groups: list[list[ir.Node]] = []
    filling: dict[tuple[tuple[int, int], str, str, NodePlacement], tuple[list[ir.Node], float]] = {}
    for node in sorted(filter(is_collective, nodes), key=found.__getitem__):
        key = (waits[node], node.op_type, node.metadata_props.get(RANKS, ""), where[node])
        group, held = filling.get(key, ([], inf))
        if held >= bucket_bytes:
            group, held = [], 0
            groups.append(group)
        group.append(node)
        filling[key] = group, held + _bytes(node.inputs[0])
    return sorted(groups, key=lambda group: waits[group[0]])


def _numbers(
    groups: Sequence[Sequence[ir.Node]],
    waits: Mapping[ir.Node, tuple[int, int]],
    where: Mapping[ir.Node, NodePlacement],
    minor: Collection[ir.Node],
) -> dict[ir.Node, int]:
    """Return for each collective the number of the bucket before which its operands are computed.

    It is the bucket's own, but for minor values that of the first bucket with others between the same ranks, of
    whatever kind: its terms' task makes theirs too.
    """
    found: dict[ir.Node, int] = {}
    firsts: dict[tuple[tuple[int, int], str, NodePlacement], int] = {}
    for number, group in reversed(list(enumerate(groups))):
        found |= dict.fromkeys(group, number)
        if not all(node in minor for node in group):
            firsts[waits[group[0]], group[0].metadata_props.get(RANKS, ""), where[group[0]]] = number
    for node, number in found.items():
        if node in minor:
            found[node] = firsts.get((waits[node], node.metadata_props.get(RANKS, ""), where[node]), number)
    return found


def _minor(nodes: Sequence[ir.Node], most: int) -> set[ir.Node]:
    """Return the collectives of at most so many bytes that no other one waits for; an unknown size is none of these."""
    # The nodes on which collectives depend.
    waited: set[ir.Node] = set()
    for node in reversed(nodes):
        if any(is_collective(user) or user in waited for user in node.successors()):
            waited.add(node)
    return {n for n in nodes if is_collective(n) and n not in waited and 0 < _bytes(n.inputs[0]) <= most}


def _bytes(value: ir.Value | None) -> int:
    if value is None or value.shape is None or value.dtype is None or not value.shape.is_static():
        return 0
    return int(prod(value.shape.numpy()) * value.dtype.itemsize)


def _joined(
    free: Mapping[ir.Node, int],
    waits: dict[ir.Node, tuple[int, int]],
    where: Mapping[ir.Node, NodePlacement],
    seconds: Mapping[ir.Node, float],
) -> dict[ir.Node, tuple[int, int]]:
    """Return depths with which short work that no collective needs yet runs with its readers.

    An optimizer's products of its state depend on no gradient: as a segment they would be a task that takes longer than
    they do.  Nodes whose results the caller alone reads run with the last ones of their rank.

    Parameters
    ----------
    free : mapping of onnx_ir.Node to int
        Those that no collective of their own depth needs, in order, and the number of the first bucket that needs each;
        of a pipeline's actions none is moved.
    """
    ends: dict[tuple[int, NodePlacement], tuple[int, int]] = {}
    last = max(free.values(), default=0)
    for node in (node for node, first in free.items() if first == last):
        home = _rank(node), where[node]
        ends[home] = max(ends.get(home, waits[node]), waits[node])
    own = {n: (_rank(n), waits[n], where[n], first) for n, first in free.items() if where[n].action is None}
    # Seconds of what would leave each segment: together they decide.
    moved: dict[Any, float] = {}
    at = waits
    for is_chosen in (False, True):
        at = dict(waits)
        for node, segment in reversed(own.items()):
            # A change of placement counts as a collective, so a reader elsewhere comes later.
            bounds = ((at[user][0], at[user][1] - (where[user] != where[node])) for user in node.successors())
            late = min(bounds, default=ends.get((_rank(node), where[node]), waits[node]))
            if late == waits[node]:
                continue
            if not is_chosen:
                moved[segment] = moved.get(segment, 0.0) + seconds[node]
            if not is_chosen or moved[segment] <= _SHORT_S:
                at[node] = late
    return at


def _first_readers(nodes: list[ir.Node], number: Mapping[ir.Node, int], last: int) -> dict[ir.Node, int]:
    """Return for each node the number of the first bucket that depends on it; `last` if none does."""
    found: dict[ir.Node, int] = {}
    for node in reversed(nodes):
        found[node] = min((number.get(r, found.get(r, last)) for r in node.successors()), default=last)
    return found


def _segment(
    model: ir.Model, nodes: list[ir.Node], rank: int, mine: list[int], before: int, site: NodePlacement
) -> RankSegment:
    own = [nodes[position] for position in mine]
    inside, ends = set(own), set(model.graph.outputs)
    read = dict.fromkeys(chain.from_iterable(node.inputs for node in own))
    made = chain.from_iterable(node.outputs for node in own)
    # These are part of the segment itself and are never sent between tasks.
    weights = {v for v in read if v is not None and v.is_initializer() and not v.is_graph_input()}
    inputs = [v for v in read if v is not None and v.producer() not in inside and v not in weights]
    # Values that only the segment reads stay in its task and are freed with it.
    outputs = [v for v in made if v in ends or not inside.issuperset(v.consumers())]
    return RankSegment(rank, tuple(mine), _named(inputs), _named(outputs), before, site)


def _named(values: Iterable[ir.Value | None]) -> tuple[str, ...]:
    """Return the names of values, without operands that are left out."""
    return tuple(value.name for value in values if value is not None and value.name)


def _bucket(group: list[ir.Node], site: NodePlacement) -> Bucket:
    first = group[0]
    ranks = tuple(map(int, first.metadata_props[RANKS].split(",")))
    return Bucket(
        first.op_type,
        ranks,
        tuple({name: value.value for name, value in node.attributes.items()} for node in group),
        # Values by collective become values by rank.
        tuple(map(_named, zip(*(node.inputs for node in group), strict=True))),
        tuple(map(_named, zip(*(node.outputs for node in group), strict=True))),
        sum(_bytes(node.inputs[0]) for node in group),
        site,
    )
