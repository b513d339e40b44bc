"""Jobs that do no work, on a real SLURM: the overview names pool or queue, and the reason, within five seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dask_ferro.observe.top import take_snapshot
from tests.on_slurm.tools import Site, queue
from tests.waiting import until

# A client warns in its own thread, where an error would be a log.
pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default:dask_ferro. pool:UserWarning")]

# Seconds within which stuck work is named; and until SLURM has what is stuck: three jobs one after the other.
SOON, STUCK = 5.0, 20.0


def findings(site: Site, kind: str) -> list[Any]:
    found = site.client.run_on_scheduler(take_snapshot)["overview"]["findings"]
    return [one for one in found if one["what"] == kind]


def named(site: Site, kind: str, words: str) -> Any:
    """Wait until a finding of a kind says some words, and return it."""

    def found() -> list[Any]:
        return [one for one in findings(site, kind) if words in one["sentence"]]

    def seen() -> Any:
        told = site.client.run_on_scheduler(take_snapshot)
        return told["overview"], told["elastic"]

    return until(found, f"{kind}: {words}", seconds=SOON, every=0.1, seen=seen)[0]


def test_a_queue_that_does_not_move(site: Callable[..., Site]) -> None:
    s = site(job_extra_directives=["--begin=now+1hour"])
    s.cluster.adapt(minimum=0, maximum=2, interval=0.3)
    future = s.client.submit(abs, -7)
    until(lambda: "PENDING" in queue(s.cluster).values(), "a job in the queue", seconds=STUCK)
    told = named(s, "queue", "1 job of pool default in the batch system's queue")
    assert told["severity"] == "error"
    assert "0 workers at work: BeginTime" in told["sentence"]
    assert not future.done()
