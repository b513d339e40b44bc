"""Which results leave first when not all may: a table, and that no other order saves more seconds in as many bytes."""

from __future__ import annotations

from itertools import permutations
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.runtime.elastic.recompute import rank

MB = 10**6


@pytest.mark.parametrize(
    ("results", "wanted"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([("a", MB, 1.0), ("b", MB, 9.0)], "ba", id="of one size, the one that took longer"),
        pytest.param([("a", 9 * MB, 1.0), ("b", MB, 1.0)], "ba", id="of one duration, the smaller"),
        pytest.param(
            [("a", 100 * MB, 20.0), ("b", MB, 1.0)], "ba", id="by the second for each byte, not by the second"
        ),
        pytest.param(
            [("a", MB, 3600.0), ("b", 10**9, inf)],
            "ba",
            id="results that could not be computed again go first",
        ),
        pytest.param([("a", 2, inf), ("b", 1, inf)], "ba", id="of those, the smaller"),
        pytest.param([("a", MB, 0.0), ("b", 10**9, 1e-4)], "ba", id="what costs nothing last"),
        pytest.param([("a", MB, 1.0), ("b", 0, 1.0)], "ba", id="one without bytes, at once"),
        pytest.param([("a", MB, nan), ("b", MB, 1.0)], "ba", id="a duration that is none says nothing"),
        pytest.param([("a", MB, -5.0), ("b", MB, 1.0)], "ba", id="nor one below nothing"),
        pytest.param([("a", MB, 1.0), ("b", MB, 1.0)], "ab", id="equal ones as they came"),
    ],
)
def test_the_order_is(results, wanted):
    assert [key for key, *_ in sorted(results, key=lambda row: rank(*row[1:]))] == list(wanted)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5), st.data())
def test_whenever_it_ends_no_other_order_had_saved_more_but_for_the_result_on_its_way(rows, data):
    room = data.draw(st.integers(0, sum(nbytes for nbytes, _ in rows)))

    def saved(order, partly):
        left, total = room, 0.0
        for size, seconds in order:
            nbytes = min(size, left)
            left -= nbytes
            if partly or nbytes == size:
                total += seconds * nbytes / size
        return total

    ours = saved(sorted(rows, key=lambda row: rank(row[0], float(row[1]))), partly=True)
    assert all(saved(order, partly=False) <= ours + 1e-9 for order in permutations(rows))
