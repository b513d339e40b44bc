"""Edges as columns, which read as the rows that they are."""

from __future__ import annotations

import pytest

from dask_ferro.graph.bundling.partition import Dag, EdgeColumns, quotient_edges

EDGES = [(0, 1, 8.0), (0, 2, 16.0), (1, 3, 8.0), (2, 3, 4.0)]


def test_columns_are_a_sequence_of_rows() -> None:
    columns = EdgeColumns.of(EDGES)
    assert list(columns) == EDGES
    assert len(columns) == 4
    assert columns[-1] == (2, 3, 4.0)
    assert list(columns[1:3]) == EDGES[1:3]
    assert EdgeColumns.of(columns) is columns


@pytest.mark.parametrize("edges", [EDGES, []])
@pytest.mark.parametrize("values", [(), range(4)])
def test_a_graph_of_columns_is_the_same_graph(
    edges: list[tuple[int, int, float]], values: range | tuple[int, ...]
) -> None:
    kept = values if edges else ()
    pieces = [(0, 1), (2,), (3,)]
    both = (Dag([1.0] * 4, e, values=kept) for e in (edges, EdgeColumns.of(edges)))
    first, second = (quotient_edges(dag, pieces) for dag in both)
    assert first == second


def test_edges_that_go_backwards_are_named() -> None:
    with pytest.raises(ValueError, match=r"edge 1: got \(2, 1, 8.0\), wanted 0 <= src < dst < 3"):
        quotient_edges(Dag([1.0] * 3, EdgeColumns.of([(0, 1, 8.0), (2, 1, 8.0)])), [(0,), (1,), (2,)])
