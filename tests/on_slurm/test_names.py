"""Names that are the user's on a real SLURM: of jobs, which others may have too, and of workers."""

from __future__ import annotations

import asyncio

import pytest
from distributed import Client

import dask_ferro as ff
from dask_ferro.slurm.cancel_queue import Cancellation
from dask_ferro.slurm.site import SlurmSite
from tests.on_slurm.tools import command, queue, settings
from tests.waiting import until, until_async

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]

SCRIPT = "#!/bin/sh\n#SBATCH --begin=now+1hour\n#SBATCH --output=/dev/null\ntrue\n"


async def submitted(site: SlurmSite) -> set[str]:
    array = await site.submit(SCRIPT, [0, 1], "one")
    found = set(await site.queue())
    assert found == {f"{array}_0", f"{array}_1"}
    return found


def test_clusters_whose_jobs_have_one_name_end_their_own_jobs_only():
    """Each lists its own two jobs, and ends no others: by itself, or by the process that outlives it, which knows jobs
    by their ids where the site rewrites comments."""
    own, outlived, stays = (SlurmSite("shared", f"ferro-{word}") for word in "abc")

    async def scenario() -> None:
        await submitted(own)
        rewritten = await submitted(outlived)
        kept = await submitted(stays)
        assert len(queue("shared")) == 6
        for job in rewritten:
            command("scontrol", "update", f"jobid={job}", "comment=the site's")
        assert set(await outlived.queue()) == rewritten
        assert await Cancellation(own).all_gone((), 10.0)
        own.close(jobs_left=False)
        assert set(queue("shared")) == rewritten | kept
        outlived.close(jobs_left=True)
        await until_async(
            lambda: set(queue("shared")) == kept, "the end of its jobs", seen=lambda: queue("shared")
        )
        assert set(await stays.queue()) == kept

    try:
        asyncio.run(scenario())
    finally:
        command("scancel", "--name=shared")
        stays.close()
    until(lambda: queue("shared") == {}, "the end of all jobs")


def test_jobs_and_workers_have_the_names_that_they_were_given(slurm, tmp_path):
    """`squeue -n` finds the jobs; workers are named after the cluster."""
    own = settings(tmp_path) | {"cores": 2, "processes": 2, "memory": "800MB", "job_name": "mine"}
    with (
        ff.SLURMCluster(**own, queue="cpu", name="run") as made,
        Client(made) as client,
    ):
        made.scale(jobs=1)
        client.wait_for_workers(2, timeout=60)
        assert len(queue("mine")) == 1
        names = {str(worker["name"]) for worker in client.scheduler_info(n_workers=-1)["workers"].values()}
        assert names == {"run-0-0", "run-0-1"}
        assert made.job_name == "mine"
        until(lambda: made.plan == made.requested == names, "a plan with these names", seen=lambda: made.plan)
        (found,) = made.sync(made.reconcile)
        assert found.state == "running"
        assert found.name == "run-0"
        assert "bounds: 2 workers, pool default: 1 running)" in repr(made)
    assert queue("mine") == {}
