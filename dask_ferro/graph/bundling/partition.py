"""A graph of nodes as plain integers, and its quotient by a partition.

`Dag` holds all that a partition is made from: seconds of each node, bytes of each edge, and edges that must not be
cut.  `Quotient` is a partition of it together with the graph between its pieces; pieces are numbered in topological
order, so a loop over ``range(len(q))`` is a forward sweep.  `merged` contracts further and refuses to make a cycle.

    nodes   0 ─ 1 ─ 3        piece of   0 1 2 3          pieces   0 ─ 1
             ╲ 2 ╱           node       0 0 0 1

A partition without a cycle between its pieces is what "convex" means here: a piece can run as one task, because
everything that it needs can be ready before it starts.  Seconds and bytes are floats; nothing here knows ONNX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
# Value, src, dst, bytes.
Rows: TypeAlias = tuple[Ints, Ints, Ints, Floats]
Bundles: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Dag:
    """Nodes 0 .. n-1 in a topological order.

    Parameters
    ----------
    seconds : sequence of float
        Projected seconds of each node.
    edges : sequence of (src, dst, bytes), or array of three columns
        One row for each value and consumer; ``src < dst``.
    glued : sequence of (src, dst)
        Nodes that must share a bundle: sequences and optionals do not travel between tasks.
    values : sequence of int, optional
        The value that each row of `edges` carries, any distinct integers.  Without it, rows of one `src` with
        equal bytes are taken for one value with several consumers.
    """

    seconds: Sequence[float]
    edges: Sequence[tuple[int, int, float]] | Floats
    glued: Sequence[tuple[int, int]] = ()
    values: Sequence[int] | Ints = ()


@dataclass(frozen=True)
class Quotient:
    """Pieces in topological order, and the graph between them in compressed rows.

    Attributes
    ----------
    piece_of : array of int
        Piece of each node of the `Dag`.
    seconds, shares : array of float
        Of each piece: its seconds, and its part of what one piece may hold.
    kinds : array of int
        Of each piece; pieces of different kinds are never merged, and one of a kind below 0 with none.
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
    shares: Floats
    kinds: Ints
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
        ends = np.cumsum(np.bincount(self.piece_of, minlength=len(self))).tolist()
        nodes = np.argsort(self.piece_of, kind="stable").tolist()
        return tuple(tuple(nodes[a:b]) for a, b in zip([0, *ends], ends, strict=False))


def finest(dag: Dag, kinds: Ints | None = None, shares: Floats | None = None) -> Quotient:
    """Return one piece for each node, but one for nodes that must not be cut apart."""
    return _labelled(dag, _contracted(len(dag.seconds), dag.glued), kinds, shares)


def _labelled(dag: Dag, label: Ints, kinds: Ints | None = None, shares: Floats | None = None) -> Quotient:
    none, seconds = np.zeros(len(label)), np.asarray(dag.seconds, np.float64)
    shares = none if shares is None else shares
    return _quotient(
        label, label, seconds, shares, none.astype(np.int64) if kinds is None else kinds, _rows(dag)
    )


def partitioned(dag: Dag, bundles: Sequence[Sequence[int]]) -> Quotient:
    """Return the quotient of `dag` by bundles in topological order; ValueError where they are no such partition."""
    n = len(dag.seconds)
    label = np.full(n, -1, np.int64)
    for index, nodes in enumerate(bundles):
        label[list(nodes)] = index
    total = sum(map(len, bundles))
    if total != n or (label < 0).any():
        raise ValueError(f"bundles: got {total} nodes, wanted each of {n} exactly once")
    return _labelled(dag, label)


def merged(q: Quotient, label: Ints) -> Quotient:
    """Return `q` with the pieces of each label merged; labels are 0, 1, ... in a topological order.

    Raises
    ------
    ValueError
        If an edge would lead from one label to a lower one.
    """
    return _quotient(label[q.piece_of], label, q.seconds, q.shares, q.kinds, q.rows)


def _rows(dag: Dag) -> Rows:
    """Return the edges of `dag` as columns (value, src, dst, bytes)."""
    table = np.asarray(dag.edges, np.float64).reshape(-1, 3)
    (src, dst), size = table[:, :2].T.astype(np.int64), table[:, 2]
    # Rows of one source with equal bytes: two values counted as one make a transfer too cheap, never too dear.
    of = dag.values if len(dag.values) else src * len(src) + np.unique(size, return_inverse=True)[1]
    return np.asarray(of, np.int64), src, dst, size


def _quotient(
    piece_of: Ints, label: Ints, seconds: Floats, shares: Floats, kinds: Ints, rows: Rows
) -> Quotient:
    """Return the quotient by `label` of pieces with `seconds`, `shares`, `kinds` and `rows`."""
    n = int(label.max()) + 1 if len(label) else 0
    value, src, dst, size = rows
    src, dst = label[src], label[dst]
    if (src > dst).any():
        row = int(np.flatnonzero(src > dst)[0])
        raise ValueError(
            f"bundle {src[row]} comes after bundle {dst[row]}, which waits for it: they are not convex"
        )
    # Each value once for each piece that reads it.
    keep = np.flatnonzero(src != dst)
    keep = keep[np.unique(value[keep] * n + dst[keep], return_index=True)[1]]
    table = value[keep], src[keep], dst[keep], size[keep]
    edge, inverse = np.unique(table[1] * n + table[2], return_inverse=True)
    src, dst = np.divmod(edge, max(n, 1))
    of_kind = np.full(n, -1, np.int64)
    of_kind[label] = kinds
    return Quotient(
        piece_of,
        np.bincount(label, weights=seconds, minlength=n).astype(np.float64),
        np.bincount(label, weights=shares, minlength=n).astype(np.float64),
        of_kind,
        src,
        dst,
        np.bincount(inverse.reshape(-1), weights=table[3], minlength=len(edge)).astype(np.float64),
        np.argsort(dst, kind="stable"),
        np.concatenate([[0], np.cumsum(np.bincount(src, minlength=n))]),
        np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=n))]),
        table,
    )


def _contracted(n: int, glued: Sequence[tuple[int, int]]) -> Ints:
    """Label nodes so that glued ones agree: a pair takes all that lies between the two, so no cycle arises."""
    begins = np.zeros(n + 1, np.int64)
    for src, dst in glued:
        begins[src + 1] += 1
        begins[dst + 1] -= 1
    return np.cumsum(np.cumsum(begins[:n]) == 0) - 1
