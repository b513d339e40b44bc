"""A cluster for pipelines of four stages."""

from __future__ import annotations

from collections.abc import Iterator

import distributed
import pytest

import dask_ferro as ff
from tests.clusters import running


@pytest.fixture(scope="module")
def four() -> Iterator[distributed.Client]:
    """The client of four worker processes of one thread each."""
    with running(4, kind=ff.LocalCluster) as client:
        yield client
