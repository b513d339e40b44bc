"""The workloads: what is in them, what bounds them, and that Dask reads their names as they are meant."""

from __future__ import annotations

from collections import Counter

import pytest
from dask.utils import key_split
from distributed.utils import key_split_group
from hypothesis import given
from hypothesis import strategies as st
from simulated import generators
from simulated.generators import NAMES, build

from dask_ferro import testing as models
from dask_ferro.errors import InputError

# Their work is worth 1 to 4 s on 8 threads; ferroflow's are as published, scale-up and straggler for more threads.
PUBLISHED = ("wide", "large-wide", "xlarge-wide", "imbalanced")
SMALL = {
    "cholesky": {"nt": 4}, "gemm": {"nt": 2}, "sparse-gemm": {"nt": 4}, "skew": {"tasks": 12},
    "hot-block": {"tasks": 12}, "short": {"tasks": 24, "roots": 6}, "chains": {"count": 3, "length": 4},
    "random-dag": {"layers": 3, "width": 5}, "fork-join": {"stages": 2, "width": 3},
    "balanced-roots": {"per_thread": 2, "threads": 3}, "lognormal": {"tasks": 12}, "scale-up": {"tasks": 12},
    "straggler": {"tasks": 12}, "pinned": {"tasks": 6}, "wide": {}, "large-wide": {}, "xlarge-wide": {},
    "imbalanced": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("cholesky", {"potrf": 10, "trsm": 45, "syrk": 45, "gemm": 120}),
        ("gemm", {"tile-a": 36, "tile-b": 36, "product": 216}),
        ("sparse-gemm", {"panel": 12, "sparse-product": 371}),
        ("skew", {"skew": 160}),
        ("hot-block", {"block": 1, "hot": 800}),
        ("short", {"short-root": 40, "short": 960}),
        ("chains", {"op": 384, "fast-op": 192}),
        ("random-dag", {"random-dag": 240}),
        ("fork-join", {"fork": 200, "join": 5}),
        ("balanced-roots", {"balanced-root": 8, "balanced": 160}),
        ("lognormal", {"lognormal": 500}),
        ("scale-up", {"scale-up-root": 8, "scale-up": 400}),
        ("straggler", {"straggler": 200}),
        ("pinned", {"pinned-root": 6, "pinned": 40}),
        ("wide", {"wide-root": 1, "wide-slow": 10, "wide-fast": 30}),
        ("large-wide", {"wide-root": 1, "wide-slow": 160, "wide-fast": 160}),
        ("xlarge-wide", {"wide-root": 1, "wide-slow": 320, "wide-fast": 320}),
        ("imbalanced", {"imbalanced-root": 1, "imbalanced-long": 4, "imbalanced-brief": 200}),
    ],
)
def test_a_workload_has_so_many_tasks_of_each_kind(name, kinds):
    assert Counter(task.prefix for task in build(name).tasks) == kinds


@pytest.mark.parametrize("name", NAMES)
def test_dask_reads_prefix_and_group_as_they_are_meant(name):
    for task in build(name).tasks:
        assert key_split(task.key) == task.prefix
        assert key_split_group(task.key) == task.group


@pytest.mark.parametrize("name", [n for n in NAMES if n not in (*PUBLISHED, "pinned")])
def test_the_defaults_are_worth_one_to_four_seconds_on_eight_threads(name):
    threads = {"scale-up": 20, "straggler": 10}.get(name, 8)
    assert 0.99 <= build(name).lower_bound(threads) <= 4.0


@pytest.mark.parametrize("name", PUBLISHED)
def test_ferroflows_graphs_are_bounded_like_the_models_of_that_name(name):
    params = {"branches": 64, "length": 10, "skew": 0.5} if name == "xlarge-wide" else {}
    for threads in (2, 4, 8, 16):
        bound = models.lower_bound(name, threads, **params)
        assert build(name).lower_bound(threads) == pytest.approx(bound, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_every_task_stands_after_its_dependencies_and_no_key_twice(name):
    seen = set()
    for task in build(name, **SMALL[name]).tasks:
        assert set(task.dependencies) <= seen
        assert len(set(task.dependencies)) == len(task.dependencies)
        assert task.key not in seen
        seen.add(task.key)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_arguments_give_the_same_graph(name):
    assert build(name, **SMALL[name]) == build(name.replace("-", "_"), **SMALL[name])


@pytest.mark.parametrize("name", ["skew", "lognormal", "random-dag", "sparse-gemm"])
def test_another_seed_gives_another_graph_under_other_keys(name):
    one, other = build(name), build(name, seed=7)
    assert [t.seconds for t in one.tasks] != [t.seconds for t in other.tasks]
    assert not {t.key for t in one.tasks} & {t.key for t in other.tasks}


@given(st.integers(1, 8))
def test_cholesky_has_the_tasks_and_the_longest_chain_of_its_textbook(nt):
    graph = build("cholesky", nt=nt, seconds=1.0)
    kinds = Counter(task.prefix for task in graph.tasks)
    pairs, triples = nt * (nt - 1) // 2, nt * (nt - 1) * (nt - 2) // 6
    assert [kinds[k] for k in ("potrf", "trsm", "syrk", "gemm")] == [nt, pairs, pairs, triples]
    assert graph.critical_path == pytest.approx(0.75 + (nt - 1) * 2.75)  # trsm, syrk and potrf for each step


def test_rows_of_the_sparse_product_differ_in_work():
    tasks = [task for task in build("sparse-gemm").tasks if task.prefix == "sparse-product"]
    rows = sorted(Counter(task.key[1] for task in tasks).values())
    assert rows[-1] >= 4 * rows[0]
    assert abs(len(tasks) / 12**3 - 0.25) < 0.05


@pytest.mark.parametrize(("name", "mean", "most"), [("skew", 0.06, 5.5), ("lognormal", 0.04, 11.0)])
def test_heavy_tails_have_their_mean_and_are_cut(name, mean, most):
    seconds = sorted(task.seconds for task in build(name).tasks)
    assert sum(seconds) / len(seconds) == pytest.approx(mean)
    assert 4 * mean < seconds[-1] < most * mean
    assert sum(seconds[-len(seconds) // 10 :]) > 0.3 * sum(seconds)


def test_only_pinned_says_where_its_roots_start():
    assert {name: build(name).pinned for name in NAMES if build(name).pinned} == {"pinned": "one"}


def test_an_annotated_graph_says_how_long_its_tasks_take():
    plain, told = build("short"), build("short", annotated=True)
    assert all(task.annotated is None for task in plain.tasks)
    assert all(task.annotated == task.seconds for task in told.tasks)
    assert [t.key for t in plain.tasks] == [t.key for t in told.tasks]


@pytest.mark.parametrize(
    ("name", "params", "told"),
    [
        ("cholesky?", {}, "got 'cholesky?', wanted one of cholesky, gemm, "),
        ("cholesky", {"tiles": 4}, "workload cholesky: no parameter tiles; it takes nt, seconds, tile_bytes"),
    ],
    ids=["a name that is none", "a parameter that is none"],
)
def test_what_is_not_there_is_refused_with_what_is(name, params, told):
    with pytest.raises(InputError) as refused:
        build(name, **params)
    assert told in str(refused.value)


def test_the_table_has_every_generator_of_the_module():
    assert set(generators.WORKLOADS) == set(SMALL)
