"""`scale(n)` on a real SLURM is an order: obeyed while results are held, and what is lost with it is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import dask_ferro as ff
from tests.on_slurm.tools import queue, settings
from tests.waiting import finished, until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def noted(number: int, log: str) -> bytes:
    with open(log, "a") as file:
        file.write(f"{number}\n")
    return bytes(1000 + number)


def test_scale_to_zero_is_obeyed_while_a_client_holds_results(tmp_path: Path, caplog: Any) -> None:
    """Stock: 0.2 s.  A job used to stay as long as one result was held; now it is reported and computed again."""
    log = tmp_path / "ran"
    with (
        ff.SLURMCluster(**settings(tmp_path), queue="cpu") as cluster,
        Client(cluster) as client,
        caplog.at_level(logging.WARNING, "dask_ferro"),
    ):
        cluster.scale(2)
        client.wait_for_workers(2, timeout=60)
        held = client.map(noted, range(10), log=str(log))
        finished(held)
        cluster.scale(0)
        until(lambda: queue(cluster) == {}, "an empty queue", seconds=10.0, seen=lambda: queue(cluster))
        told = "jobs ended as scale() ordered: 10 results (9.81 kiB) held by no other worker are lost"
        until(lambda: told in caplog.text, "a warning of what is lost", seen=lambda: caplog.text)
        left = [event for _, event in client.get_events("ferro") if event["action"] == "left"]
        assert sum(event.get("results", 0) for event in left) == 10
        cluster.scale(1)
        assert [len(value) for value in client.gather(held)] == [1000 + i for i in range(10)]
        assert len(log.read_text().split()) == 20
        (worker,) = client.scheduler_info(n_workers=-1)["workers"]
        cluster.sync(cluster.scale_down, [worker])
        until(lambda: queue(cluster) == {}, "an empty queue", seconds=10.0, seen=lambda: queue(cluster))
        assert "bounds: 0 workers" in repr(cluster)
