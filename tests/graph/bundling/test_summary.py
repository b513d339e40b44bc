"""Costs in few numbers: work and critical path."""

import pytest

from dask_ferro.graph.bundling.partition import Dag
from dask_ferro.graph.bundling.summary import bound

DIAMOND = Dag([1.0] * 4, [(0, 1, 0.0), (0, 2, 0.0), (1, 3, 0.0), (2, 3, 0.0)])


@pytest.mark.parametrize(
    ("dag", "work", "path"),
    [
        pytest.param(Dag([], []), 0.0, 0.0, id="nothing takes no time"),
        pytest.param(Dag([1.0, 2.0, 4.0], [(0, 1, 1.0), (1, 2, 1.0)]), 7.0, 7.0, id="a chain takes its sum"),
        pytest.param(Dag([1.0, 2.0, 3.0], []), 6.0, 3.0, id="the longest of three"),
        pytest.param(DIAMOND, 4.0, 3.0, id="a diamond"),
    ],
)
def test_the_work_and_the_critical_path(dag, work, path):
    assert bound(dag) == pytest.approx((work, path))
