"""Costs in few numbers: sums per operator, bounds, and the projection over chunks."""

from collections import Counter

import pytest

from dask_ferro.graph.bundling.partition import Dag
from dask_ferro.graph.bundling.plan import MODEL_INPUT, Bundle, Plan, ValueSource
from dask_ferro.graph.bundling.summary import bound, over_chunks
from dask_ferro.graph.cost.roofline import Cost

DIAMOND = Dag([1.0] * 4, [(0, 1, 0.0), (0, 2, 0.0), (1, 3, 0.0), (2, 3, 0.0)])


def made_of(*seconds, chain=True):
    """A plan of bundles of so many seconds, each after the one before."""
    bundles = tuple(
        Bundle(
            nodes=(i,),
            inputs=(),
            sources=(ValueSource(i - 1 if chain and i else MODEL_INPUT, 0),),
            outputs=(f"v{i}",),
            ops=Counter(["Relu"]),
            cost=Cost(0.0, 0.0, 0.0),
            seconds=s,
        )
        for i, s in enumerate(seconds)
    )
    return Plan(bundles, (ValueSource(len(seconds) - 1, 0),), sum(seconds))


@pytest.mark.parametrize(
    ("dag", "workers", "makespan"),
    [
        pytest.param(Dag([], []), 3, 0.0, id="nothing takes no time"),
        pytest.param(Dag([1.0, 2.0, 4.0], [(0, 1, 1.0), (1, 2, 1.0)]), 3, 7.0, id="a chain takes its sum"),
        pytest.param(Dag([1.0, 2.0, 3.0], []), 1, 6.0, id="one worker takes the work"),
        pytest.param(Dag([1.0, 2.0, 3.0], []), 3, 3.0, id="enough workers take the longest"),
        pytest.param(DIAMOND, 2, 3.0, id="a diamond on two"),
        pytest.param(DIAMOND, 1, 4.0, id="a diamond on one"),
    ],
)
def test_the_bound_is_work_over_workers_or_the_path(dag, workers, makespan):
    assert bound(dag).over(workers) == pytest.approx(makespan)


@pytest.mark.parametrize(
    ("seconds", "chunks", "workers", "slices", "makespan"),
    [
        pytest.param((1.0,), 8, 2, 1, 4.0, id="chunks are spread over the workers"),
        pytest.param((1.0,), 5, 2, 1, 3.0, id="an odd chunk keeps one worker busy"),
        pytest.param((1.0, 1.0), 1, 4, 1, 2.0, id="a chain is no faster for more workers"),
        pytest.param((1.0,), 2, 2, 10, 10.0, id="slices run one after the other"),
        pytest.param((0.5,), 100_000, 4, 1, 12_500.0, id="very many chunks are added at full use"),
    ],
)
def test_the_projection_over_chunks(seconds, chunks, workers, slices, makespan):
    projected = over_chunks(made_of(*seconds), chunks, workers=workers, slices=slices)
    # A task costs some milliseconds more.
    assert projected == pytest.approx(makespan, rel=0.01)
