"""A graph of nodes as plain integers, and its quotient by a partition.

`Dag` holds all that a partition is made from: seconds of each node, bytes of each edge, and edges that must not be
cut. `Quotient` is a partition of it together with the graph between its pieces; pieces are numbered in
topological order, so a loop over ``range(len(q))`` is a forward sweep.  `merged` contracts further and
refuses to make a cycle.

    nodes   0 ─ 1 ─ 3        piece of   0 1 2 3          pieces   0 ─ 1
             ╲ 2 ╱           node       0 0 0 1

A partition without a cycle between its pieces is what "convex" means here: a piece can run as one task,
because everything that it needs can be ready before it starts.  Seconds and bytes are floats; nothing here
knows ONNX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
# Value, src, dst, bytes.
Rows: TypeAlias = tuple[Ints, Ints, Ints, Floats]
Bundles: TypeAlias = tuple[tuple[int, ...], ...]


class EdgeColumns(Sequence[tuple[int, int, float]]):
    """The edges of a `Dag` as columns: of 100,000 nodes, rows of tuples take a quarter of a second to be read."""

    def __init__(self, src: Sequence[int] | Ints, dst: Sequence[int] | Ints, size: Floats) -> None:
        self.src, self.dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
        self.size = np.asarray(size, np.float64)

    def __len__(self) -> int:
        return len(self.src)

    @overload
    def __getitem__(self, at: int) -> tuple[int, int, float]: ...

    @overload
    def __getitem__(self, at: slice) -> EdgeColumns: ...

    def __getitem__(self, at: int | slice) -> tuple[int, int, float] | EdgeColumns:
        if isinstance(at, slice):
            return EdgeColumns(self.src[at], self.dst[at], self.size[at])
        return int(self.src[at]), int(self.dst[at]), float(self.size[at])

    @classmethod
    def of(cls, edges: Sequence[tuple[int, int, float]]) -> EdgeColumns:
        """Return edges as columns."""
        if isinstance(edges, EdgeColumns):
            return edges
        sources, targets, sizes = zip(*edges, strict=True) if len(edges) else ((), (), ())
        return cls(sources, targets, np.asarray(sizes, np.float64))


@dataclass(frozen=True)
class Dag:
    """Nodes 0 .. n-1 in a topological order.

    Parameters
    ----------
    seconds : sequence of float
        Projected seconds of each node.
    edges : sequence of (src, dst, bytes)
        One row for each value and consumer; ``src < dst``.
    glued : sequence of (src, dst)
        Nodes that must share a bundle: sequences and optionals do not travel between tasks.
    values : sequence of int, optional
        The value that each row of `edges` carries, any distinct integers.  Without it, rows of one `src` with
        equal bytes are taken for one value with several consumers.
    """

    seconds: Sequence[float]
    edges: Sequence[tuple[int, int, float]]
    glued: Sequence[tuple[int, int]] = ()
    values: Sequence[int] | Ints = ()


@dataclass(frozen=True)
class Quotient:
    """Pieces in topological order, and the graph between them in compressed rows.

    Attributes
    ----------
    piece_of : array of int
        Piece of each node of the `Dag`.
    seconds : array of float
        Of each piece.
    level : array of int
        A number for each piece that rises along every edge, and with the piece: merging pieces of one level
        can make no cycle.
    src, dst, size : array
        The edges between pieces, sorted, and the bytes that cross each.
    succ_at, pred_at : array of int
        The edges out of piece `v` are ``succ_at[v] : succ_at[v + 1]``; those into it are
        ``into[pred_at[v] : pred_at[v + 1]]``.
    rows : (value, src, dst, bytes)
        The edges value by value, each once for each consuming piece.
    """

    piece_of: Ints
    seconds: Floats
    level: Ints
    src: Ints
    dst: Ints
    size: Floats
    into: Ints
    succ_at: Ints
    pred_at: Ints
    rows: Rows

    def __len__(self) -> int:
        return len(self.seconds)

    def bundles(self) -> Bundles:
        """Return the nodes of each piece, ascending, pieces in topological order."""
        order = np.argsort(self.piece_of, kind="stable")
        ends = np.cumsum(np.bincount(self.piece_of, minlength=len(self))).tolist()
        nodes = order.tolist()
        return tuple(tuple(nodes[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)) if ends else ()


def rows_of(dag: Dag) -> Rows:
    """Return the edges of `dag` as columns (value, src, dst, bytes)."""
    n, m = len(dag.seconds), len(dag.edges)
    columns = EdgeColumns.of(dag.edges)
    src, dst, size = columns.src, columns.dst, columns.size
    wrong = np.flatnonzero((src < 0) | (src >= dst) | (dst >= n))
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"edge {row}: got {dag.edges[row]}, wanted 0 <= src < dst < {n}")
    if len(dag.values) not in (0, m):
        raise ValueError(f"values: got {len(dag.values)}, wanted one for each of {m} edges, or none")
    if len(dag.values):
        value = np.asarray(dag.values, np.int64)
    else:
        # Rows of one source with equal bytes: two values counted as one make a transfer too cheap, never too dear.
        value = np.unique(np.stack([src, size]), axis=1, return_inverse=True)[1].reshape(-1)
    return np.unique(value, return_inverse=True)[1].reshape(-1).astype(np.int64), src, dst, size


def finest(dag: Dag) -> Quotient:
    """Return one piece for each node, but one for nodes that must not be cut apart."""
    n = len(dag.seconds)
    return _by_label(dag, np.arange(n) if not dag.glued else _glued(n, dag))


def partitioned(dag: Dag, bundles: Sequence[Sequence[int]]) -> Quotient:
    """Return the quotient of `dag` by `bundles`; ValueError where they are no convex partition of it."""
    return _by_label(dag, _labels(dag, bundles))


def merged(q: Quotient, label: Ints) -> Quotient:
    """Return `q` with each piece merged into the piece that is its label, at that one's level.

    Raises
    ------
    ValueError
        If a level would no longer rise along an edge.
    """
    kept, group = np.unique(label, return_inverse=True)
    return _ordered(group.reshape(-1)[q.piece_of], group, q.seconds, q.level[kept], kept, q.rows)


def relevelled(q: Quotient) -> Quotient:
    """Return `q` with the longest distance from a source as level."""
    each = np.arange(len(q))
    return _ordered(q.piece_of, each, q.seconds, _levels(len(q), q.src, q.dst), each, q.rows)


def quotient_edges(dag: Dag, bundles: Sequence[Sequence[int]]) -> tuple[tuple[int, int, float], ...]:
    """Return (bundle, bundle, bytes) of every edge between bundles, ascending.

    Bundles are numbered as given.  A value that several nodes of a bundle read is counted once for that
    bundle.
    """
    label = _labels(dag, bundles)
    src, dst, size = _pairs(_crossing(label, rows_of(dag)), max(len(bundles), 1))
    return tuple(zip(src.tolist(), dst.tolist(), size.tolist(), strict=True))


def _labels(dag: Dag, bundles: Sequence[Sequence[int]]) -> Ints:
    label = np.full(len(dag.seconds), -1, np.int64)
    total = 0
    for index, nodes in enumerate(bundles):
        label[list(nodes)] = index
        total += len(nodes)
    if total != len(label) or (label < 0).any():
        raise ValueError(f"bundles: got {total} nodes, wanted each of {len(label)} exactly once")
    return label


def _crossing(label: Ints, rows: Rows) -> Rows:
    """Return the rows between different labels, each value once for each consuming label."""
    value, src, dst, size = rows
    src, dst = label[src], label[dst]
    keep = np.flatnonzero(src != dst)
    if len(keep):
        key = value[keep] * (int(dst.max()) + 1) + dst[keep]
        keep = keep[np.unique(key, return_index=True)[1]]
    return value[keep], src[keep], dst[keep], size[keep]


def _pairs(rows: Rows, n: int) -> tuple[Ints, Ints, Floats]:
    """Return the rows summed over the values between two pieces, sorted by (src, dst)."""
    _, src, dst, size = rows
    key, inverse = np.unique(src * n + dst, return_inverse=True)
    total = np.bincount(inverse.reshape(-1), weights=size, minlength=len(key))
    return key // n, key % n, total.astype(np.float64)


def _by_label(dag: Dag, label: Ints) -> Quotient:
    seconds, rows = np.asarray(dag.seconds, np.float64), rows_of(dag)
    _, first, group = np.unique(label, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    src, dst, _ = _pairs(_crossing(group, rows), max(len(first), 1))
    return _ordered(group, group, seconds, _levels(len(first), src, dst), first, rows)


def _ordered(piece_of: Ints, group: Ints, seconds: Floats, level: Ints, tie: Ints, rows: Rows) -> Quotient:
    """Return the quotient by `group` of pieces with `seconds` and `rows`, numbered by (level, tie)."""
    n = len(level)
    rank = np.empty(n, np.int64)
    order = np.lexsort((tie, level))
    rank[order] = np.arange(n)
    table = _crossing(rank[group], rows)
    src, dst, size = _pairs(table, max(n, 1))
    level = level[order]
    # The check that all passes rely on: a merge that closes a cycle violates it.
    if not (level[src] < level[dst]).all():
        raise ValueError("a merge would close a cycle: levels do not rise along every edge")
    return Quotient(
        rank[piece_of],
        np.bincount(rank[group], weights=seconds, minlength=n).astype(np.float64),
        level,
        src,
        dst,
        size,
        np.argsort(dst, kind="stable"),
        np.concatenate([[0], np.cumsum(np.bincount(src, minlength=n))]),
        np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=n))]),
        table,
    )


def _levels(n: int, src: Ints, dst: Ints) -> Ints:
    """Return each piece's longest distance from a source (Kahn's algorithm); ValueError on a cycle."""
    waits = np.bincount(dst, minlength=n).tolist()
    ends = np.searchsorted(src, np.arange(n), side="right").tolist()
    targets = dst.tolist()
    level = [0] * n
    ready = [v for v in range(n) if not waits[v]]
    # `ready` grows while it is read: a queue.
    for u in ready:
        above = level[u] + 1
        for v in targets[ends[u - 1] if u else 0 : ends[u]]:
            if level[v] < above:
                level[v] = above
            waits[v] -= 1
            if not waits[v]:
                ready.append(v)
    if len(ready) < n:
        raise ValueError(f"{n - len(ready)} of {n} bundles wait for each other: they are not convex")
    return np.asarray(level, np.int64)


def _glued(n: int, dag: Dag) -> Ints:
    """Label nodes so that glued ones agree and the quotient has no cycle.

    Merging the ends of an edge can close a cycle through nodes between them, so whole strongly connected
    components of the merged graph become pieces.
    """
    root = list(range(n))

    def find(v: int) -> int:
        while root[v] != v:
            # Path halving keeps each look-up short, whatever the order of `glued`.
            root[v] = root[root[v]]
            v = root[v]
        return v

    for a, b in dag.glued:
        low, high = sorted((find(a), find(b)))
        root[high] = low
    label = [find(v) for v in range(n)]
    targets: list[list[int]] = [[] for _ in range(n)]
    for u, v, _ in dag.edges:
        if label[u] != label[v]:
            targets[label[u]].append(label[v])
    component = _components(targets)
    return np.asarray([component[label[v]] for v in range(n)], np.int64)


def _components(targets: Sequence[Sequence[int]]) -> list[int]:
    """Return the strongly connected component of each node (Tarjan 1972, without recursion)."""
    n = len(targets)
    index, low, component = [-1] * n, [0] * n, [-1] * n
    stack: list[int] = []
    count = found = 0
    for start in range(n):
        if index[start] >= 0:
            continue
        # An explicit stack: a model's chain may have more nodes than Python's recursion limit.
        work = [(start, iter(targets[start]))]
        index[start] = low[start] = count
        count += 1
        stack.append(start)
        while work:
            v, rest = work[-1]
            for w in rest:
                if index[w] < 0:
                    index[w] = low[w] = count
                    count += 1
                    stack.append(w)
                    work.append((w, iter(targets[w])))
                    break
                if component[w] < 0:
                    low[v] = min(low[v], index[w])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[v])
                if low[v] == index[v]:
                    while component[v] < 0:
                        component[stack.pop()] = found
                    found += 1
    return component
