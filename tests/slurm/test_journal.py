"""`dask ferro cluster --journal` on a real SLURM: killed and started again, it finds the jobs of before."""

from __future__ import annotations

import json
import operator
import re
import signal
import subprocess
from pathlib import Path

import pytest
from distributed import Client

from dask_ferro.runtime.jobjournal import read
from tests.standing import PROGRAM, command
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]

LOCAL_TEST = Path(__file__).resolve().parents[2] / "jobqueue_configs" / "local-test.yaml"
# A job that waits until somebody lets it start.
LATER = '    pools: {later: {job-extra-directives: ["--begin=now+1hour"], minimum: 1, maximum: 1}}\n    signal-ahead:'


def said(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


def left(name: str) -> dict[str, str]:
    """The states of the jobs of that name, by id."""
    return dict(line.split() for line in said("squeue", "-h", "-o", "%i %T", "--name", name).splitlines())


def states(journal: Path) -> list[str]:
    """The states of all jobs, as the journal tells them."""
    return [record.state for record in read(journal).records]


def test_killed_and_started_again_it_adopts_jobs_that_wait_and_ends_others(tmp_path: Path) -> None:
    name, journal = tmp_path.name, tmp_path / "jobs.journal"
    text = LOCAL_TEST.read_text(encoding="utf-8").replace("    signal-ahead:", LATER)
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    arguments = ("--config", "mine.yaml", "--name", name, "--min", 2, "--max", 2)
    kept = ("--journal", journal, "--keep", 60)
    with command(tmp_path, *arguments, *kept) as running:
        running.says("1 pending, 1 running")
        until(lambda: sorted(states(journal)) == ["pending", "running"], "the record of that")
        before = {record.pool: record for record in read(journal).records}
        address = running.says(r"scheduler +(\S+)")[1]
        live = said(str(PROGRAM), "jobs", "--scheduler", address)
        assert re.search(rf"{before['default'].job_id} .* running ", live)
        running.ends(signal.SIGKILL)
    waits = before["later"]
    assert left(name)[waits.job_id] == "PENDING"
    with command(tmp_path, *arguments, *kept) as running:
        address = running.says(r"scheduler +(\S+)")[1]
        until(lambda: "is adopted" in running.stderr, "an adoption", seen=lambda: running.stderr)
        said("scontrol", "update", f"jobid={waits.job_id}", "StartTime=now")
        with Client(address) as client:
            future = client.submit(operator.add, 20, 22, workers=[waits.name], pure=False)
            assert future.result(timeout=60) == 42
        running.says("2 running")
        assert len(left(name)) == 2
        assert running.ends(signal.SIGINT) == 130
    assert left(name) == {}
    told = json.loads(said(str(PROGRAM), "jobs", "--journal", str(journal), "--json"))["jobs"]
    rows = {row["name"]: row for row in told}
    assert rows[waits.name]["job_id"] == waits.job_id
    assert rows[waits.name]["tasks"] == 1
    assert rows[waits.name]["ending"] == "its cluster ended"
    assert {row["state"] for row in told} == {"ended"}
