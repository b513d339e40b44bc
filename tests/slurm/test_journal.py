"""The record of a cluster's jobs on a real SLURM, and its journal: killed and started again, it finds its jobs."""

from __future__ import annotations

import json
import operator
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client

from dask_ferro.runtime.records.journal import read
from dask_ferro.runtime.records.record import JobRecord
from dask_ferro.runtime.slurm.cluster import SLURMCluster
from tests.slurm import tools
from tests.slurm.tools import queue, watchdogs
from tests.standing import PROGRAM, command
from tests.waiting import until, until_async

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]

LOCAL_TEST = Path(__file__).resolve().parents[2] / "jobqueue_configs" / "local-test.yaml"
# A job that waits until it is released.
LATER = '    pools: {later: {job-extra-directives: ["--begin=now+1hour"], minimum: 1, maximum: 1}}\n    signal-ahead:'


def states(journal: Path) -> list[str]:
    """The states of all jobs, from the journal."""
    return [record.state for record in read(journal).records]


def test_killed_and_started_again_it_adopts_jobs_that_wait_and_ends_others(tmp_path: Path) -> None:
    name, journal = tmp_path.name, tmp_path / "jobs.journal"
    text = LOCAL_TEST.read_text(encoding="utf-8").replace("    signal-ahead:", LATER)
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    arguments = ("--config", "mine.yaml", "--name", name, "--minimum", 2, "--maximum", 2)
    kept = ("--journal", journal, "--keep", 60)
    with command(tmp_path, *arguments, *kept) as running:
        running.says("1 pending, 1 running")
        until(lambda: sorted(states(journal)) == ["pending", "running"], "the record of that")
        before = {record.pool: record for record in read(journal).records}
        address = running.says(r"scheduler +(\S+)")[1]
        live = tools.command(str(PROGRAM), "jobs", "--scheduler", address)
        assert re.search(rf"{before['default'].job_id} .* running ", live)
        running.ends(signal.SIGKILL)
    waits = before["later"]
    assert queue(name)[waits.job_id] == "PENDING"
    with command(tmp_path, *arguments, *kept) as running:
        address = running.says(r"scheduler +(\S+)")[1]
        until(lambda: "is adopted" in running.stderr, "an adoption", seen=lambda: running.stderr)
        tools.command("scontrol", "update", f"jobid={waits.job_id}", "StartTime=now")
        running.says("2 running")  # Dask takes the name of a worker that is still to come for one of its host
        with Client(address) as client:
            future = client.submit(operator.add, 20, 22, workers=[waits.name], pure=False)
            assert future.result(timeout=60) == 42
        assert len(queue(name)) == 2
        assert running.ends(signal.SIGINT) == 130
    assert queue(name) == {}
    told = json.loads(tools.command(str(PROGRAM), "jobs", "--journal", str(journal), "--json"))["jobs"]
    rows = {row["name"]: row for row in told}
    assert rows[waits.name]["job_id"] == waits.job_id
    assert rows[waits.name]["tasks"] == 1
    assert rows[waits.name]["ending"] == "its cluster ended"
    assert {row["state"] for row in told} == {"ended"}


def test_killed_with_its_watchdog_and_started_with_other_jobs_it_ends_those_of_before(tmp_path: Path) -> None:
    name, journal = tmp_path.name, tmp_path / "jobs.journal"
    text = LOCAL_TEST.read_text(encoding="utf-8")
    later = '    job-extra-directives: ["--begin=now+1hour"]\n    signal-ahead:'
    (tmp_path / "mine.yaml").write_text(text.replace("    signal-ahead:", later), encoding="utf-8")
    arguments = (
        "--config",
        "mine.yaml",
        "--name",
        name,
        "--minimum",
        2,
        "--maximum",
        2,
        "--journal",
        journal,
    )
    with command(tmp_path, *arguments) as running:
        running.says("  2 pending")
        before = queue(name)
        for number in watchdogs(name):
            os.kill(number, signal.SIGKILL)
        running.ends(signal.SIGKILL)
    assert queue(name) == before
    assert len(before) == 2
    # One more, whose number it had not heard when it was killed.
    words = ["--job-name", name, "--begin=now+1hour", f"--comment={read(journal).runs[-1].tag}.0123456789ab"]
    unheard = tools.command("sbatch", "--parsable", *words, "--wrap=sleep 1").strip()
    (tmp_path / "mine.yaml").write_text(
        (tmp_path / "mine.yaml").read_text(encoding="utf-8").replace("00:10:00", "00:20:00"), encoding="utf-8"
    )
    with command(tmp_path, *arguments) as running:
        running.says("  2 pending")
        assert running.stderr.count("is ended: jobs of pool 'default' are described otherwise now") == 2
        ended = f"job {unheard} of the previous run is ended: its cluster died before SLURM had answered"
        assert ended in running.stderr
        gone = {unheard, *before}
        until(lambda: len(queue(name)) == 2 and not queue(name).keys() & gone, "other jobs")
        assert running.ends(signal.SIGTERM) == 143
    assert queue(name) == {}
    assert {record.state for record in read(journal).records} == {"ended"}
    assert len(read(journal).records) == 4


async def test_jobs_tells_why_each_job_was_asked_for_and_why_it_ended(play: Callable[..., None]) -> None:
    broken = {"job_script_prologue": ["exit 3"], "job_extra_directives": []}
    async with play(**tools.LATER, pools={"broken": broken}) as cluster:

        async def found(count: int) -> bool:
            await cluster.reconcile()
            records[:] = await cluster.jobs()
            return sum(record.is_over for record in records) == count

        records: list[JobRecord] = []
        cluster.because("to see")
        cluster.request("default", 1)
        cluster.request("broken", 1)
        await cluster.wait_submitted()
        (first,) = [record for record in await cluster.jobs() if record.pool == "default"]
        assert (first.state, first.why) == ("pending", "to see")
        tools.command("scancel", first.job_id)
        await until_async(lambda: found(2), "the end of both", seen=lambda: records)
        await cluster.scale(1)
        await cluster.scale(0)
        await until_async(lambda: found(3), "the end of all", seen=lambda: records)
        one, _, other = records
        assert one.ending == "cancelled, and not by this cluster"
        assert one.node_seconds() == 0
        assert other.why.startswith(f"scale(1): at least 1 worker; replaces job {first.job_id}: cancelled")
        assert other.ending == "taken back before it started: scale(0): at most 0 workers"
        await until_async(
            lambda: _told(cluster, "FAILED (NonZeroExitCode), exit code 3"), "the status of the script"
        )


async def _told(cluster: SLURMCluster, ending: str) -> bool:
    return any(record.ending == ending for record in await cluster.jobs())
