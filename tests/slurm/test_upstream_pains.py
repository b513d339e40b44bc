"""Threads of users of dask-jobqueue about their batch system, on a real SLURM: the symptom on stock, its absence here.

Those that need no batch system are in `tests/upstream_pains`.  Jobs that need not run ask SLURM to begin in an hour.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask_jobqueue
import pytest
from distributed import Client, Status

import dask_ferro as ff
from tests.slurm.tools import LATER, command, partitions, queue, refuses, settings
from tests.waiting import finished, until

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]

# Looks of stock Dask's controller, one more than its hysteresis: what it does not do in these, it never does.
LOOKS = 4


@pytest.fixture(params=["stock", "ours"])
def way(request: pytest.FixtureRequest) -> str:
    """Whose cluster it is."""
    return str(request.param)


def let_close(cluster: Any) -> None:
    """Let it close to the end: Dask asserts that each job is closed, which dask-jobqueue never says.

    It does no harm as long as nothing else holds the jobs; the traceback of a submission that failed does.
    """
    for job in cluster._created:
        job.status = Status.failed


@pytest.fixture
def opened(way: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes clusters of either kind, and takes them down."""
    made: list[Any] = []

    def open_cluster(**options: Any) -> Any:
        own = settings(tmp_path) | {"queue": "cpu", "local_directory": str(tmp_path / "scratch")}
        kind = ff.SLURMCluster if way == "ours" else dask_jobqueue.SLURMCluster
        made.append(kind(**(own | options)))
        return made[-1]

    yield open_cluster
    for cluster in made:
        if way == "stock":
            let_close(cluster)
        cluster.close()
        command("scancel", "--name", cluster.job_name)


def looks(cluster: Any) -> None:
    """Let stock Dask's controller look; ours looks by itself."""
    for _ in range(LOOKS):
        cluster.sync(cluster._adaptive.adapt)


def queued(cluster: Any, count: int) -> None:
    until(
        lambda: len(queue(cluster)) == count,
        f"{count} jobs in the queue",
        every=0.1,
        seen=lambda: queue(cluster),
    )


def test_a_refused_submission_is_told_to_whoever_asked(opened, way) -> None:
    """https://github.com/dask/dask-jobqueue/issues/142: an unknown queue is an error in a log; nothing is raised.

    Also https://github.com/dask/dask-jobqueue/issues/619.
    """
    cluster = opened(queue="nosuch")
    if way == "stock":
        cluster.scale(2)
        until(lambda: len(cluster.workers) == 2, "both submissions to be over")
        assert len(cluster.requested) == 2
    else:
        with pytest.raises(ff.ConfigError, match="invalid partition specified: nosuch"):
            cluster.scale(2)
        with pytest.raises(ff.ConfigError, match="invalid partition specified: nosuch"):
            cluster.adapt(minimum=1, maximum=2)
    assert queue(cluster) == {}


def test_jobs_that_wait_are_not_shown_as_running(opened, way) -> None:
    """https://github.com/dask/dask-jobqueue/issues/11: all jobs have the status running; most wait in the queue."""
    cluster = opened(**LATER)
    cluster.scale(2)
    queued(cluster, 2)
    assert set(queue(cluster).values()) == {"PENDING"}
    if way == "stock":
        until(lambda: len(cluster.workers) == 2, "both submissions to be over")
        assert [job.status.name for job in cluster.workers.values()] == ["running"] * 2
        assert "pending" not in repr(cluster)
    else:
        shown = "jobs: 2 pending (BeginTime)"
        until(lambda: shown in repr(cluster), "both jobs to be shown", seen=lambda: repr(cluster))


def test_a_job_that_is_removed_before_its_worker_came_is_replaced(opened, way) -> None:
    """https://github.com/dask/dask-jobqueue/issues/643: the queue is not read; the job is requested for ever."""
    cluster = opened(**LATER)
    cluster.adapt(minimum=2, maximum=2, interval=0.3)
    queued(cluster, 2)
    gone = min(queue(cluster))
    command("scancel", gone)
    if way == "stock":
        looks(cluster)
        assert len(queue(cluster)) == 1
        assert len(cluster.requested) == 2
    else:
        until(lambda: gone not in queue(cluster), "the end of the job")
        queued(cluster, 2)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("QOSMaxSubmitJobPerUserLimit", id="what a limit of jobs refuses is never asked for again"),
        pytest.param("Batch job submission failed: Resource temporarily unavailable", id="some of many fail"),
    ],
)  # fmt: skip
def test_submissions_that_fail_for_now_are_made_later(opened, way, fake, words) -> None:
    """https://github.com/dask/dask-jobqueue/issues/365 and https://github.com/dask/dask-jobqueue/issues/190."""
    calls, cluster = fake("sbatch", 2, refuses(words)), opened(**LATER)
    cluster.adapt(minimum=4, maximum=4, interval=0.3)
    if way == "stock":
        until(lambda: len(calls.read_text().splitlines()) == 4, "four submissions")
        queued(cluster, 2)
        looks(cluster)
        assert len(queue(cluster)) == 2
        assert len(calls.read_text().splitlines()) == 4
    else:
        queued(cluster, 4)


def test_many_jobs_are_one_array(opened, way, fake) -> None:
    """https://github.com/dask/dask-jobqueue/issues/196: a command and a job of its own for each of many."""
    calls = fake("sbatch", 0, ":")
    cluster = opened(**LATER)
    cluster.scale(8)
    queued(cluster, 8)
    assert len(calls.read_text().splitlines()) == (8 if way == "stock" else 1)


def test_tasks_get_jobs_of_the_queue_that_has_what_they_need(opened, way) -> None:
    """https://github.com/dask/dask-jobqueue/issues/378: one cluster has one queue; tasks for GPUs get jobs without.

    Also https://github.com/dask/dask-jobqueue/issues/103.
    """
    gpu = {
        "queue": "gpu",
        "job_extra_directives": ["--gres=gpu:1", "--begin=now+1hour"],
        "worker_extra_args": ["--resources GPU=1"],
    }
    cluster = opened(**LATER, **({"pools": {"gpu": gpu}} if way == "ours" else {}))
    with Client(cluster) as client:
        wanted = client.map(abs, range(4), resources={"GPU": 1}, pure=False)
        until(lambda: len(cluster.scheduler.tasks) == len(wanted), "the tasks")
        cluster.adapt(minimum=0, maximum=4, interval=0.3)
        until(lambda: queue(cluster), "a job")
        looks(cluster)
        assert set(partitions(cluster)) == ({"cpu"} if way == "stock" else {"gpu"})


PROGRAM = """
    import sys, time
    from {module} import SLURMCluster
    cluster = SLURMCluster(
        queue="cpu", cores=1, processes=1, memory="400MB", interface="lo", job_name=sys.argv[1],
        log_directory=sys.argv[2], job_extra_directives=["--begin=now+1hour"],
        scheduler_options={{"dashboard_address": "127.0.0.1:0", "interface": "lo"}},
    )
    cluster.scale(2)
    time.sleep(60)
"""


def test_no_job_is_left_of_a_process_that_was_killed(way, tmp_path) -> None:
    """https://github.com/dask/distributed/issues/1759: jobs are orphans when what started them is killed."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    module = "dask_ferro.runtime.slurm.cluster" if way == "ours" else "dask_jobqueue"
    program = textwrap.dedent(PROGRAM.format(module=module))
    try:
        with subprocess.Popen(
            [sys.executable, "-c", program, name, str(tmp_path)], start_new_session=True
        ) as child:
            until(lambda: len(queue(name)) == 2, "two jobs", every=0.1)
            os.kill(child.pid, signal.SIGKILL)
        if way == "stock":
            time.sleep(1.0)
            assert len(queue(name)) == 2
        else:
            until(lambda: queue(name) == {}, "no job to be left", every=0.1)
    finally:
        command("scancel", "--name", name)


def noted(number: int, log: str) -> int:
    with open(log, "a") as file:
        file.write(f"{number}\n")
    return number


def test_a_job_that_is_told_to_end_hands_over_what_it_has(opened, way, tmp_path) -> None:
    """https://github.com/dask/distributed/issues/699: SIGTERM ends workers at once; their results run again.

    Also https://github.com/dask/distributed/issues/1352.
    """
    cluster, log = opened(), tmp_path / "ran"
    cluster.scale(2)
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        held = client.map(noted, range(20), log=str(log))
        finished(held)
        before, gone = set(cluster.scheduler.workers), min(queue(cluster))
        command("scancel", gone)
        until(lambda: before - set(cluster.scheduler.workers), "the end of a worker")
        assert client.gather(held) == list(range(20))
        again = len(log.read_text().split()) - 20
        assert (again >= 1) if way == "stock" else (again == 0)
