"""Jobs in SLURM's queue that no cluster follows, and when they are cancelled."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dask_ferro.slurm.cancel_queue import Cancellation
from dask_ferro.slurm.job_book import JobBook
from dask_ferro.slurm.job_lifecycle import BatchJob, Patience
from dask_ferro.slurm.job_pools import JobPools
from dask_ferro.slurm.orphan_guard import new_tag
from dask_ferro.slurm.parsing import FORMAT
from dask_ferro.slurm.queue_follower import QueueFollower
from dask_ferro.slurm.site import SlurmSite
from dask_ferro.slurm.submit_queue import Submission

OURS, OTHERS = new_tag(), new_tag()
DEAD = OTHERS.replace(f"-{os.getpid()}-", "-999999999-")


def follower(site: SlurmSite, cluster: Any = None) -> QueueFollower:
    """Return one that follows job 1."""
    book, followed = JobBook(), BatchJob("default-0", "default", 0, 1, 0.0, job_id="1")
    book.request([followed])
    submission = Submission(site, lambda pool, first: "", lambda jobs: None, lambda jobs, words: None)
    pools = JobPools(dict, site, submission.trouble, cluster)
    return QueueFollower(cluster, site, book, submission, Cancellation(site), pools, Patience())


def line(job_id: str, state: str, tag: str) -> str:
    """Return a job as `squeue` lists it."""
    cells = {"JobArrayID": job_id, "JobID": job_id, "State": state, "Comment": f"{tag}.submission"}
    columns = (column.split(":") for column in FORMAT.split(","))
    return "".join(cells.get(name, "").ljust(int(width)) for name, width in columns)


@pytest.mark.parametrize(
    ("job_id", "tag", "looks", "cancelled"),
    [
        pytest.param("7", OURS, [(0.0, "RUNNING")], [], id="seen once: the queue may be old"),
        pytest.param("7", OURS, [(0.0, "RUNNING"), (2.9, "RUNNING")], [], id="seen for less than 3 s"),
        pytest.param("7", OURS, [(0.0, "RUNNING"), (3.0, "RUNNING")], ["7"], id="running for 3 s"),
        pytest.param("7", OURS, [(0.0, "PENDING"), (3.0, "PENDING")], ["7"], id="pending for 3 s"),
        pytest.param("7", OURS, [(0.0, "PENDING"), (3.0, "RUNNING")], ["7"], id="started meanwhile"),
        pytest.param("7_3", OURS, [(0.0, "PENDING"), (3.0, "PENDING")], ["7_3"], id="an element of an array"),
        pytest.param("7", OURS, [(0.0, "RUNNING"), (2.0, ""), (3.0, "RUNNING")], [], id="missing in between"),
        pytest.param("7", OURS, [(0.0, "RUNNING"), (3.0, "COMPLETING")], [], id="about to end"),
        pytest.param("7", OURS, [(0.0, "COMPLETED"), (3.0, "COMPLETED")], [], id="ended"),
        pytest.param("1", OURS, [(0.0, "RUNNING"), (3.0, "RUNNING")], [], id="followed"),
        pytest.param("7", OTHERS, [(0.0, "RUNNING"), (3.0, "RUNNING")], [], id="of another cluster"),
        pytest.param("7", DEAD, [(0.0, "RUNNING"), (3.0, "RUNNING")], ["7"], id="of a dead cluster"),
    ],
)
async def test_a_job_that_no_cluster_follows_is_cancelled(
    command: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    job_id: str,
    tag: str,
    looks: list[tuple[float, str]],
    cancelled: list[str],
) -> None:
    site = SlurmSite("test", OURS)
    looker = follower(site)
    for at, state in looks:
        command("squeue", f"echo '{line(job_id, state, tag)}'" if state else ":")
        monkeypatch.setattr("dask_ferro.slurm.queue_follower.time", lambda at=at: 1000.0 + at)
        looker._look_after_strays(await site.queue())
    assert list(looker.cancellation.jobs) == cancelled
    await looker.cancellation.close()
