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

import pytest

import dask_ferro as ff
from dask_ferro.slurm.cluster import SLURMCluster
from tests.on_slurm.tools import (
    LATER,
    command,
    followed,
    looked,
    nothing_left,
    queue,
    queued,
    watchdogs,
)
from tests.waiting import until_async

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


LOST = "Socket timed out on send/recv operation"


# -- submission ----------------------------------------------------------------------------------------------


GPU = {
    "queue": "gpu",
    "job_extra_directives": ["--gres=gpu:1", "--begin=now+1hour"],
    "worker_extra_args": ["--resources GPU=1"],
    "cost": 8,
}


async def test_jobs_are_asked_for_and_released_and_an_error_leaves_none_of_them(play, fake, monkeypatch):
    """Eight in two requests are one array, one of them is released while `sbatch` runs; a pool is a kind of job."""
    monkeypatch.setattr("dask_ferro.slurm.queue_follower._STRAY", 0.5)
    calls = fake("sbatch", 1, "sleep 0.5")

    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the cluster closes with it
        async with play(pools={"gpu": GPU}, **LATER) as cluster:
            array = await eight_less_one(cluster)
            assert [line.count("--array=0-7") for line in calls.read_text().splitlines()] == [1]
            await cluster.release(["default-2", "default-5"])
            assert set(queue(cluster)) == {f"{array}_{i}" for i in (0, 3, 4, 6, 7)}
            await of_two_kinds(cluster)
            await with_a_stray(cluster)
            cluster.request("default", 2)  # and these are on their way
            raise ZeroDivisionError
    assert queue(cluster) == {}
    assert watchdogs(cluster.job_name) == []


async def eight_less_one(cluster: SLURMCluster) -> str:
    cluster.request("default", 3)
    cluster.request("default", 5)
    await asyncio.sleep(0.1)
    await cluster.release(["default-1"])
    await cluster.wait_submitted()
    jobs, stayed = await looked(cluster, ["pending"] * 7), (0, *range(2, 8))
    array = jobs[0].job_id.partition("_")[0]
    assert [job.job_id for job in jobs] == [f"{array}_{i}" for i in stayed]
    assert [job.workers for job in jobs] == [(f"default-{i}",) for i in stayed]
    assert set(queue(cluster)) == {job.job_id for job in jobs}
    return array


async def of_two_kinds(cluster: SLURMCluster) -> None:
    assert [(pool.name, pool.cost) for pool in cluster.pools] == [("default", 1.0), ("gpu", 8)]
    assert (cluster.resources("default"), cluster.resources("gpu")) == ({}, {"GPU": 1.0})
    assert "#SBATCH --gres=gpu:1" in cluster.job_script("gpu").splitlines()
    cluster.request("gpu", 1)
    cluster.request("default", 1)
    await cluster.wait_submitted()
    *_, gpu, other = await looked(cluster, ["pending"] * 7)
    names = [(job.pool, job.name) for job in (gpu, other)]
    assert names == [("gpu", "gpu-8"), ("default", "default-9")]  # no name comes twice
    assert command("squeue", "-h", "-o", "%P", "-j", gpu.job_id).strip() == "gpu"
    with pytest.raises(ff.InputError, match="no pool 'tpu'; there are default, gpu"):
        cluster.request("tpu", 1)


async def with_a_stray(cluster: SLURMCluster) -> None:
    """A job that nobody follows is cancelled, though not at the first sight: the queue may be old."""
    before = set(queue(cluster))
    named = (f"--job-name={cluster.job_name}", f"--comment={cluster._tag}.lost")
    command("sbatch", "--begin=now+1hour", *named, "--output=/dev/null", "--wrap=true")
    await cluster.reconcile()
    assert len(queue(cluster)) == len(before) + 1
    await followed_alone(cluster, before)


async def followed_alone(cluster: SLURMCluster, job_ids: set[str]) -> None:
    """Look until nothing but these jobs is in the queue."""

    async def holds() -> bool:
        assert {job.job_id for job in await followed(cluster)} == job_ids
        return set(queue(cluster)) == job_ids

    await until_async(holds, "the jobs that are followed alone", every=0.1, seen=lambda: queue(cluster))


# Kinds of jobs that are refused for good, by what is wrong with them, and the words.
REFUSALS = {
    "no such partition": ({"queue": "nosuch"}, "invalid partition specified: nosuch"),
    "no such node": ({"memory": "400GB"}, "Requested node configuration is not available"),
    "no folder for logs": ({"log_directory": "/dev/null/logs"}, "'/dev/null/logs' cannot be created"),
}
# Those that it accepts and never starts: they also hold up those behind them.
NEVER = {
    "no node can run it": ({"cores": 64}, "PENDING (PartitionConfig)"),
    "longer than its partition grants": (
        {"queue": "short", "walltime": "05:00:00"},
        "PENDING (PartitionTimeLimit)",
    ),
}


async def test_pools_close_whose_jobs_slurm_refuses_never_starts_or_holds_each_with_its_words(play):
    kinds = {name.replace(" ", "-"): row for name, row in (REFUSALS | NEVER).items()}
    pools = {name: options for name, (options, _) in kinds.items()} | {
        "held": {"job_extra_directives": ["--hold"]}
    }

    async with play(pools=pools, timeouts={"stuck": 1}) as cluster:

        def closed(name: str) -> str:
            return next(pool.closed for pool in cluster.pools if pool.name == name)

        for name, (_, said) in kinds.items():
            cluster.request(name, 2)
            if name.replace("-", " ") in REFUSALS:
                with pytest.raises(ff.InputError, match=said):
                    await cluster.wait_submitted()
                assert await cluster.reconcile() == ()
            await cluster.wait_submitted()  # a refusal is reported once
            await looked(cluster, [])
            assert said in closed(name)
        # One that is held is a failure, of which three close a pool: a controller that looks once a second would
        # submit and cancel a job a second.
        for _ in range(3):
            assert not closed("held")
            cluster.request("held", 1)
            await cluster.wait_submitted()
            await looked(cluster, [])
        assert "3 jobs ended before a worker came; the last, job" in closed("held")
        assert "JobHeldUser" in closed("held")
        await queued(cluster, lambda jobs: not jobs, "the end of all jobs")


# -- what the queue says -------------------------------------------------------------------------------------


async def test_jobs_boot_run_and_are_requeued_under_new_names(play):
    async with play(cores=2, processes=2, timeouts={"ending": 60}) as cluster:
        began = time.time()
        cluster.request("default", 2)
        await cluster.wait_submitted()
        first, second = await looked(cluster, ["running"] * 2)
        assert first.workers == ("default-0-0", "default-0-1")
        assert cluster.plan == cluster.observed == {*first.workers, *second.workers}
        now = time.time()
        assert 1800 - (now - began) - 1 < first.ends_at - now < 1801
        # The mean of what was measured, and of three seconds that are assumed before.
        assert 0.5 < cluster.pools[0].start_up < now - began + 3
        command("scontrol", "requeue", first.job_id)
        # A look may miss that it is pending in between.
        await until_async(
            lambda: _has(cluster, ("default-0.1-0", "default-0.1-1")),
            "the workers of the requeued job",
            every=0.1,
        )
        requeued, same = await looked(cluster, ["running"] * 2)
        assert (requeued.name, requeued.job_id) == (first.name, first.job_id)
        assert requeued.workers == ("default-0.1-0", "default-0.1-1")
        assert same.workers == second.workers
        command("scancel", second.job_id)
        assert [job.name for job in await looked(cluster, ["running"])] == ["default-0"]


async def _has(cluster, workers):
    return workers in [job.workers for job in await cluster.reconcile()]


# -- the end -------------------------------------------------------------------------------------------------


async def test_a_close_that_slurm_does_not_answer_leaves_its_jobs_to_the_watchdog(play, fake, monkeypatch):
    monkeypatch.setattr("dask_ferro.slurm.cluster._LAST_JOBS", 0.5)
    calls = fake("scancel", 3, "exit 1")
    async with play(leaves_nothing=False, **LATER) as cluster:
        cluster.request("default", 2)
        await cluster.wait_submitted()
    await nothing_left(cluster.job_name)
    assert len(calls.read_text().splitlines()) >= 4


PROGRAM = """
    import os, sys, time
    from dask_ferro.slurm.cluster import SLURMCluster
    cluster = SLURMCluster(
        queue="cpu", cores=1, processes=1, memory="400MB", interface="lo", log_directory=sys.argv[1],
        scheduler_options={"dashboard_address": "127.0.0.1:0", "interface": "lo"},
        job_extra_directives=["--begin=now+1hour"], job_name=sys.argv[2],
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


def test_no_job_outlives_the_process_of_its_cluster(tmp_path):
    """Of two clusters one is terminated and one is killed."""
    children = {
        number: subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), f"{tmp_path.name}-{number}"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for number in (signal.SIGTERM, signal.SIGKILL)
    }
    names = []
    try:
        for number, child in children.items():
            with child:
                names.append(child.stdout.readline().strip())
                assert len(queue(names[-1])) == 3
                assert len(watchdogs(names[-1])) == 1
                child.send_signal(number)
        for name in names:
            asyncio.run(nothing_left(name))
    finally:
        for child in children.values():
            os.killpg(child.pid, signal.SIGKILL)
