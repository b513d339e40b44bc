"""The elastic controller on a real SLURM: what stock Dask loses, leaks or forgets, each beside what ours does.

The stock figures are of dask-jobqueue 0.9 and distributed 2026.8 on the same kind of machine.
"""

from __future__ import annotations

import os
import time
from typing import Any

import dask
import pytest

from dask_ferro.elastic.scheduler_rpc import Roster
from dask_ferro.scheduler.plugin import part_of
from tests.on_slurm.tools import away, busy, command, queue
from tests.waiting import finished, until

# A client warns in its own thread, where an error would be a log.
pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default:dask_ferro. :UserWarning")]


def nodes(cluster: Any) -> list[str]:
    return command("squeue", "-h", "-r", "-o", "%N", "--name", cluster.job_name).split()


def times_left(dask_scheduler: Any) -> list[float]:
    """Return the seconds that each worker has left; runs on the scheduler."""
    return [row["ends_in"] for row in part_of(dask_scheduler, Roster).roster()["workers"].values()]


def test_a_scale_down_loses_no_result(site):
    """Stock: 4 -> 1 lost 15 of 20 held results, which were computed again."""
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


def test_with_a_strict_prologue_and_more_cpus_than_threads_a_warned_job_loses_nothing_and_uses_its_cpus(site):
    """`set -e` ended the script at the first signal, and with it the worker; OMP_NUM_THREADS was 1."""
    s = site(job_cpu=4, job_script_prologue=["set -eu; trap : EXIT", "unset OMP_NUM_THREADS"])
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


def test_a_cancelled_job_of_two_processes_is_replaced(site):
    """Stock: never; one of a single process after 17 to 19 s under adapt."""
    s = site(processes=2, cores=2)
    s.cluster.adapt(minimum=2, maximum=2)
    s.connected(2)
    (gone, *_) = queue(s.cluster)
    command("scancel", gone)
    s.queued(lambda there: gone not in there, "the end of the cancelled job")
    s.queued(lambda there: len(there) == 1, "another job in its place", 5.0)
    s.connected(2)


def test_a_cancelled_pending_job_is_replaced(site):
    """Stock: never; plan 2, requested 2, connected 1."""
    s = site(cores=4, memory="400MB")
    s.cluster.scale(5)  # of which four find room: a node each
    s.queued(lambda jobs: list(jobs.values()).count("PENDING") == 1, "one pending job")
    (pending,) = (job for job, state in queue(s.cluster).items() if state == "PENDING")
    command("scancel", pending)
    s.queued(lambda jobs: pending not in jobs, "the end of the cancelled job")
    s.queued(lambda jobs: list(jobs.values()).count("PENDING") == 1, "another job in its place", 5.0)


def test_requeued_jobs_and_downed_nodes_are_survived(site):
    s = site()
    s.cluster.adapt(minimum=2, maximum=2)
    s.connected(2)
    futures = s.submit(40, 0.4)
    (job, *_) = queue(s.cluster)
    before = set(s.workers)
    command("scontrol", "requeue", job)
    until(lambda: len(set(s.workers) & before) == 1, "one of the workers to go", seen=lambda: s.workers)
    s.connected(2)
    node = nodes(s.cluster)[0]
    with away(node, "down"):
        until(lambda: len(s.workers) < 2, "the end of a worker", seen=lambda: s.workers)
        s.connected(2)
    assert s.client.gather(futures) == list(range(40))


def test_a_drained_node_hands_its_work_to_others(site):
    """Stock: there is no message; the workers stay until the node is taken away."""
    s = site()
    s.cluster.adapt(minimum=1, maximum=1, surge=1)
    s.connected(1)
    held = s.submit(4, 0.05)
    finished(held, seconds=180)
    (node,) = nodes(s.cluster)
    with away(node):
        until(lambda: set(nodes(s.cluster)) not in ({node}, set()), "a job on another node")
        until(lambda: node not in nodes(s.cluster), "the end of the job on the drained node")
    assert s.client.gather(held) == list(range(4))
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


@pytest.mark.filterwarnings("ignore:dask_ferro. no job has the time")
def test_a_lifetime_counts_from_the_workers_start_and_a_task_that_no_job_has_time_for_is_told(site, tmp_path):
    """It counted from its nanny's start: a worker that took 8 s to start was spent when it connected."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(12)\n\ndef dask_setup(worker):\n    pass\n")
    life = ["--lifetime", "40s", "--lifetime-stagger", "3s", "--preload", str(tmp_path / "slow.py")]
    s = site(worker_extra_args=life)
    s.cluster.adapt(minimum=1, maximum=1)
    s.connected(1)
    (left,) = s.client.run_on_scheduler(times_left)
    assert left > 40 - 3 - 10
    with dask.annotate(ferro={"seconds": 600}):
        _long = s.submit(1, 4.0)
    told = "no job has the time for tasks of 600 s: one of default lives 37 s"
    until(lambda: told in str(s.client.get_events("warn")), "the warning")


def test_preemption_with_a_signal_loses_nothing(site, tmp_path):
    """Stock: no warning; all eight results lost, back after 10 s, computed again."""
    s = site(queue="low", cores=4)
    s.cluster.adapt(minimum=2, maximum=2)
    s.connected(2)
    held = s.submit(8, 0.1)
    finished(held, seconds=180)
    with busy(nodes(s.cluster)[0]) as other:
        told = ("squeue", "-h", "-o", "%T", "-j", other)
        until(lambda: command(*told).strip() == "RUNNING", "the job of higher priority to run")
        assert s.client.gather(held) == list(range(8))
        assert max(s.started().values()) == 1


def test_preemption_without_a_warning_loses_no_result_that_had_time_to_be_copied(site):
    """GraceTime=0, SLURM's default: all 24 were lost.  The default pool is safe, and takes the copies."""
    command("scontrol", "update", "partitionname=spot", "gracetime=0")
    try:
        one = {"minimum": 1, "maximum": 1}
        s = site(cores=4, signal_ahead=0, pools={"default": one, "spot": {"queue": "spot", **one}})
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


def test_scaling_down_again_and_again_during_one_task_raises_nothing(site):
    """Stock: KilledWorker, since the user's own scale-down counts as a death of the worker."""
    s = site()
    s.cluster.scale(2)
    s.connected(2)
    (future,) = s.submit(1, 6.0)
    until(s.started, "the task to start")
    for _ in range(4):
        s.cluster.scale(1)
        time.sleep(0.4)
        s.cluster.scale(2)
        time.sleep(0.4)
    s.cluster.scale(1)
    assert future.result(timeout=60) == 0
    assert max(s.started().values()) == 1
