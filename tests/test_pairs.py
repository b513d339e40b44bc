"""The choice of rows that cover all pairs."""

from itertools import combinations, product

import pytest

from tests.pairs import all_pairs, covering


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((2,), 0), ((3, 4), 12), ((2, 2, 2), 4), ((8, 3, 2, 2), 24), ((4, 7, 3, 2, 2), 30)],
)
def test_every_pair_is_in_a_row_and_rows_are_few(sizes, most):
    rows = list(product(*map(range, sizes)))
    kept = covering(rows)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(row[a], row[b]) for row in kept} == set(product(range(sizes[a]), range(sizes[b])))
    assert len(kept) <= most


def test_other_rows_are_for_soak():
    rows = all_pairs("ab", [1, 2], [None, True])
    assert [row.values for row in rows] == list(product("ab", [1, 2], [None, True]))
    assert sum(not row.marks for row in rows) == 4
    assert {mark.name for row in rows for mark in row.marks} == {"soak"}
