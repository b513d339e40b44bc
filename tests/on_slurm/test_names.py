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


@pytest.mark.parametrize("end", ["all_gone", "watchdog"])
def test_clusters_whose_jobs_have_one_name_end_their_own_jobs_only(end):
    """Each lists its own two jobs of the four, and ends no others: by itself, and by the process that outlives it."""
    ours, theirs = SlurmSite("shared", f"ferro-a-{end}"), SlurmSite("shared", f"ferro-b-{end}")

    async def scenario() -> None:
        await submitted(ours)
        kept = await submitted(theirs)
        assert len(queue("shared")) == 4
        if end == "all_gone":
            assert await Cancellation(ours).all_gone((), 10.0)
        ours.close(jobs_left=end == "watchdog")
        await until_async(
            lambda: set(queue("shared")) == kept, "the end of ours", seen=lambda: queue("shared")
        )
        assert set(await theirs.queue()) == kept

    try:
        asyncio.run(scenario())
    finally:
        command("scancel", "--name=shared")
        theirs.close()
    until(lambda: queue("shared") == {}, "the end of all jobs")


async def test_a_watchdog_ends_jobs_whose_comment_the_site_has_rewritten():
    """It has their ids."""
    site = SlurmSite("rewritten", "ferro-c")

    for job in await submitted(site):
        command("scontrol", "update", f"jobid={job}", "comment=the site's")
    assert len(await site.queue()) == 2
    site.close(jobs_left=True)
    until(lambda: queue("rewritten") == {}, "the end of all jobs", seen=lambda: queue("rewritten"))


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
        printed = {name: text for name, text in made.get_logs(workers=False).items() if "logs/mine-" in name}
        assert any("distributed.nanny" in text for text in printed.values()), printed
    assert queue("mine") == {}
