"""Bundles of graphs whose best partition is known, then what holds for every graph."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.errors import InputError
from dask_ferro.graph.bundling.partition import DASK, Dag, Overheads, make_quotient, schedule
from dask_ferro.graph.bundling.plan import Granularity, choose
from tests.each import each, every

MS = 1e-3


def chains(*specs: tuple[int, int, float], root: bool = False, join: bool = False, size: float = 1e3) -> Dag:
    """(how many, ops in each, seconds of an op) chains, on one root and into one join if asked for."""
    seconds = [0.0] if root else []
    edges: list[tuple[int, int, float]] = []
    ends = []
    for count, length, op_seconds in specs:
        for _ in range(count):
            last = 0 if root else None
            for _ in range(length):
                if last is not None:
                    edges.append((last, len(seconds), size))
                last = len(seconds)
                seconds.append(op_seconds)
            ends.append(last)
    if join:
        edges += [(end, len(seconds), size) for end in ends if end is not None]
        seconds.append(0.0)
    return Dag(seconds, edges)


def modules(count: int, branches: int, each: float, *, towers: int = 1) -> Dag:
    """Towers of `count` modules: a node, `branches` beside each other, their join.  One join at the end."""
    seconds: list[float] = []
    edges: list[tuple[int, int, float]] = []
    tops = []
    for _ in range(towers):
        top = -1
        for _ in range(count):
            stem = len(seconds)
            seconds += [each] * (branches + 2)
            if top >= 0:
                edges.append((top, stem, 1e4))
            top = stem + branches + 1
            edges += [(stem, b, 1e4) for b in range(stem + 1, top)]
            edges += [(b, top, 1e4) for b in range(stem + 1, top)]
        tops.append(top)
    edges += [(top, len(seconds), 1e4) for top in tops]
    return Dag([*seconds, 0.0], edges)


def encoder(layers: int, each: float) -> Dag:
    """Layers of: norm, q k v, scores, context, projection, residual sum, norm, two products, residual sum."""
    edges: list[tuple[int, int, float]] = []
    for base in range(0, 11 * layers, 11):
        norm, q, k, v, scores, context, out, total, norm2, up, down = range(base, base + 11)
        if base:
            edges += [(base - 1, norm, 4e5), (base - 1, total, 4e5)]
        edges += [(norm, x, 4e5) for x in (q, k, v)]
        edges += [(q, scores, 4e5), (k, scores, 4e5), (scores, context, 4e5), (v, context, 4e5)]
        edges += [(context, out, 4e5), (out, total, 4e5), (total, norm2, 4e5), (norm2, up, 16e5)]
        edges += [(up, down, 16e5)]
    return Dag([each] * (11 * layers), sorted(edges))


def caterpillar(length: int, link: float, leaf: float) -> Dag:
    """A chain that a leaf hangs from at each link."""
    edges = [(2 * i, 2 * i + 1, 1e3) for i in range(length)]
    edges += [(2 * i, 2 * i + 2, 1e3) for i in range(length - 1)]
    return Dag([link, leaf] * length, sorted(edges))


def layered(layers: int, width: int, each: float) -> Dag:
    """Every node reads two of the layer before."""
    rng = random.Random(0)
    edges = [
        ((layer - 1) * width + source, layer * width + node, 1e5)
        for layer in range(1, layers)
        for node in range(width)
        for source in rng.sample(range(width), 2)
    ]
    return Dag([each] * (layers * width), edges)


def project(
    dag: Dag, bundles: Sequence[Sequence[int]], *, workers: int, overheads: Overheads = DASK
) -> float:
    return schedule(make_quotient(dag, bundles), workers=workers, overheads=overheads).seconds


def bound(dag: Dag, workers: int) -> float:
    """The larger of the critical path and a worker's share of the work."""
    finish = [0.0] * len(dag.seconds)
    into: list[list[int]] = [[] for _ in dag.seconds]
    for src, dst, _ in dag.edges:
        into[dst].append(src)
    for node, seconds in enumerate(dag.seconds):
        finish[node] = seconds + max((finish[u] for u in into[node]), default=0.0)
    return max(max(finish, default=0.0), sum(dag.seconds) / workers)


def check(dag: Dag, bundles: Sequence[Sequence[int]]) -> None:
    """A partition into ascending bundles, themselves in an order that every edge agrees with."""
    assert sorted(itertools.chain.from_iterable(bundles)) == list(range(len(dag.seconds)))
    assert all(list(nodes) == sorted(nodes) for nodes in bundles)
    home = {node: i for i, nodes in enumerate(bundles) for node in nodes}
    assert all(home[src] <= home[dst] for src, dst, _ in dag.edges)
    assert all(home[src] == home[dst] for src, dst in dag.glued)


# --- how many bundles ---------------------------------------------------------------------------------------


@every(
    ("dag", "workers"),
    [
        pytest.param(chains((1280, 1, 2e-6), root=True), 8, id="1,281 tiny ops are one bundle"),
        pytest.param(chains((1, 7, 0.3)), 8, id="a chain is one bundle"),
        pytest.param(chains((1, 20_000, MS)), 8, id="a long chain is one bundle"),
        pytest.param(encoder(12, MS), 8, id="an encoder at batch 1 is one bundle"),
        pytest.param(modules(9, 4, MS), 8, id="branches of a millisecond stay together"),
        pytest.param(chains((8, 5, 0.1)), 1, id="one worker gets one bundle"),
        pytest.param(chains((2, 1, 3 * MS)), 8, id="3 ms do not pay for a task of their own"),
        pytest.param(chains((50, 1, 0.0)), 8, id="nodes that cost nothing are one bundle"),
    ],
)
def test_one_bundle(dag: Dag, workers: int) -> None:
    assert len(choose(dag, workers=workers)) == 1


def test_branches_worth_many_tasks_stay_apart() -> None:
    dag = modules(9, 4, 50 * MS)
    bundles = choose(dag, workers=8).bundles()
    check(dag, bundles)
    home = {node: i for i, nodes in enumerate(bundles) for node in nodes}
    for stem in range(0, 54, 6):
        assert len({home[branch] for branch in range(stem + 1, stem + 5)}) == 4
    assert len(bundles) <= 9 * 5 + 1  # a join travels with the next stem


def test_towers_with_small_branches_are_cut_between_towers_only() -> None:
    dag = modules(10, 4, MS, towers=2)
    *towers, last = choose(dag, workers=8).bundles()
    first, second = sorted(towers)
    assert set(first) <= set(range(60))
    assert set(second) <= set(range(60, 120))
    assert len(last) <= 5  # the join, which may take the last milliseconds of each


@pytest.mark.parametrize("root", [False, True], ids=["on graph inputs", "on a root"])
def test_slow_ops_stay_apart_and_fast_ones_run_beside_them_in_few_bundles(root: bool) -> None:
    dag = chains((4, 1, 0.2), (200, 1, MS), root=root)
    bundles = [nodes for nodes in choose(dag, workers=8).bundles() if sum(dag.seconds[v] for v in nodes) > 0]
    slow, fast = range(root, 4 + root), len(dag.seconds) - 200
    assert all((node,) in bundles for node in slow)
    # The fast ones take as long as one of the slow; what a task costs, the root takes over.
    assert [round(len(nodes), -1) for nodes in bundles if nodes[0] >= fast] == [200]


# --- how long it takes --------------------------------------------------------------------------------------

BOUNDED: dict[str, tuple[Callable[..., Dag], dict[int, float]]] = {
    "wide 8x5": (lambda **k: chains((2, 5, 5 * MS), (6, 5, MS), **k), {2: 40, 4: 25, 8: 25, 16: 25}),
    "large-wide 32x10": (lambda **k: chains((16, 10, 5 * MS), (16, 10, MS), **k), {2: 480, 4: 240, 8: 120, 16: 60}),
    "large-wide 320x1": (lambda **k: chains((150, 1, 5 * MS), (170, 1, MS), **k), {2: 460, 4: 230, 8: 115, 16: 57.5}),
    "xlarge-wide 64x10": (lambda **k: chains((32, 10, 5 * MS), (32, 10, MS), **k), {2: 960, 4: 480, 8: 240, 16: 120}),
    "xlarge-wide 1280x1": (lambda **k: chains((4, 1, 5 * MS), (1276, 1, MS), **k), {2: 648, 4: 324, 8: 162, 16: 81}),
    "imbalanced": (lambda **k: chains((4, 1, 200 * MS), (200, 1, MS), **k), {2: 500, 4: 250, 8: 200, 16: 200}),
}  # fmt: skip


@every("root", [False, True], ids=["on graph inputs", "on a root"])
@every("join", [False, True], ids=["many outputs", "one join"])
@every("name", BOUNDED)
def test_projected_within_ten_percent_and_thirty_ms_of_the_bound(name, root, join):
    build, bounds = BOUNDED[name]
    dag = build(root=root, join=join)

    def is_near(workers):
        assert bound(dag, workers) == pytest.approx(bounds[workers] * MS)
        bundles = choose(dag, workers=workers).bundles()
        check(dag, bundles)
        assert project(dag, bundles, workers=workers) <= 1.1 * bounds[workers] * MS + 30 * MS

    each(bounds, is_near)


@pytest.mark.parametrize(
    ("dag", "workers", "ratio"),
    [
        pytest.param(caterpillar(1000, MS, 50 * MS), 8, 1.1, id="leaves on a spine run beside it"),
        pytest.param(chains((3, 10, 0.1)), 2, 1.1, id="three chains on two workers are cut"),
        pytest.param(layered(30, 40, 50 * MS), 8, 1.2, id="random wiring keeps eight workers busy"),
        pytest.param(chains((4, 10, 0.1), (1, 1, 1.0)), 5, 1.05, id="uneven chains fill five workers"),
    ],
)
def test_projected_near_the_bound(dag: Dag, workers: int, ratio: float) -> None:
    bundles = choose(dag, workers=workers).bundles()
    check(dag, bundles)
    assert project(dag, bundles, workers=workers) <= ratio * bound(dag, workers)


# --- where it is cut ----------------------------------------------------------------------------------------


# --- granularities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["auto", "op", "model", 1.0])
def test_no_nodes_no_bundles(granularity: Granularity) -> None:
    assert choose(Dag([], []), granularity, workers=2).bundles() == ()


@pytest.mark.parametrize(
    ("dag", "pieces"),
    [
        pytest.param(chains((1, 100, 0.1)), 10, id="a chain"),
        pytest.param(chains((100, 1, 0.1)), 10, id="independent nodes"),
        pytest.param(layered(20, 5, 0.1), 10, id="random wiring"),
        pytest.param(modules(10, 8, 0.1), 10, id="fork and join"),
    ],
)
def test_pieces_of_about_a_second(dag: Dag, pieces: int) -> None:
    bundles = choose(dag, 1.0, workers=4).bundles()
    check(dag, bundles)
    assert pieces <= len(bundles) <= 2 * pieces
    assert max(sum(dag.seconds[v] for v in nodes) for nodes in bundles) <= 1.4


@pytest.mark.parametrize("granularity", ["coarse", 0.0, -1.0, float("nan")])
def test_no_such_granularity(granularity: Granularity) -> None:
    with pytest.raises(InputError, match="granularity: got"):
        choose(chains((1, 3, MS)), granularity, workers=2)


def test_no_workers() -> None:
    with pytest.raises(InputError, match="workers: got 0"):
        choose(chains((1, 3, MS)), workers=0)


def test_an_edge_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="bundle 2 comes after bundle 1, which waits for it"):
        choose(Dag([1.0] * 3, [(0, 1, 8.0), (2, 1, 8.0)]), workers=2)


# --- glued edges --------------------------------------------------------------------------------------------


def test_glued_nodes_take_what_lies_between_them() -> None:
    # 0 -> 1 -> 2 and 0 -> 2 glued: a bundle of 0 and 2 alone would wait for 1, and 1 for it
    dag = Dag([1.0] * 4, [(0, 1, 8.0), (0, 2, 8.0), (1, 2, 8.0), (2, 3, 8.0)], glued=[(0, 2)])
    assert choose(dag, "op", workers=2).bundles() == ((0, 1, 2), (3,))


def test_two_glued_pairs_that_cross_are_one_bundle() -> None:
    # 0 -> 3 glued and 1 -> 2 glued, with 0 -> 2 and 1 -> 3: each pair would wait for the other's first half
    dag = Dag([1.0] * 4, [(0, 2, 8.0), (0, 3, 8.0), (1, 2, 8.0), (1, 3, 8.0)], glued=[(0, 3), (1, 2)])
    assert choose(dag, "op", workers=2).bundles() == ((0, 1, 2, 3),)


# --- edges between bundles, and the projection --------------------------------------------------------------


def test_a_value_is_counted_once_for_a_consuming_bundle() -> None:
    dag = Dag([1.0] * 4, [(0, 1, 8.0), (0, 2, 8.0), (0, 3, 8.0)])
    q = make_quotient(dag, [(0,), (1, 2), (3,)])
    assert (q.src.tolist(), q.dst.tolist(), q.size.tolist()) == ([0, 0], [1, 2], [8.0, 8.0])


def test_bundles_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="not convex"):
        project(chains((1, 3, 1.0)), [(0, 2), (1,)], workers=2)


def test_bundles_that_miss_a_node_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 nodes, wanted each of 3 exactly once"):
        project(chains((1, 3, 1.0)), [(0,), (1,)], workers=2)


COSTS = Overheads(task_s=1.0, hop_s=0.5, bytes_per_s=1e6, dispatch_s=0.25)


@pytest.mark.parametrize(
    ("dag", "bundles", "workers", "seconds"),
    [
        pytest.param(chains((1, 2, 3.0)), [(0, 1)], 1, 0.25 + 1 + 6, id="one bundle"),
        pytest.param(chains((1, 2, 3.0)), [(0,), (1,)], 1, 0.25 + 4 + 0.5 + 0.25 + 4, id="a hop costs its wait"),
        pytest.param(chains((2, 1, 3.0)), [(0,), (1,)], 2, 0.5 + 4, id="tasks are handed out in turn"),
        pytest.param(chains((2, 1, 3.0)), [(0,), (1,)], 1, 0.25 + 4 + 4, id="a worker runs one at a time"),
        pytest.param(Dag([3.0, 3.0, 3.0], [(0, 2, 1e6), (1, 2, 1e6)]), [(0,), (1,), (2,)], 2,
            0.5 + 4 + 0.5 + 0.25 + 1.0 + 4, id="bytes of the other worker are fetched"),
        pytest.param(Dag([1.0, 1.0, 9.0], [(1, 2, 0.0)]), [(0,), (1,), (2,)], 1, 0.25 + 2 + 2 + 10,
            id="the start of the longest way goes first, and its hop passes meanwhile"),
    ],
)  # fmt: skip
def test_projected(dag: Dag, bundles: list[tuple[int, ...]], workers: int, seconds: float) -> None:
    assert project(dag, bundles, workers=workers, overheads=COSTS) == pytest.approx(seconds)


# --- every graph --------------------------------------------------------------------------------------------


@st.composite
def dags(draw: st.DrawFn, glue: bool = True) -> Dag:
    n = draw(st.integers(1, 40))
    seconds = draw(
        st.lists(st.sampled_from([0.0, 1e-6, MS, 5 * MS, 30 * MS, 0.2, 1.7]), min_size=n, max_size=n)
    )
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=3 * n))
    sizes = st.sampled_from([0.0, 4.0, 1e5, 3e7])
    edges = [(min(p), max(p), draw(sizes)) for p in pairs if p[0] != p[1]]
    glued = draw(st.lists(st.sampled_from(edges), max_size=4)) if edges and glue else []
    return Dag(seconds, edges, [(u, v) for u, v, _ in glued])


granularities = st.sampled_from(["auto", "op", 1e-9, MS, 10 * MS, 0.1, 1.0])
crews = st.sampled_from([1, 2, 3, 8, 100])


@given(dags(), granularities, crews)
@settings(max_examples=120, deadline=None)
def test_bundles_are_a_convex_partition_and_glued_edges_stay_whole(dag, granularity, workers):
    check(dag, choose(dag, granularity, workers=workers).bundles())


@given(dags(), granularities, crews)
@settings(max_examples=50, deadline=None)
def test_the_same_graph_gives_the_same_bundles(dag: Dag, granularity: Granularity, workers: int) -> None:
    again = Dag(tuple(dag.seconds), tuple(dag.edges), tuple(dag.glued))
    first, second = (choose(one, granularity, workers=workers).bundles() for one in (dag, again))
    assert first == second


@given(dags(), crews)
@settings(max_examples=80, deadline=None)
def test_auto_is_never_worse_than_one_bundle_nor_than_ops(dag: Dag, workers: int) -> None:
    auto, ops, model = (
        project(dag, choose(dag, granularity, workers=workers).bundles(), workers=workers)
        for granularity in ("auto", "op", "model")
    )
    assert auto <= model
    assert auto <= 1.05 * ops + Overheads().hop_s  # one bundle is preferred to what gains less


@given(dags(glue=False), crews)
@settings(max_examples=50, deadline=None)
def test_no_projection_beats_the_bound(dag: Dag, workers: int) -> None:
    free = Overheads(task_s=0.0, hop_s=0.0, bytes_per_s=float("inf"), dispatch_s=0.0)
    bundles = choose(dag, "op", workers=workers).bundles()
    assert project(dag, bundles, workers=workers, overheads=free) >= bound(dag, workers) - 1e-9


# --- large graphs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dag",
    [
        pytest.param(chains((1, 100_000, MS)), id="chain"),
        pytest.param(chains((100_000, 1, MS)), id="independent"),
        pytest.param(modules(1_250, 8, MS, towers=8), id="eight towers of forks"),
        pytest.param(caterpillar(50_000, 1e-4, 10 * MS), id="leaves on a spine"),
    ],
)
def test_100_000_nodes_in_few_bundles_near_the_bound(dag: Dag) -> None:
    bundles = choose(dag, workers=8).bundles()
    assert len(bundles) <= 1500
    assert project(dag, bundles, workers=8) <= 1.1 * bound(dag, 8)
