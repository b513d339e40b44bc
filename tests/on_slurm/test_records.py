"""The record of a cluster's jobs on a real SLURM; killed and started again, it finds them by their tag."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import time

import pytest

from dask_ferro.slurm.cluster import SLURMCluster
from dask_ferro.slurm.job_lifecycle import BatchJob, JobState
from dask_ferro.slurm.orphan_guard import new_tag
from tests.on_slurm import tools
from tests.on_slurm.tools import queue, watchdogs
from tests.standing import command
from tests.waiting import until, until_async

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]

LOCAL_TEST = Path(__file__).resolve().parents[2] / "jobqueue_configs" / "local-test.yaml"
# Jobs that wait until they are released.
LATER = '    job-extra-directives: ["--begin=now+1hour"]\n    retire-before:'


def test_killed_with_its_watchdog_and_started_again_a_cluster_cancels_the_jobs_of_before(
    tmp_path: Path,
) -> None:
    name, text = tmp_path.name, LOCAL_TEST.read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(text.replace("    retire-before:", LATER), encoding="utf-8")
    arguments = ("--config", "mine.yaml", "--name", name, "--minimum")
    with command(tmp_path, *arguments, 2) as running:
        running.says("  2 pending")
        before = queue(name)
        for number in watchdogs(name):
            os.kill(number, signal.SIGKILL)
        running.ends(signal.SIGKILL)
    assert queue(name) == before
    assert len(before) == 2
    others = {
        tools.command(
            "sbatch", "--parsable", "--job-name", name, "--begin=now+1hour", comment, "--wrap=true"
        ).strip()
        for comment in ("--comment=mine", f"--comment={new_tag()}.0123456789ab")
    }
    with command(tmp_path, *arguments, 0) as running:
        until(
            lambda: queue(name).keys() == others,
            "the end of jobs that nobody follows",
            seen=lambda: queue(name),
        )
        assert f"cancelled jobs that no cluster follows: {', '.join(sorted(before))}" in running.stderr
        assert running.ends(signal.SIGTERM) == 143
    assert queue(name).keys() == others
    tools.command("scancel", *others)


async def test_jobs_tells_why_each_job_was_asked_for_and_why_it_ended(play: Callable[..., None]) -> None:
    broken = {"job_script_prologue": ["exit 3"], "job_extra_directives": []}
    async with play(**tools.LATER, pools={"broken": broken}) as cluster:

        async def found(count: int) -> bool:
            await cluster.reconcile()
            records[:] = await cluster.jobs()
            return sum(record.state == JobState.ENDED for record in records) == count

        records: list[BatchJob] = []
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
        assert one.node_seconds(time()) == 0
        assert other.why == "scale(1): at least 1 worker"
        assert other.ending == "taken back before it started: scale(0): at most 0 workers"
        await until_async(
            lambda: _told(cluster, "FAILED (NonZeroExitCode), exit code 3"), "the status of the script"
        )


async def _told(cluster: SLURMCluster, ending: str) -> bool:
    return any(record.ending == ending for record in await cluster.jobs())
