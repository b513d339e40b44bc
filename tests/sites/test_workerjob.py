"""The script of a job: it tells its worker of the end, passes signals on, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from dask_ferro.runtime.sites.pbscluster import PBSWorkerJob
from tests.waiting import ended, until

# A worker that says what it heard.
# It is signalled twice, by the batch system and by the script.
TRAPS = 'trap "echo warned; exit 5" USR1; trap "trap : TERM; echo told; exit 6" TERM'
HEARS = f"bash -c '{TRAPS}; echo up; while :; do sleep 0.05; done'"


def script(worker: str, walltime: str, **options: float) -> str:
    job = PBSWorkerJob(
        "tcp://a:1", "cpu", cores=1, processes=1, memory="1GB", walltime=walltime, job_name="x", **options
    )
    job._command_template = worker
    return job.job_script(3, {}, 7.0)


@pytest.fixture
def run() -> Callable[[str], subprocess.Popen[str]]:
    """Runs a script as a batch system does."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str) -> subprocess.Popen[str]:
        command = ["bash", "-c", text]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        process.stdout.close()


def sleeps(job: int, seconds: str) -> list[psutil.Process]:
    """The processes of a job that sleep for so long."""
    found = []
    for process in psutil.Process(job).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[-1:] == [seconds] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def has_left(process: subprocess.Popen[str]) -> bool:
    """Whether nothing of a job's group is there."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_its_worker_is_warned_before_the_walltime_is_over(run) -> None:
    job = run(script(HEARS, "00:00:04", signal_ahead=3.0))
    assert ended(job, seconds=10.0) == 5
    assert job.stdout.read() == "up\nwarned\n"
    until(lambda: has_left(job), "the end of all that it started")


def test_sigterm_is_passed_on_and_a_timer_that_is_ended_is_no_warning(run) -> None:
    job = run(script(HEARS, "10:00:00"))
    assert job.stdout.readline() == "up\n"
    (timer,) = until(lambda: sleeps(job.pid, "35940"), "the timer")
    timer.terminate()
    until(lambda: not sleeps(job.pid, "35940"), "the end of the timer")
    os.killpg(job.pid, signal.SIGTERM)
    assert ended(job, seconds=10.0) in (6, 143)  # bash may lose the worker's own
    assert job.stdout.read() == "told\n"
    until(lambda: has_left(job), "the end of all that it started")


def test_a_worker_that_ends_ends_its_job_with_its_status_and_the_timer(run) -> None:
    job = run(script("bash -c 'exit 9'", "10:00:00"))
    assert ended(job, seconds=10.0) == 9
    until(lambda: has_left(job), "the end of all that it started")


def test_what_a_job_is_told() -> None:
    text = script("true", "00:10:00", signal_ahead=60.0)
    assert 'FERRO_WORKER="cpu-3"' in text
    assert "export FERRO_JOB_KILLWAIT=7\n" in text
    assert "+ 600" in text
    assert "export FERRO_JOB_NOTICE=60\n" in text
    assert "sleep 540 &" in text
    assert "#PBS -r n\n" in text
    assert "sleep" not in script("true", "00:10:00", signal_ahead=0.0)
    assert "export FERRO_JOB_KILLWAIT=2\n" in script("true", "00:10:00", grace=2.0)
