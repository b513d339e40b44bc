"""What a pool of batch jobs learns from its jobs, and when it closes."""

from __future__ import annotations

from typing import Any

import pytest

import dask_ferro as ff
from dask_ferro.slurm.cluster import SLURMCluster
from dask_ferro.slurm.cluster_options import check_job_name
from dask_ferro.slurm.job_lifecycle import BatchJob, Patience
from dask_ferro.slurm.parsing import QueueRow
from dask_ferro.slurm.pool import JobPool
from dask_ferro.slurm.script import WorkerJob

SHAPE = {"cores": 1, "memory": "1GB", "walltime": "06:00:00", "interface": "lo"}


def built(**overrides: Any) -> JobPool:
    return JobPool.build("cpu", WorkerJob, SHAPE, overrides, "cpu")


def look(pool: JobPool, job: BatchJob, now: float, came_at: float | None, restarts: int = 0) -> None:
    """A look at a job that SLURM started at 10, or a second after it was requeued at 9000; its pool learns from it."""
    row = QueueRow(
        "12", "RUNNING", restarts, 9000.0 if restarts else 0.0, 9001.0 if restarts else 10.0, 20000.0, "c1"
    )
    before = job.state
    assert job.follow(row, set(job.workers) if came_at else set(), now, Patience(lost=60.0)) is None
    if job.state != before:
        pool.measure(job, before)


def test_a_start_is_measured_when_the_worker_first_comes_and_not_when_it_is_restarted() -> None:
    pool, job = built(), BatchJob("cpu-0", "cpu", 0, 1, 0.0, "12", "pending", submitted_at=0.0)
    look(pool, job, 11.0, None)
    look(pool, job, 15.0, came_at=14.0)
    measured = pool.start_up.value
    assert measured == pytest.approx(4.0, abs=1.0)
    look(pool, job, 7200.0, None)
    look(pool, job, 7202.0, came_at=7201.0)
    assert (job.state, pool.start_up.value) == ("running", measured)


def test_a_requeued_job_starts_once_more_and_is_measured_once_more() -> None:
    pool, job = built(), BatchJob("cpu-0", "cpu", 0, 1, 0.0, "12", "pending", submitted_at=0.0)
    look(pool, job, 11.0, None)
    look(pool, job, 15.0, came_at=14.0)
    before = pool.start_up.value
    look(pool, job, 9002.0, None, restarts=1)
    look(pool, job, 9022.0, came_at=9021.0, restarts=1)
    assert pool.start_up.value > before


def test_a_site_that_holds_each_new_job_is_asked_less_and_less_often() -> None:
    """Looks of a second, a new job as soon as the pool is open: without back-off there were as many jobs as looks."""
    pool, asked = built(), []
    for now in range(1000):
        if pool.pool(now=float(now), trouble="").closed:
            continue
        asked.append(now)
        job = BatchJob(f"cpu-{now}", "cpu", now, 1, float(now), "12", "pending")
        ending = job.follow(QueueRow("12", "PENDING", reason="JobHeldUser"), set(), float(now), Patience())
        assert ending is not None
        assert ending.failed
        if reason := pool.fail(f"job 12: {ending.why}"):
            pool.close(reason, float(now))
    assert asked == [0, 1, 2, 32, 92, 212, 452, 932]


def test_a_pool_is_closed_once_and_opens_by_itself() -> None:
    pool = built()
    assert [pool.close("FAILED", at, "    a\n    b") for at in (10.0, 11.0)] == [True, False]
    said = pool.pool(12.0, trouble="")
    assert (said.closed, said.closed_until, said.output) == ("FAILED", 40.0, "    a\n    b")
    said = pool.pool(41.0, trouble="sbatch is busy")
    assert (said.closed, said.closed_until, said.output) == ("sbatch is busy", 0.0, "")
    assert pool.close("FAILED again", 41.0)
    assert (pool.pool(42.0, "").closed_until, pool.pool(42.0, "").output) == (101.0, "")


@pytest.mark.parametrize("name", ["a,b", "two words", "a;b", "-n", "", "$(id)", "a\n", "ä"])
def test_a_name_that_slurms_commands_take_apart_is_refused(name: str) -> None:
    with pytest.raises(ff.InputError, match=r"job_name: got .*, wanted letters, digits"):
        check_job_name(name)


def test_a_cluster_is_refused_by_its_jobs_name_before_it_starts_anything() -> None:
    with pytest.raises(ff.InputError, match=r"ff\.SLURMCluster: job_name: got 'a,b', wanted letters"):
        SLURMCluster(job_name="a,b", **SHAPE)
