"""Parts of graphs: each task is in one, none waits for a later one, and each fits or is a task."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.flow.cut import cut_graph
from dask_ferro.graph.bundling.partition import Floats, Ints
from tests.each import every
from tests.flow.test_plan import stencil


class Part(NamedTuple):
    """Some tasks, and the bytes of results that cross their bounds."""

    tasks: list[int]
    held: float


def parts_of(
    seconds: Floats,
    edges: Floats,
    inside: list[bool],
    lasts: float,
    most: float = np.inf,
    holds: float = np.inf,
) -> list[Part]:
    def plan(tasks: Ints, held: float) -> Part | None:
        fits = seconds[tasks].sum() <= lasts or len(tasks) == 1
        return Part(tasks.tolist(), held) if fits and held <= holds else None

    return cut_graph(seconds, edges, inside, plan, int(min(most, 10**6)))


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_parts_are_all_tasks_in_an_order_that_works(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 60))
    seconds = rng.exponential(1e-3, count)
    edges = np.asarray(
        [
            (u, v, float(u + 1))
            for v in range(count)
            for u in sorted(rng.choice(v, min(v, int(rng.integers(0, 4))), replace=False))
        ]
    ).reshape(-1, 3)
    inside = (rng.random(count) < rng.choice([0.7, 0.95, 1.0])).tolist()
    lasts = float(rng.choice([0.0, 2e-3, 1e-2, 1.0]))
    parts = parts_of(seconds, edges, inside, lasts)
    assert parts == parts_of(seconds, edges, inside, lasts)
    assert sorted(task for part in parts for task in part.tasks) == np.flatnonzero(inside).tolist()
    assert all(len(part.tasks) == 1 or seconds[part.tasks].sum() <= lasts for part in parts)
    of = {task: p for p, part in enumerate(parts) for task in part.tasks}
    # By task, the part that it waits for, or is in, and by task outside, the first part that may wait for it.
    first = [of.get(v, 0) for v in range(count)]
    for u, v in edges[:, :2].astype(int).tolist():
        least = first[u] + (u in of and v not in of)
        assert v not in of or least <= of[v]
        first[v] = max(first[v], least)
    if all(inside):
        readers = [[of[int(v)] for a, v, _ in edges.tolist() if a == u] for u in range(count)]
        crossing = [
            sum(
                u + 1
                for u in range(count)
                if of[u] <= p <= max(readers[u], default=-1) and {of[u], *readers[u]} != {p}
            )
            for p in range(len(parts))
        ]
        assert [part.held for part in parts] == crossing


def stencil_parts(**limits: float) -> list[Part]:
    dag = stencil(12, 400, 1e-3)
    seconds, edges = np.asarray(dag.seconds), np.asarray(dag.edges)
    parts = parts_of(seconds, edges, [True] * len(seconds), **{"lasts": 1.0, **limits})
    assert all(0.375 < seconds[part.tasks].sum() <= 1.0 for part in parts)
    return parts


def test_a_long_stencil_is_cut_where_a_row_crosses() -> None:
    # A row and its neighbours on each side.
    assert all(part.held <= 2 * 8.0 * (12 + 2) for part in stencil_parts())


@every(
    ("limits", "count"),
    [
        pytest.param({}, 8, id="eight parts of 0.6 s"),
        pytest.param({"most": 8}, 8, id="as many as there may be"),
        pytest.param({"most": 7}, 0, id="more than there may be"),
        pytest.param({"holds": 8.0 * 12}, 0, id="no part fits"),
    ],
)
def test_a_graph_that_cannot_be_cut_has_no_parts(limits: dict[str, float], count: int) -> None:
    assert len(stencil_parts(**limits)) == count
