"""The elastic controller on a real SLURM: what stock Dask loses, leaks or forgets, each beside what ours does.

The stock figures are of dask-jobqueue 0.9 and distributed 2026.8 on the same kind of machine.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Event

from dask_ferro.elastic.scheduler_rpc import ScalingRPC
from dask_ferro.scheduler.plugin import part_of
from tests.on_slurm.tools import away, busy, command, followed, place_of, queue, suspicion, waits
from tests.waiting import finished, opened, result, until

# A client warns in its own thread, where an error would be a log.
pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default:dask_ferro. :UserWarning")]


def nodes(cluster: Any) -> list[str]:
    return command("squeue", "-h", "-r", "-o", "%N", "--name", cluster.job_name).split()


def times_left(dask_scheduler: Any) -> list[float]:
    """Return the seconds that each worker has left; runs on the scheduler."""
    return [row["ends_in"] for row in part_of(dask_scheduler, ScalingRPC).roster()["workers"].values()]


def test_a_cluster_is_scaled_while_it_holds_results_and_runs_a_task(site, caplog):
    """Stock: 4 -> 1 lost 15 of 20 held results; a task was killed with KilledWorker, since the user's own scale-down
    counts as a death of the worker.  A job used to stay as long as one result was held: now an order is obeyed."""
    s = site()
    s.cluster.scale(4)
    s.connected(4)
    held = s.submit(20, 0.05)
    finished(held, seconds=180)
    s.cluster.scale(1)
    s.connected(1)
    s.queued(lambda jobs: len(jobs) == 1, "one job")
    assert s.client.gather(held) == list(range(20))
    assert max(s.started().values()) == 1

    s.cluster.scale(2)
    s.connected(2)
    files = (str(s.starts.with_name("open")), str(s.starts))
    long = s.client.submit(waits, *files)
    until(lambda: s.started()["long"], "the task to start")
    for _ in range(4):
        s.cluster.scale(1)
        time.sleep(0.4)
        s.cluster.scale(2)
        time.sleep(0.4)
    s.cluster.scale(1)
    time.sleep(2.0)
    s.starts.with_name("open").touch()
    assert result(long) == 7
    assert max(s.started().values()) == 1
    del long

    with caplog.at_level(logging.WARNING, "dask_ferro"):
        s.cluster.scale(0)
        s.queued(lambda jobs: not jobs, "an empty queue", 10.0)
        lost = "jobs ended as scale() ordered: 20 results (560 B) held by no other worker are lost"
        until(lambda: lost in caplog.text, "a warning of what is lost", seen=lambda: caplog.text)
    left = [event for _, event in s.client.get_events("ferro") if event["action"] == "retired"]
    assert sum(event.get("results", 0) for event in left) == 20
    s.cluster.scale(1)
    assert s.client.gather(held) == list(range(20))
    starts = s.started()
    assert (starts.pop("long"), set(starts.values())) == (1, {2})
    (worker,) = s.workers
    s.cluster.sync(s.cluster.scale_down, [worker])
    s.queued(lambda jobs: not jobs, "an empty queue", 10.0)
    assert "bounds: 0 workers" in repr(s.cluster)


def test_jobs_are_cancelled_and_requeued_and_nodes_taken_away_while_it_computes(site):
    """Stock: a cancelled job of two processes was never replaced, nor one that waited; a drained node has no message,
    and its workers stay until it is taken away."""
    s = site(cores=4, processes=2, memory="800MB")
    s.cluster.scale(10)  # five jobs, of which four find room: a node each
    s.queued(lambda jobs: list(jobs.values()).count("PENDING") == 1, "one pending job")
    (pending,) = (job for job, state in queue(s.cluster).items() if state == "PENDING")
    command("scancel", pending)
    s.queued(lambda jobs: pending not in jobs, "the end of the cancelled job")
    s.queued(lambda jobs: list(jobs.values()).count("PENDING") == 1, "another job in its place", 5.0)

    s.cluster.scale(4)
    s.queued(lambda jobs: list(jobs.values()) == ["RUNNING"] * 2, "two jobs that run")
    s.cluster.adapt(minimum=4, maximum=4, surge=2)
    s.connected(4)
    (gone, *_) = queue(s.cluster)
    command("scancel", gone)
    s.queued(lambda there: gone not in there, "the end of the cancelled job")
    s.queued(lambda there: len(there) == 2, "another job in its place", 5.0)
    s.connected(4)

    futures = s.submit(40, 2.0)
    (job, *_) = queue(s.cluster)
    before = set(s.workers)
    command("scontrol", "requeue", job)
    until(lambda: len(set(s.workers) & before) == 2, "the workers of one job to go", seen=lambda: s.workers)
    s.connected(4)
    with away(nodes(s.cluster)[0], "down"):
        until(lambda: len(s.workers) < 4, "the end of workers", seen=lambda: s.workers)
        s.connected(4)
        assert s.client.gather(futures) == list(range(40))

    starts, node = s.started(), nodes(s.cluster)[0]
    with away(node):
        until(lambda: node not in nodes(s.cluster), "the end of the job on the drained node")
        s.connected(4)
    assert s.client.gather(futures) == list(range(40))
    assert s.started() == starts


def test_with_a_strict_prologue_and_more_cpus_than_threads_a_warned_job_loses_nothing_and_uses_its_cpus(site):
    """`set -e` ended the script at the first signal, and with it the worker; OMP_NUM_THREADS was 1."""
    s = site(job_cpu=4, job_script_prologue=["set -e", "unset OMP_NUM_THREADS"])
    s.cluster.scale(2)
    s.connected(2)
    assert set(s.client.run(os.getenv, "OMP_NUM_THREADS").values()) == {"4"}
    held = s.submit(20, 0.05)
    finished(held)
    before = set(s.workers)
    command("scancel", "--signal=USR1", "--batch", next(iter(queue(s.cluster))))
    until(lambda: not before <= set(s.workers), "the job to leave")
    assert s.client.gather(held) == list(range(20))
    assert max(s.started().values()) == 1


def test_walltimes_lose_nothing(site):
    """Stock, 12 x 8 s under a lifetime of 25 s: 136 s where 48 are ideal; 25 task starts, all results lost thrice."""
    s = site(worker_extra_args=["--lifetime", "15s"])
    s.cluster.adapt(minimum=2, maximum=2, surge=2)
    s.connected(2)
    first = set(s.workers)
    futures = s.submit(10, 4.0)
    assert s.client.gather(futures) == list(range(10))
    assert max(s.started().values()) == 1
    until(
        lambda: not first & set(s.workers),
        "the end of the first two, whose time was over before the work was",
    )


# Dask imports a preload twice in the nanny's process, and twice in the worker's: one of them takes its time.
SLOW = """
import multiprocessing, sys, time

if multiprocessing.parent_process() and not hasattr(sys, "has_slept"):
    sys.has_slept = True
    time.sleep(15)

def dask_setup(worker):
    pass
"""


@pytest.mark.filterwarnings("ignore:dask_ferro. no job has the time")
def test_a_lifetime_counts_from_the_workers_start_and_a_task_that_no_job_has_time_for_is_told(site, tmp_path):
    """It counted from its nanny's start: a worker that took 8 s to start was spent when it connected."""
    (tmp_path / "slow.py").write_text(SLOW)
    life = ["--lifetime", "40s", "--lifetime-stagger", "3s", "--preload", str(tmp_path / "slow.py")]
    s = site(worker_extra_args=life)
    s.cluster.adapt(minimum=1, maximum=1)
    s.connected(1)
    (left,) = s.client.run_on_scheduler(times_left)
    assert left > 40 - 3 - 10
    with dask.annotate(ferro={"seconds": 600}):
        long = s.client.submit(opened, "told")
    told = "no job has the time for tasks of 600 s: one of default lives 37 s"

    def warned() -> list[str]:
        return [str(message) for _, message in s.client.get_events("warn")]

    until(lambda: any(told in text for text in warned()), f"the warning {told!r}", seen=warned)
    Event("told", s.client).set()
    result(long)


def test_a_preempted_job_hands_results_and_its_long_task_over_within_what_its_partition_grants(
    site, tmp_path
):
    """Stock: no warning; all eight results lost, back after 10 s, computed again.  The walltime's notice is 60 s,
    GraceTime 5: once the task was lost too, and its worker to blame."""
    s = site(queue="low", cores=4)
    assert "FERRO_JOB_GRACE=5\n" in s.cluster.job_script()
    s.cluster.adapt(minimum=2, maximum=2)
    s.connected(2)
    held = s.submit(8, 0.1)
    finished(held, seconds=180)
    task = s.client.submit(long_at_first, str(tmp_path / "longs"), key="long")
    name = until(lambda: s.client.run_on_scheduler(place_of, key="long"), "the task to run")
    (job,) = (job for job in s.cluster.sync(followed, s.cluster) if name in job.workers)
    with busy(command("squeue", "-h", "-o", "%N", "-j", job.job_id).strip()) as other:
        running = ("squeue", "-h", "-o", "%T", "-j", other)
        until(lambda: command(*running).strip() == "RUNNING", "the job of higher priority to run")
        assert result(task) == 2
        assert s.client.gather(held) == list(range(8))
    assert max(s.started().values()) == 1
    events = [event for _, event in s.client.get_events("all")]
    (first, *_) = (event for event in events if event.get("action") == "remove-worker")
    assert (first["expected"], first["processing-tasks"]) == (True, set())
    assert s.client.run_on_scheduler(suspicion, key="long") == 0


def long_at_first(starts: str) -> int:
    """Take 30 s, and return how often it was started; again, 0.1 s."""
    with open(starts, "a") as file:
        file.write("x")
    count = len(Path(starts).read_text())
    time.sleep(30.0 if count == 1 else 0.1)
    return count


def test_preemption_without_a_warning_loses_no_result_that_had_time_to_be_copied(site):
    """GraceTime=0, SLURM's default: all 24 were lost.  The default pool is safe, and takes the copies."""
    command("scontrol", "update", "partitionname=spot", "gracetime=0")
    try:
        one = {"minimum": 1, "maximum": 1}
        s = site(cores=4, retire_before=0, pools={"default": one, "spot": {"queue": "spot", **one}})
        s.cluster.adapt(minimum=2, maximum=2)
        s.connected(2)
        preemptible = {kind.name: kind.preemptible for kind in s.cluster.pools}
        assert preemptible == {"default": False, "spot": True}
        (spot,) = (address for address, facts in s.workers.items() if "spot" in str(facts["name"]))
        held = s.submit(24, 0.1, workers=[spot], allow_other_workers=True)
        finished(held)
        assert any(spot in where for where in s.client.who_has(held).values())
        until(
            lambda: all(set(where) - {spot} for where in s.client.who_has(held).values()),
            "each result to be somewhere else too",
            seen=lambda: s.client.who_has(held),
        )
        lines = command("squeue", "-h", "-r", "-o", "%P %N", "--name", s.cluster.job_name).split("\n")
        node = dict(line.split() for line in lines if line.strip())["spot"]
        with busy(node):
            until(lambda: spot not in s.workers, "the end of the preempted job")
            assert s.client.gather(held) == list(range(24))
            assert max(s.started().values()) == 1
    finally:
        command("scontrol", "update", "partitionname=spot", "gracetime=5")
