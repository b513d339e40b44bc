"""`ff.SLURMCluster` on a real SLURM: submission, what the queue says, cancellation, and that nothing is ever left.

Jobs that need not run ask SLURM to begin in an hour.  Commands that fail are scripts named as SLURM's, first on the
PATH, that fail some times and then are the real ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

import dask_ferro as ff
from dask_ferro.elastic.scheduler_rpc import Roster
from dask_ferro.scheduler.plugin import put_on
from dask_ferro.slurm.cluster import SLURMCluster
from tests.on_slurm.tools import (
    LATER,
    busy,
    command,
    looked,
    nothing_left,
    pending,
    place_of,
    queue,
    queued,
    refuses,
    suspicion,
    watchdogs,
)
from tests.waiting import until_async

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


LOST = "Socket timed out on send/recv operation"


# -- submission ----------------------------------------------------------------------------------------------


async def test_eight_jobs_are_one_array(play, fake):
    calls = fake("sbatch", 0, ":")

    async with play(**LATER) as cluster:
        cluster.request("default", 3)
        cluster.request("default", 5)
        await cluster.wait_submitted()
        jobs = await looked(cluster, ["pending"] * 8)
        array = jobs[0].job_id.partition("_")[0]
        assert [job.job_id for job in jobs] == [f"{array}_{i}" for i in range(8)]
        assert [job.workers for job in jobs] == [(f"default-{i}",) for i in range(8)]
        await cluster.release(["default-2", "default-5"])
        assert set(queue(cluster)) == {f"{array}_{i}" for i in (0, 1, 3, 4, 6, 7)}
        cluster.request("default", 1)
        await cluster.wait_submitted()
        assert [job.name for job in await cluster.reconcile()][-1] == "default-8"  # no name comes twice
    assert [line.count("--array=0-7") for line in calls.read_text().splitlines()] == [1, 0]


async def test_submissions_that_fail_three_times_end_in_the_queue(play, fake):
    calls = fake("sbatch", 3, refuses("Resource temporarily unavailable"))

    async with play(**LATER) as cluster:
        cluster.request("default", 2)
        await until_async(lambda: cluster.pools[0].closed, "a pool that is closed")
        assert cluster.pools[0].closed == "Resource temporarily unavailable"
        assert [job.state for job in await cluster.reconcile()] == ["submitting"] * 2
        await cluster.wait_submitted()
        await looked(cluster, ["pending"] * 2)
        assert cluster.pools[0].closed == ""
    assert len(calls.read_text().splitlines()) == 4


async def test_a_limit_of_jobs_is_met_in_smaller_portions(play, fake):
    calls = fake("sbatch", 2, refuses("QOSMaxSubmitJobPerUserLimit"))

    async with play(**LATER) as cluster:
        await pending(cluster, 8)
    portions = [line.partition("--array=")[2] for line in calls.read_text().splitlines()]
    assert portions == ["0-7", "0-3", "0-1", "0-3", "0-1"]


async def test_a_submission_whose_answer_is_lost_is_not_made_twice(play, fake):
    fake("sbatch", 1, f'$real "$@" > /dev/null; {refuses(LOST)}')

    async with play(**LATER) as cluster:
        jobs = await pending(cluster, 3)
        assert set(queue(cluster)) == {job.job_id for job in jobs}


async def test_jobs_that_nobody_follows_are_cancelled(play, monkeypatch):
    monkeypatch.setattr("dask_ferro.slurm.queue_follower._STRAY", 0.5)

    async with play(**LATER) as cluster:
        cluster.request("default", 1)
        await cluster.wait_submitted()
        named = (f"--job-name={cluster.job_name}", f"--comment={cluster._tag}.lost")
        command("sbatch", "--begin=now+1hour", *named, "--output=/dev/null", "--wrap=true")
        jobs = await cluster.reconcile()
        assert len(queue(cluster)) == 2  # seen once, it may be the queue that is old
        await followed_alone(cluster, {jobs[0].job_id})


async def followed_alone(cluster: SLURMCluster, job_ids: set[str]) -> None:
    """Look until nothing but these jobs is in the queue."""

    async def holds() -> bool:
        assert {job.job_id for job in await cluster.reconcile()} == job_ids
        return set(queue(cluster)) == job_ids

    await until_async(holds, "the jobs that are followed alone", every=0.1, seen=lambda: queue(cluster))


async def test_a_refusal_for_good_raises_with_slurms_words(play):
    said = "Requested node configuration is not available"
    async with play(memory="400GB") as cluster:
        cluster.request("default", 2)
        with pytest.raises(ff.ConfigError, match=said):
            await cluster.wait_submitted()
        assert await cluster.reconcile() == ()
        assert said in cluster.pools[0].closed
        await cluster.wait_submitted()  # reported once


async def test_a_close_does_not_wait_for_submissions_that_are_tried_again(play, fake):
    calls = fake("sbatch", 100, refuses("words of another year"))

    async with play() as cluster:
        cluster.request("default", 2)
        await until_async(lambda: cluster.pools[0].closed, "a pool that is closed")
    assert len(calls.read_text().splitlines()) == 1


async def test_without_slurm_the_missing_command_is_named(play, monkeypatch, tmp_path):
    async with play() as cluster:
        with monkeypatch.context() as patch:
            patch.setenv("PATH", str(tmp_path))
            cluster.request("default", 1)
            with pytest.raises(ff.ConfigError, match="sbatch is not on the PATH"):
                await cluster.wait_submitted()


# -- what the queue says -------------------------------------------------------------------------------------


async def test_a_job_that_no_node_can_run_is_taken_back(play):
    """Such a job also holds up those behind it."""
    async with play(cores=64, patience={"stuck": 0.2}) as cluster:
        cluster.request("default", 1)
        await cluster.wait_submitted()
        await looked(cluster, [])
        assert cluster.pools[0].closed.endswith("PENDING (PartitionConfig)")
        await queued(cluster, lambda jobs: not jobs, "the end of all jobs")


async def test_where_each_new_job_is_held_no_more_are_asked_for(play):
    """Without that, a controller that looks once a second submits and cancels a job a second."""

    async with play(job_extra_directives=["--hold"]) as cluster:
        for _ in range(3):
            assert not cluster.pools[0].closed
            cluster.request("default", 1)
            await cluster.wait_submitted()
            await looked(cluster, [])
        assert "3 jobs ended before a worker came; the last, job" in cluster.pools[0].closed
        assert "JobHeldUser" in cluster.pools[0].closed


async def test_jobs_boot_run_and_are_requeued_under_new_names(play):
    async with play(cores=2, processes=2, patience={"ending": 10}) as cluster:
        cluster.request("default", 2)
        await cluster.wait_submitted()
        first, second = await looked(cluster, ["running"] * 2)
        assert first.workers == ("default-0-0", "default-0-1")
        assert cluster.plan == cluster.observed == {*first.workers, *second.workers}
        assert 1700 < first.ends_at - time.time() < 1801
        assert 0.5 < cluster.pools[0].start_up < 30
        command("scontrol", "requeue", first.job_id)
        await until_async(
            lambda: _state(cluster, "default-0", "pending"), "the requeued job to be pending", every=0.1
        )
        requeued, same = await looked(cluster, ["running"] * 2)
        assert (requeued.name, requeued.job_id) == (first.name, first.job_id)
        assert requeued.workers == ("default-0.1-0", "default-0.1-1")
        assert same.workers == second.workers
        command("scancel", second.job_id)
        assert [job.name for job in await looked(cluster, ["running"])] == ["default-0"]


async def _state(cluster, name, state):
    return (name, state) in {(job.name, job.state) for job in await cluster.reconcile()}


async def test_pools_are_kinds_of_jobs_behind_one_controller(play):
    gpu = {
        "queue": "gpu",
        "job_extra_directives": ["--gres=gpu:1", "--begin=now+1hour"],
        "worker_extra_args": ["--resources GPU=1"],
        "cost": 8,
    }

    async with play(pools={"gpu": gpu}, **LATER) as cluster:
        assert [(pool.name, pool.cost) for pool in cluster.pools] == [("default", 1.0), ("gpu", 8)]
        assert (cluster.resources("default"), cluster.resources("gpu")) == ({}, {"GPU": 1.0})
        assert "#SBATCH --gres=gpu:1" in cluster.job_script("gpu").splitlines()
        cluster.request("gpu", 1)
        cluster.request("default", 1)
        await cluster.wait_submitted()
        jobs = await looked(cluster, ["pending"] * 2)
        assert [(job.pool, job.name) for job in jobs] == [("gpu", "gpu-0"), ("default", "default-1")]
        assert command("squeue", "-h", "-o", "%P", "-j", jobs[0].job_id).strip() == "gpu"
        with pytest.raises(ff.ConfigError, match="no pool 'tpu'; there are default, gpu"):
            cluster.request("tpu", 1)


# -- the end -------------------------------------------------------------------------------------------------


async def removals(client: Client) -> list[dict[str, Any]]:
    events = [event for _, event in await client.get_events("all")]
    return [event for event in events if event.get("action") == "remove-worker"]


async def test_a_preempted_job_hands_its_long_task_over_within_what_its_partition_grants(play, tmp_path):
    """The walltime's notice is 60 s, GraceTime 5: once the task was lost, and its worker to blame."""
    starts = tmp_path / "starts"

    async with play(queue="low", cores=4) as cluster:
        cluster.request("default", 2)
        assert "FERRO_JOB_GRACE=5\n" in cluster.job_script()
        await looked(cluster, ["running"] * 2)
        async with Client(cluster, asynchronous=True) as client:
            await client.run_on_scheduler(put_on, part=Roster())
            task = client.submit(long_at_first, str(starts))
            runs_on = partial(client.run_on_scheduler, place_of, key=task.key)
            name = await until_async(runs_on, "the task to run", every=0.1)
            job = next(job for job in await cluster.reconcile() if name in job.workers)
            node = command("squeue", "-h", "-o", "%N", "-j", job.job_id).strip()
            with busy(node):
                assert await task == 2
            (first, *_) = await removals(client)
            assert (first["expected"], first["processing-tasks"]) == (True, set())
            assert await client.run_on_scheduler(suspicion, key=task.key) == 0


def long_at_first(starts: str) -> int:
    """Take 30 s, and return how often it was started; again, 0.1 s."""
    with open(starts, "a") as file:
        file.write("x")
    count = len(Path(starts).read_text())
    time.sleep(30.0 if count == 1 else 0.1)
    return count


async def test_jobs_that_are_released_while_they_are_submitted_do_not_stay(play, fake):
    fake("sbatch", 1, "sleep 0.3")

    async with play(**LATER) as cluster:
        cluster.request("default", 4)
        await asyncio.sleep(0.1)
        await cluster.release(["default-1"])
        await cluster.wait_submitted()
        jobs = await looked(cluster, ["pending"] * 3)
        assert set(queue(cluster)) == {job.job_id for job in jobs}


async def test_an_error_leaves_no_job(play):
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the cluster closes with it
        async with play(**LATER) as cluster:
            cluster.request("default", 2)
            await cluster.wait_submitted()
            cluster.request("default", 2)  # and these are on their way
            raise ZeroDivisionError
    assert queue(cluster) == {}
    assert watchdogs(cluster.job_name) == []


async def test_a_close_that_slurm_does_not_answer_leaves_its_jobs_to_the_watchdog(play, fake, monkeypatch):
    monkeypatch.setattr("dask_ferro.slurm.cluster._LAST_JOBS", 0.5)
    calls = fake("scancel", 3, "exit 1")
    async with play(leaves_nothing=False, **LATER) as cluster:
        cluster.request("default", 2)
        await cluster.wait_submitted()
    await nothing_left(cluster.job_name)
    assert len(calls.read_text().splitlines()) >= 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_job_outlives_the_process_of_its_cluster(number, tmp_path):
    program = """
        import os, sys, time
        from dask_ferro.slurm.cluster import SLURMCluster
        cluster = SLURMCluster(
            queue="cpu", cores=1, processes=1, memory="400MB", interface="lo", log_directory=sys.argv[1],
            scheduler_options={"dashboard_address": "127.0.0.1:0", "interface": "lo"},
            job_extra_directives=["--begin=now+1hour"],
        )
        async def submit():
            cluster.request("default", 3)
            await cluster.wait_submitted()
        cluster.sync(submit)
        if os.fork() == 0:  # what a process leaves behind must not hold the watchdog back
            time.sleep(60)
            os._exit(0)
        print(cluster.job_name, flush=True)
        time.sleep(60)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with child:
        name = child.stdout.readline().strip()
        assert len(queue(name)) == 3
        assert len(watchdogs(name)) == 1
        os.kill(child.pid, number)
    try:
        asyncio.run(nothing_left(name))
    finally:
        os.killpg(child.pid, signal.SIGKILL)
