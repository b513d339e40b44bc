"""The projected peak of results in memory, and bundles that keep to it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.graph.bundling.partition import (
    DASK,
    PICK_BYTES,
    Bundles,
    Dag,
    make_quotient,
    output_bytes,
    peak,
    price,
    schedule,
)
from dask_ferro.graph.bundling.tasks import TOLERANCE, TaskDag, bundle_tasks
from tests.graph.bundling.test_tasks import random_work, singles

MB = 1e6
MS = 1e-3


def peak_of(dag: Dag, bundles: Bundles, workers: int = 1) -> float:
    q = price(make_quotient(dag, bundles), DASK)
    return peak(q, schedule(q, workers=workers, overheads=DASK, ranks=lambda sources: range(len(sources))))


def pairs(count: int) -> Dag:
    """Return `count` tasks that make 10 MB each, and for each one that reads it."""
    return Dag([0.1] * (2 * count), [(2 * i, 2 * i + 1, 10 * MB) for i in range(count)])


@pytest.mark.parametrize(
    ("dag", "bundles", "workers", "wanted"),
    [
        pytest.param(pairs(1), ((0,), (1,)), 1, 10 * MB, id="a result until it is read"),
        pytest.param(pairs(1), ((0, 1),), 1, 0.0, id="inside a bundle it takes none"),
        pytest.param(pairs(4), ((0, 2, 4, 6), (1,), (3,), (5,), (7,)), 1, 40 * MB, id="a tuple until the last reader"),
        pytest.param(pairs(4), ((0, 2, 4, 6), (1, 3, 5, 7)), 1, 40 * MB, id="and to the end of a reader of all"),
        pytest.param(
            Dag([0.1] * 3, [(0, 1, MB), (0, 2, MB)], values=[0, 0]), ((0,), (1,), (2,)), 2, 2 * MB,
            id="a result that is sent to another worker counts twice",
        ),
    ],
)  # fmt: skip
def test_peaks_by_hand(dag: Dag, bundles: Bundles, workers: int, wanted: float) -> None:
    assert peak_of(dag, bundles, workers) == pytest.approx(wanted)


@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(50, 200))
def test_roots_that_no_worker_has_time_for_are_not_in_memory(workers: int, count: int) -> None:
    dag = Dag([MS] * (2 * count), [(2 * i, 2 * i + 1, MB) for i in range(count)])
    # While a result is on its way to its reader, its worker runs some more roots.
    rate = (MS + DASK.task_s) / DASK.hop_s
    assert peak_of(dag, singles(dag), workers) <= MB * workers * (3 + 1 / rate)


@pytest.mark.parametrize(
    ("nbytes", "picks", "sent"),
    [
        pytest.param(PICK_BYTES / 4, 0, 4 * PICK_BYTES / 4, id="little more is sent whole"),
        pytest.param(PICK_BYTES, 4, PICK_BYTES, id="much more is picked"),
    ],
)
def test_some_results_of_a_bundle_are_sent_whole_or_picked(nbytes: float, picks: int, sent: float) -> None:
    dag = Dag([0.1] * 8, [(2 * i, 2 * i + 1, nbytes) for i in range(4)])
    q = make_quotient(dag, ((0, 2, 4, 6), (1,), (3,), (5,), (7,)))
    found = price(q, DASK)
    assert found.size == pytest.approx(np.full(4, sent))
    assert found.seconds.sum() - q.seconds.sum() == pytest.approx(picks * DASK.task_s)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 8]))
def test_no_more_is_held_than_is_made_and_sent_and_no_less_than_the_largest_result(
    seed: int, workers: int
) -> None:
    dag = random_work(random.Random(seed)).dag
    q = make_quotient(dag, singles(dag))
    total, largest = output_bytes(q).sum(), max(output_bytes(q))
    assert largest <= peak_of(dag, singles(dag), workers) <= workers * total


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 8]), st.sampled_from([0.0, 1e6, 3e6]))
def test_bundles_take_no_more_memory_than_tasks_do_beyond_the_allowance(
    seed: int, workers: int, allowance: float
) -> None:
    work = random_work(random.Random(seed))
    # Without shares, nothing is cut after the choice.
    work = TaskDag(work.dag, work.kinds, [0.0] * len(work.kinds))
    bundles = bundle_tasks(work, workers=workers, allowance=allowance)
    least = peak_of(work.dag, singles(work.dag), workers)
    # Which of several ready bundles runs first goes by their numbers, which are others here than in the search.
    assert peak_of(work.dag, bundles, workers) <= 1.5 * max(allowance, (1 + TOLERANCE) * least)


def test_where_memory_is_short_results_are_read_where_they_are_made() -> None:
    # Eight sums, each of eight results of 10 MB: packed across the level, all 64 would be there at once.
    seconds, edges = [], []
    for _ in range(8):
        first = len(seconds)
        seconds += [MS] * 9
        edges += [(first + i, first + 8, 10 * MB) for i in range(8)]
    dag = Dag(seconds, edges)
    bundles = bundle_tasks(TaskDag(dag, [0] * 72, [0.0] * 72), workers=2, allowance=0.0)
    assert len(bundles) < 24
    assert peak_of(dag, bundles, 2) < peak_of(dag, singles(dag), 2)
