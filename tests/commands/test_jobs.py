"""`dask ferro jobs`: the jobs that a scheduler has a record of."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dask_ferro.cli import main
from dask_ferro.observe.cluster_rows import JOBS
from dask_ferro.scheduler.plugin import put_on
from dask_ferro.slurm.job_book import ClusterTables, JobBook
from dask_ferro.slurm.job_lifecycle import BatchJob, JobState
from tests.clusters import running

# Longer than a line.
WHY = f"at least 4 workers{' and more' * 20}"


def fill(book: JobBook) -> None:
    """Add a job that ran on two nodes, one that waits, and one that is submitted."""
    ran = BatchJob("default-0", "default", 0, 1, 1.0, "17", nodes=2)
    waits = BatchJob("gpu-1", "gpu", 1, 1, 41.0, "18_0", JobState.PENDING, submitted_at=41.0)
    book.because(f"scale(4): {WHY}")
    book.request([ran, waits, BatchJob("gpu-2", "gpu", 2, 1, 41.0)])
    ran.submitted_at, ran.started_at, ran.ended_at = 1.0, 31.0, 1231.0
    book.end(ran, "NODE_FAIL")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["jobs", *map(str, arguments)], prog_name="dask ferro")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("--scheduler", "tcp://127.0.0.1:1"), "no scheduler answers", id="nobody there"),
        pytest.param(("--scheduler-file", "nowhere"), "scheduler file 'nowhere'", id="no scheduler file"),
        pytest.param((), "no scheduler: give --scheduler ADDRESS", id="none named"),
    ],
)
def test_faults_are_one_line_and_status_2(arguments: tuple[str, ...], said: str) -> None:
    done = call(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.cluster
def test_a_scheduler_is_asked_and_one_without_a_record_says_so() -> None:
    with running(1, dashboard_address="127.0.0.1:0", processes=False, protocol="tcp") as client:
        at, book = ("--scheduler", client.cluster.scheduler_address), JobBook()
        done = call(*at)
        assert done.exit_code == 2
        assert "no cluster answers for its jobs and pools" in done.stderr

        class Tables:
            async def rows(self) -> list[dict[str, Any]]:
                return book.rows()

        tables = Tables()
        client.cluster.sync(
            put_on, ClusterTables({JOBS: tables.rows}), dask_scheduler=client.cluster.scheduler
        )
        assert call(*at).stdout == "no jobs\n"
        fill(book)
        shown = json.loads(call(*at, "--json").stdout)["jobs"]
        assert shown == book.rows()
        assert [row["node_seconds"] for row in shown] == [2400.0, 0.0, 0.0]
        lines = [" ".join(line.split()) for line in call(*at).stdout.splitlines()]
        assert any(line.startswith("17 default-0 default ended") for line in lines)
        assert any(f"30 s 20 min 2,400 scale(4): {WHY} NODE_FAIL" in line for line in lines)
        assert any(line.startswith("18_0 gpu-1 gpu pending") for line in lines)
        assert any(line.startswith("- gpu-2 gpu submitting") for line in lines)
        assert lines[-1] == "3 jobs: 1 submitting, 1 pending, 1 ended; 2,400 node-seconds"
