"""`ff.BatchCluster` on simulated commands of no known batch system, with real jobs."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.sites.batch import Batch
from tests.sites.conftest import Opened
from tests.waiting import finished, until

pytestmark = pytest.mark.cluster

Opens = Callable[..., Opened]


def test_a_lost_answer_an_empty_listing_and_a_scale_down_lose_nothing(described: Opens, batch: Batch) -> None:
    s = described(nothing="No unfinished job found", walltime="00:30:00", patience={"missing": 1.0})
    batch.does["submit"] = "loses answer"
    s.cluster.scale(2)
    s.connected(2)
    assert (len(batch.jobs), batch.count("submit")) == (2, 2)
    held = s.submit(20, 0.02)
    finished(held)
    batch.does["jobs"] = "empty"
    time.sleep(2.5)
    assert batch.alive() == [1, 2]
    batch.does.clear()
    s.cluster.scale(1)
    s.connected(1)
    until(lambda: len(batch.alive()) == 1, "one job", seen=batch.states)
    assert len(batch.jobs) == 2
    s.kept(held)
