"""A cluster for pipelines of four stages."""

from __future__ import annotations

from collections.abc import Iterator

import distributed
import pytest

import dask_ferro as ff
from dask_ferro.scheduler.bundling import enable_if_new
from tests.clusters import running
from tests.lower.ranks.runs import take_part
from tests.waiting import until


@pytest.fixture(scope="module")
def _four_processes() -> Iterator[distributed.Client]:
    with running(4, kind=ff.LocalCluster) as client:
        enable_if_new(client)
        yield client


@pytest.fixture
def four(_four_processes: distributed.Client) -> distributed.Client:
    """The client of four worker processes of one thread each, all of which can take part in a flow.

    A worker that has just started, also in place of one that a test killed, is left out until the scheduler knows
    where it listens.
    """
    until(lambda: _four_processes.run_on_scheduler(take_part, 4), "the workers' hubs")
    return _four_processes
