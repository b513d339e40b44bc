"""SIGTERM on a real SLURM, as a plain `scancel` or a node that shuts down sends it; jobs whose cluster was killed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import dask
import psutil
import pytest

from tests.on_slurm.tools import Site, command, followed, place_of, queue, suspicion, waits
from tests.waiting import finished, result, until

pytestmark = pytest.mark.slurm


def connected(s: Site) -> list[Any]:
    """The jobs whose workers are there and stay, the oldest first."""
    names = {facts["name"] for facts in s.workers.values()}
    states = queue(s.cluster)
    jobs = s.cluster.sync(followed, s.cluster)
    there = [job for job in jobs if states.get(job.job_id) == "RUNNING" and set(job.workers) <= names]
    return sorted(there, key=lambda job: job.order)


def test_five_scancels_in_turn_run_no_finished_task_again_and_hand_a_long_one_over(site, tmp_path):
    """SIGTERM used to end workers at once: 80 finished tasks ran again in five of these."""
    s = site()
    s.cluster.adapt(minimum=3, maximum=3)
    s.connected(3)
    held = s.submit(60, 0.01)
    finished(held)
    until(lambda: len(connected(s)) == 3, "three jobs that run")
    with dask.annotate(ferro={"seconds": 600}):
        first = connected(s)[0].workers
        files = (str(tmp_path / "open"), str(s.starts))
        long = s.client.submit(waits, *files, workers=first, allow_other_workers=True)
    until(lambda: s.started()["long"] == 1, "the long task to start")
    for _ in range(5):
        there = until(
            lambda: len(found := connected(s)) >= 2 and found, "a job to cancel, and one that stays"
        )
        victim = there[0].job_id
        command("scancel", victim)
        s.queued(lambda jobs, gone=victim: gone not in jobs, "the job to be gone")
    (tmp_path / "open").touch()
    assert result(long) == 7
    assert s.client.gather(held) == list(range(60))
    starts = s.started()
    assert starts.pop("long") > 1  # handed over, not waited for
    assert set(starts.values()) == {1}


PROGRAM = """
    import sys, time
    from distributed import Client
    from dask_ferro.slurm.cluster import SLURMCluster

    cluster = SLURMCluster(
        queue="cpu", cores=1, processes=1, memory="400MB", interface="lo", log_directory=sys.argv[1],
        scheduler_options={"dashboard_address": "127.0.0.1:0", "interface": "lo"},
        pools={"later": {"job_extra_directives": ["--begin=now+1hour"], "minimum": 1, "maximum": 1}},
    )
    client = Client(cluster)
    cluster.scale(3)
    client.wait_for_workers(2, timeout=60)
    held = client.map(bytes, range(1000, 1010))
    client.gather(held)
    runs = client.submit(time.sleep, 600)
    while not any(client.processing().values()):
        time.sleep(0.05)
    print(cluster.job_name, flush=True)
    time.sleep(600)
"""


def test_jobs_whose_cluster_was_killed_with_its_watchdog_end_by_themselves_and_wait_for_no_task(
    slurm, tmp_path
):
    """No process is left that could cancel them.  A worker that ran a task was there for 33 s more, and a job that
    started later held its node for its death timeout, 60 s."""
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True) as killed:
        assert killed.stdout is not None
        name = killed.stdout.readline().strip()
        tree = [psutil.Process(killed.pid), *psutil.Process(killed.pid).children(recursive=True)]
        (watchdog,) = (process for process in tree if "dask-ferro-watchdog" in process.cmdline())
        assert name in watchdog.cmdline()
        for process in reversed(tree):
            process.kill()
    try:
        (pending,) = command("squeue", "-h", "-r", "-n", name, "-t", "PENDING", "-o", "%i").split()
        command("scontrol", "update", f"jobid={pending}", "starttime=now")
        until(
            lambda: not command("squeue", "-h", "-n", name).strip(),
            "no job to be left",
            seconds=45.0,
            seen=lambda: command("squeue", "-n", name),
        )
    finally:
        command("scancel", "-n", name)


def test_a_task_is_not_blamed_for_a_job_that_slurm_ended(site, tmp_path):
    """The workers hear nothing of it, as where SLURM kills at once: Dask blames what they ran, three times at most."""
    s = site()
    s.cluster.adapt(minimum=2, maximum=2)
    s.connected(2)
    files = (str(tmp_path / "open"), str(s.starts))
    long = s.client.submit(waits, *files, key="long")
    until(lambda: s.started()["long"] == 1, "the task to start")
    name = s.client.run_on_scheduler(place_of, key="long")
    (victim,) = (job for job in connected(s) if name in job.workers)
    for process in psutil.process_iter(["environ"]):
        job = (process.info["environ"] or {}).get("SLURM_JOB_ID", "")
        if job == raw_id(victim.job_id):
            process.suspend()
    command("scancel", victim.job_id)
    until(lambda: s.started()["long"] == 2, "the task to start again", seconds=60)
    until(
        lambda: s.client.run_on_scheduler(suspicion, key="long") == 0,
        "the blame to be taken back",
        seconds=30,
    )
    (tmp_path / "open").touch()
    assert result(long) == 7


def raw_id(job_id: str) -> str:
    """Return an array element's own number, which its processes know it by."""
    return command("squeue", "-h", "-j", job_id, "-O", "JobID:20").split()[0]
