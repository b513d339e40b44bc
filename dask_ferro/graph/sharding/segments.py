"""Form segments and buckets of a sharded graph: nodes that run as one task, and collectives that share messages.

A *segment* is a set of nodes of one rank that run as one task: the longest chain of collectives before each of them is
equally long, and the same collective needs them first.  So a collective starts as soon as its operands exist, and
nodes that it does not need, mostly weight gradients, are computed during the exchange, if they take as long as a task
does; shorter work, and a transpose or reshape, which an engine may do without a copy, is in the segment of its readers.

    rank 0   [matmul] --> AllReduce --> [relu, matmul] --> AllReduce --> ...
    rank 1   [matmul] ------^                    [dW] -----------------> (nothing waits)

A *bucket* is a set of collectives of one kind between the same ranks that do not depend on each other: they share
their messages, up to a size.  A value from another placement (`node_placement`) counts as a collective.  Numbers only
rise along edges, so segments and buckets form no cycle.  The worker of a rank and the exchange of a bucket are decided
elsewhere.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import chain
from math import inf, prod
from typing import NamedTuple, TypeAlias

import onnx_ir as ir

from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.sharding.node_placement import NO_PLACE, NodePlacement, placements
from dask_ferro.graph.sharding.redistribute import COLLECTIVES
from dask_ferro.graph.sharding.spmd import RANK, RANKS

# A bucket of this size gets no further value: the wait for its last value would cost more than another collective,
# which takes about 10 ms if Dask runs it.  The second number is a maximum of buckets: if there are more bytes,
# buckets are larger.
_BUCKET_BYTES, _BUCKETS = 8 * 2**20, 8
# Work that takes less is not a task of its own: a task with its messages takes about 0.2 ms, and its values are stored.
_SHORT_S = 2e-3
# Nodes whose result has the elements of their input, in another order or shape.
_LAYOUT = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


# The level of a node's placement, and the longest chain of collectives before the node there.
Depth: TypeAlias = tuple[int, int]


class RankSegment(NamedTuple):
    """Nodes of one rank that run as one task, by their positions in the graph, and the task's inputs and results.

    `before` is the number of the first bucket that needs it; the number of buckets if none does.
    """

    rank: int
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    before: int
    site: NodePlacement = NO_PLACE


class Bucket(NamedTuple):
    """Collectives of one kind that share their messages, with the attributes of each.

    `reads` and `makes` have for each rank the values that it sends and receives, one for each collective, and
    `nbytes` is the number of bytes that one rank sends; a value of unknown shape counts as 0.
    """

    kind: str
    ranks: tuple[int, ...]
    attributes: tuple[Mapping[str, int | str], ...]
    reads: tuple[tuple[str, ...], ...]
    makes: tuple[tuple[str, ...], ...]
    nbytes: int
    site: NodePlacement = NO_PLACE


class GraphCut(NamedTuple):
    """The segments and buckets of a sharded graph."""

    segments: tuple[RankSegment, ...]
    buckets: tuple[Bucket, ...]


def cut_segments(
    model: ir.Model, *, bucket_bytes: int | None = None, seconds: Sequence[float] | None = None
) -> GraphCut:
    """Return the segments and buckets of a graph from `spmd.lower`, sorted.

    A bucket of `bucket_bytes` gets no further value; the default depends on the bytes of all collectives.  If the
    projected `seconds` of each node are passed, short work that no collective needs is not a segment of its own.
    """
    nodes = list(model.graph)
    sites = placements(nodes)
    depth = _depths(nodes, sites)
    if bucket_bytes is None:
        total = sum(_bytes(node.inputs[0]) for node in nodes if is_collective(node))
        bucket_bytes = max(_BUCKET_BYTES, total // _BUCKETS)
    groups = _fill_buckets(nodes, depth, sites, bucket_bytes)
    number = {node: i for i, group in enumerate(groups) for node in group}
    first = _first_readers(nodes, number, len(groups))
    if seconds is not None:
        # Work that the collectives of its own depth do not need can wait for its readers.
        depth_of = {i: depth[group[0]] for i, group in enumerate(groups)}
        free = [n for n in nodes if n not in number and depth_of.get(first[n]) != depth[n]]
        depth = _delay_short_work(free, first, depth, sites, dict(zip(nodes, seconds, strict=True)))
    members: dict[tuple[int, Depth, int, NodePlacement], list[int]] = {}
    for position, node in enumerate(nodes):
        if node not in number:
            members.setdefault((_rank(node), depth[node], first[node], sites[node]), []).append(position)
    segments = tuple(
        _segment(model, nodes, rank, mine, before, site) for (rank, _, before, site), mine in members.items()
    )
    return GraphCut(segments, tuple(_bucket(group, sites[group[0]]) for group in groups))


def is_collective(node: ir.Node) -> bool:
    """Return whether a node is an exchange between ranks."""
    return node.domain == OWN_DOMAIN and node.op_type in COLLECTIVES


def _rank(node: ir.Node) -> int:
    return int(node.metadata_props.get(RANK, 0))


def _depths(nodes: Iterable[ir.Node], sites: Mapping[ir.Node, NodePlacement]) -> dict[ir.Node, Depth]:
    """Return the depth of each node.

    In a pipeline all nodes of an action have one level, because the action starts as a whole.  Otherwise all placements
    have level 0, and a change of placement counts as a collective.
    """
    level = _levels(nodes, sites)
    depths: dict[ir.Node, Depth] = {}
    for node in nodes:
        depth = 0
        for maker in node.predecessors():
            is_apart = sites[maker] != sites[node]
            if not (is_apart and level):
                depth = max(depth, depths[maker][1] + (is_collective(maker) or is_apart))
        depths[node] = level.get(sites[node], 0), depth
    return depths


def _levels(nodes: Iterable[ir.Node], sites: Mapping[ir.Node, NodePlacement]) -> dict[NodePlacement, int]:
    """Return the length of the longest chain of actions before each action; nothing without a pipeline."""
    if any(site.action is None for site in sites.values()):
        return {}
    before: dict[NodePlacement, set[NodePlacement]] = {site: set() for site in sites.values()}
    for node in nodes:
        before[sites[node]].update(sites[maker] for maker in node.predecessors())
    others = {site: makers - {site} for site, makers in before.items()}
    level: dict[NodePlacement, int] = {}
    for site in TopologicalSorter(others).static_order():
        level[site] = max((level[other] + 1 for other in others[site]), default=0)
    return level


def _fill_buckets(
    nodes: Sequence[ir.Node],
    depth: Mapping[ir.Node, Depth],
    sites: Mapping[ir.Node, NodePlacement],
    bucket_bytes: int,
) -> list[list[ir.Node]]:
    """Return the collectives of each bucket, by depth in collectives and then by how early their operands are ready.

    So the gradients of the last layers are exchanged while the gradients of the first are computed, in any order of
    nodes.
    """
    # The length of the longest chain of nodes before each.
    ready: dict[ir.Node, int] = {}
    for node in nodes:
        ready[node] = max((ready[maker] + 1 for maker in node.predecessors()), default=0)
    groups: list[list[ir.Node]] = []
    filling: dict[tuple[Depth, str, str, NodePlacement], tuple[list[ir.Node], float]] = {}
    for node in sorted(filter(is_collective, nodes), key=ready.__getitem__):
        key = (depth[node], node.op_type, node.metadata_props.get(RANKS, ""), sites[node])
        group, nbytes = filling.get(key, ([], inf))
        if nbytes >= bucket_bytes:
            group, nbytes = [], 0
            groups.append(group)
        group.append(node)
        filling[key] = group, nbytes + _bytes(node.inputs[0])
    return sorted(groups, key=lambda group: depth[group[0]])


def _bytes(value: ir.Value | None) -> int:
    if value is None or value.shape is None or value.dtype is None or not value.shape.is_static():
        return 0
    return int(prod(value.shape.numpy()) * value.dtype.itemsize)


def _first_readers(nodes: list[ir.Node], number: Mapping[ir.Node, int], last: int) -> dict[ir.Node, int]:
    """Return for each node the number of the first bucket that depends on it; `last` if none does."""
    first: dict[ir.Node, int] = {}
    for node in reversed(nodes):
        first[node] = min((number.get(r, first.get(r, last)) for r in node.successors()), default=last)
    return first


def _delay_short_work(
    free: Sequence[ir.Node],
    first: Mapping[ir.Node, int],
    depth: Mapping[ir.Node, Depth],
    sites: Mapping[ir.Node, NodePlacement],
    seconds: Mapping[ir.Node, float],
) -> dict[ir.Node, Depth]:
    """Return depths with which short work that no collective needs yet runs with its readers.

    `free` has the nodes that may move, in order; nodes of a pipeline's actions never move.  Nodes whose results only
    the caller reads run with the last nodes of their rank.
    """
    at = dict(depth)
    own = [(node, (_rank(node), sites[node])) for node in free if sites[node].action is None]
    work: dict[object, float] = {}
    last: dict[object, Depth] = {}
    latest = max(first.values(), default=0)
    for node, home in own:
        if first[node] == latest:
            last[home] = max(last.get(home, depth[node]), depth[node])
        if node.op_type not in _LAYOUT:
            key = home, depth[node], first[node]
            work[key] = work.get(key, 0.0) + seconds[node]
    for node, home in reversed(own):
        # A change of placement counts as a collective, so a reader in another placement comes later.
        readers = ((at[user][0], at[user][1] - (sites[user] != sites[node])) for user in node.successors())
        if node.op_type in _LAYOUT or work[home, depth[node], first[node]] <= _SHORT_S:
            at[node] = min(readers, default=last.get(home, depth[node]))
    return at


def _segment(
    model: ir.Model, nodes: list[ir.Node], rank: int, mine: list[int], before: int, site: NodePlacement
) -> RankSegment:
    own = [nodes[position] for position in mine]
    inside, ends = set(own), set(model.graph.outputs)
    read = dict.fromkeys(chain.from_iterable(node.inputs for node in own))
    results = chain.from_iterable(node.outputs for node in own)
    # These are part of the segment itself and are never sent between tasks.
    weights = {v for v in read if v is not None and v.is_initializer() and not v.is_graph_input()}
    inputs = [v for v in read if v is not None and v.producer() not in inside and v not in weights]
    # Values that only the segment reads stay in its task and are freed with it.
    outputs = [v for v in results if v in ends or not inside.issuperset(v.consumers())]
    return RankSegment(rank, tuple(mine), _present_names(inputs), _present_names(outputs), before, site)


def _present_names(values: Iterable[ir.Value | None]) -> tuple[str, ...]:
    """Return the names of values, without omitted operands."""
    return tuple(value.name for value in values if value is not None and value.name)


def _bucket(group: list[ir.Node], site: NodePlacement) -> Bucket:
    first = group[0]
    ranks = tuple(map(int, first.metadata_props[RANKS].split(",")))
    return Bucket(
        first.op_type,
        ranks,
        tuple({name: value.value for name, value in node.attributes.items()} for node in group),
        # Values by collective become values by rank.
        tuple(map(_present_names, zip(*(node.inputs for node in group), strict=True))),
        tuple(map(_present_names, zip(*(node.outputs for node in group), strict=True))),
        sum(_bytes(node.inputs[0]) for node in group),
        site,
    )
