"""Upward ranks against the definition, and which graphs are narrow."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.policy.facts import Key
from dask_ferro.policy.placement import PlacementParameters
from dask_ferro.policy.ranking import is_narrow, order_by_rank, upward_ranks

Dependents = dict[Key, list[Key]]

WIDE = PlacementParameters().wide


def longest_way(key: Key, dependents: Dependents, seconds: dict[Key, float]) -> float:
    """The definition, followed along every way."""
    return seconds[key] + max((longest_way(d, dependents, seconds) for d in dependents[key]), default=0.0)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Dependents, dict[Key, float]]:
    """Up to nine tasks, each with any dependents among those after it."""
    count = draw(st.integers(0, 9))
    edges = draw(st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))))
    dependents: Dependents = {a: [b for b in range(count) if a < b and (a, b) in edges] for a in range(count)}
    seconds = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0]), min_size=count, max_size=count))
    return dependents, dict(enumerate(seconds))


@given(graphs(), st.randoms(use_true_random=False))
def test_ranks_equal_the_longest_of_all_ways(graph, chance) -> None:
    dependents, seconds = graph
    mixed = dict(chance.sample(list(dependents.items()), len(dependents)))
    assert upward_ranks(mixed, seconds) == {key: longest_way(key, dependents, seconds) for key in dependents}


@given(graphs())
def test_a_task_comes_before_all_that_wait_for_it(graph) -> None:
    dependents, seconds = graph
    positive = {key: each + 0.5 for key, each in seconds.items()}
    places = order_by_rank(upward_ranks(dependents, positive), {key: -key for key in dependents})
    assert sorted(places.values()) == list(range(len(dependents)))
    for key, after in dependents.items():
        assert all(places[key] < places[dependent] for dependent in after)


def test_dependents_outside_the_graph_count_for_nothing() -> None:
    assert upward_ranks({"a": ["b", "gone"], "b": ["gone"]}, {"a": 1.0, "b": 2.0}) == {"a": 3.0, "b": 2.0}


def test_keys_of_mixed_types_need_no_order() -> None:
    ranks = upward_ranks({"a": [("x", 0)], ("x", 0): [3], 3: []}, {"a": 1.0, ("x", 0): 1.0, 3: 1.0})
    assert order_by_rank(ranks, {"a": 0, ("x", 0): 1, 3: 2}) == {"a": 0, ("x", 0): 1, 3: 2}


def test_equal_ranks_keep_the_order_that_they_had() -> None:
    ranks = upward_ranks({"a": [], "b": [], "c": []}, {"a": 1.0, "b": 1.0, "c": 2.0})
    assert order_by_rank(ranks, {"a": 5, "b": 2, "c": 9}) == {"c": 0, "b": 1, "a": 2}


# -- narrow and wide ---------------------------------------------------------------------------------------


def cholesky(tiles: int) -> Dependents:
    """A tile Cholesky factorization: potrf, trsm, and one update of every tile to the right."""
    after: Dependents = {}
    for k in range(tiles):
        after["potrf", k] = [("trsm", k, i) for i in range(k + 1, tiles)]
        for i in range(k + 1, tiles):
            after["trsm", k, i] = [("update", k, *sorted((i, j))) for j in range(k + 1, tiles)]
            for j in range(i, tiles):
                after["update", k, i, j] = [_next(k + 1, i, j)]
    return after


def _next(k: int, i: int, j: int) -> Key:
    """What a tile waits for in the round after."""
    if i > k:
        return ("update", k, i, j)
    return ("trsm", k, j) if j > k else ("potrf", k)


def map_reduce(maps: int) -> Dependents:
    """Many maps, and a sum of each eight."""
    after: Dependents = {("map", n): [("sum", n // 8)] for n in range(maps)}
    return after | {("sum", n): [] for n in range(-(-maps // 8))}


def chains(count: int, length: int) -> Dependents:
    """So many chains of so many tasks."""
    return {
        (c, n): [(c, n + 1)] if n + 1 < length else []
        for c, n in itertools.product(range(count), range(length))
    }


@pytest.mark.parametrize(
    ("made", "threads", "wanted"),
    [
        pytest.param(
            partial(cholesky, 10), 8, True, id="a Cholesky of 10 x 10 tiles is narrow for 8 threads"
        ),
        pytest.param(partial(cholesky, 60), 8, False, id="one of 60 x 60 is wide"),
        pytest.param(partial(cholesky, 60), 64, True, id="but narrow for 64 threads"),
        pytest.param(partial(map_reduce, 800), 8, False, id="800 maps and their sums are wide for 8 threads"),
        pytest.param(partial(map_reduce, 40), 8, True, id="40 are narrow"),
        pytest.param(partial(chains, 8, 50), 8, True, id="a chain for each thread is narrow"),
        pytest.param(
            partial(chains, int(8 * WIDE) + 1, 50), 8, False, id="more chains than a few a thread are wide"
        ),
        pytest.param(dict, 8, True, id="nothing is narrow"),
    ],
)
def test_narrow(made: Callable[[], Dependents], threads: int, wanted: bool) -> None:
    graph = made()
    seconds = dict.fromkeys(graph, 0.04)
    assert is_narrow(graph, upward_ranks(graph, seconds), seconds, threads, WIDE) is wanted
    assert is_narrow(graph, upward_ranks(graph, seconds), seconds, threads, 1000.0)


def test_the_critical_path_of_a_cholesky_goes_first() -> None:
    graph = cholesky(6)
    seconds = dict.fromkeys(graph, 1.0)
    ranks = upward_ranks(graph, seconds)
    places = order_by_rank(ranks, {key: number for number, key in enumerate(graph)})
    assert max(ranks.values()) == 3 * 6 - 2
    assert places["trsm", 0, 1] < places["trsm", 0, 5]
    assert places["potrf", 1] < places["update", 0, 4, 5]


def test_one_long_task_makes_thousands_of_short_ones_no_narrow_graph() -> None:
    graph: dict[Key, list[Key]] = {**{f"load-{i}": ["sum"] for i in range(1000)}, "sum": [], "long": []}
    seconds = dict.fromkeys(graph, 0.01) | {"long": 60.0}
    assert not is_narrow(graph, upward_ranks(graph, seconds), seconds, 8, WIDE)
