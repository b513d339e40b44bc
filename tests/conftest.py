"""Clusters that the tests share: real ones, with worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import dask
import distributed
import pytest
from hypothesis import HealthCheck, settings

import dask_ferro as ff

# How long an example takes, or its making, says how busy the machine is: no test asserts a wall-clock time.
settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")


@pytest.fixture(autouse=True)
def _no_scheduler_is_left_behind() -> Iterator[None]:
    """Clients that close in another order than they were opened in leave Dask's `scheduler` setting behind."""
    before = dask.config.get("scheduler", None)
    yield
    if dask.config.get("scheduler", None) != before:
        dask.config.set(scheduler=before)


@pytest.fixture(scope="session")
def cluster() -> Iterator[distributed.LocalCluster]:
    """Two worker processes of one thread each."""
    with ff.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: distributed.LocalCluster) -> Iterator[distributed.Client]:
    """A client of the shared cluster, the default one while the test runs."""
    with distributed.Client(cluster) as client:
        yield client
