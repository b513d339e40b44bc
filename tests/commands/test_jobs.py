"""`dask ferro jobs`: the jobs that a scheduler has a record of."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from distributed.protocol.pickle import dumps

from dask_ferro.cli import main
from dask_ferro.runtime.records.counts import JobCounts
from dask_ferro.runtime.records.record import JobRecord
from tests.clusters import running
from tests.waiting import result

# Longer than a line.
WHY = f"at least 4 workers{' and more' * 20}"
RECORDS = [
    JobRecord(
        "default-0", job_id="17", state="ended", asked=1.0, submitted=1.0, started=31.0, ended=1231.0, nodes=2,
        why=f"scale(4): {WHY}", ending="NODE_FAIL", tasks=1200,
    ),
    JobRecord("gpu-1", "gpu", "18_0", state="pending", asked=40.0, submitted=41.0, seen=101.0, why="adapt: work"),
    JobRecord("gpu-2", "gpu", why="adapt: 8 s of work", seen=101.0),
]  # fmt: skip


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
        at = ("--scheduler", client.cluster.scheduler_address)
        done = call(*at)
        assert done.exit_code == 2
        assert "keeps no record of jobs" in done.stderr
        scheduler: Any = client.scheduler
        client.sync(
            scheduler.register_scheduler_plugin, plugin=dumps(JobCounts()), name="ferro-jobs", idempotent=True
        )
        assert call(*at).stdout == "no jobs\n"
        name = str(client.cluster.scheduler.workers[next(iter(client.cluster.scheduler.workers))].name)
        record = JobRecord(name, workers=(name,), state="running")
        client.sync(scheduler.ferro_jobs_told, records=[one.as_dict() for one in (*RECORDS, record)])
        assert result(client.submit(int, 7)) == 7
        told = json.loads(call(*at, "--json").stdout)["jobs"]
        assert [JobRecord.from_dict(one) for one in told[:3]] == RECORDS
        assert [one["node_seconds"] for one in told] == [2400.0, 0.0, 0.0, 0.0]
        assert (told[3]["name"], told[3]["tasks"]) == (name, 1)
        lines = [" ".join(line.split()) for line in call(*at).stdout.splitlines()]
        assert any(line.startswith("17 default-0 default ended") for line in lines)
        assert any(f"30 s 1,200 s 2,400 1,200 scale(4): {WHY} NODE_FAIL" in line for line in lines)
        assert any(line.startswith("18_0 gpu-1 gpu pending") for line in lines)
        assert any(line.startswith("- gpu-2 gpu submitting") for line in lines)
        assert (
            lines[-1]
            == "4 jobs: 1 submitting, 1 pending, 1 running, 1 ended; 2,400 node-seconds, 1,201 tasks"
        )
