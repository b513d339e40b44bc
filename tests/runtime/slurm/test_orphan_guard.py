"""The watchdog's tries, with commands that are scripts of the test's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dask_ferro.runtime.slurm.orphan_guard import GuardedJobs, Watchdog
from tests.waiting import until

# What scontrol shows: a foreign job, and ours in a state that a file holds.
SHOWN = """echo "JobId=1 JobName=test UserId=me(1) JobState=RUNNING Reason=None Comment=ferro-12345.a"
echo "JobId=2 JobName=test UserId=me(1) JobState=$(cat state) Reason=None Comment=ferro-1234.a" """


def test_the_watchdog_goes_on_while_a_job_is_there_that_squeue_does_not_list(command, tmp_path: Path) -> None:
    """Once it ended at the first empty answer, and the job ran for its whole walltime."""
    state, calls = tmp_path / "state", command("scancel", ":")
    state.write_text("RUNNING")
    command("squeue", "exit 0")
    command("scontrol", f"cd {tmp_path}\n{SHOWN}")
    watchdog = Watchdog("test", "ferro-1234", os.environ)
    number = watchdog._process.pid
    watchdog.close(jobs_left=True)
    until(lambda: len(calls.read_text().split()) >= 2, "a second try")
    assert set(calls.read_text().split()) == {"2"}
    state.write_text("CANCELLED")
    until(lambda: not _runs(number), "the end of the watchdog", seconds=20.0)


# The jobs of this cluster and of one before it, and another's.
QUEUE = "echo '1 ferro-12345.a'; echo '2 ferro-1234.a'; echo '3 ferro-0000.a'"


@pytest.mark.parametrize(
    ("keep", "file", "orderly", "cancelled"),
    [
        pytest.param(0.0, None, False, {"2", "3"}, id="without a time to keep them jobs end at once"),
        pytest.param(60.0, "tcp://a:1 ferro-1234", True, {"2", "3"}, id="what an orderly end left ends at once"),
        pytest.param(1.0, "tcp://a:1 ferro-1234", False, {"2", "3"}, id="nobody came for them in time"),
        pytest.param(1.0, "tcp://b:2", False, {"2", "3"}, id="a file that names no run says nothing"),
        pytest.param(60.0, "tcp://b:2 ferro-99", False, set(), id="another run looks after them"),
        pytest.param(0.0, "tcp://b:2 ferro-99", False, set(), id="it did when this one died"),
    ],
)  # fmt: skip
def test_the_watchdog_keeps_jobs_for_the_next_run_for_a_while(
    command, tmp_path: Path, keep: float, file: str | None, orderly: bool, cancelled: set[str]
) -> None:
    scheduler = tmp_path / "jobs.scheduler"
    if file is not None:
        scheduler.write_text(file + "\n")
    assert ended(command, GuardedJobs(keep, str(scheduler)), orderly) == cancelled


def test_a_file_server_that_hangs_does_not_hold_the_watchdog_back(command, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "jobs.scheduler")  # no process writes into it
    assert ended(command, GuardedJobs(1.0, str(tmp_path / "jobs.scheduler"))) == {"2", "3"}


def ended(command: Callable[[str, str], Path], keep: GuardedJobs, orderly: bool = False) -> set[str]:
    """Return what the watchdog cancels until its end."""
    calls = command("scancel", ":")
    command("squeue", f"[ -s {calls} ] || {{ {QUEUE}; }}")
    command("scontrol", "exit 0")
    watchdog = Watchdog("test", "ferro-1234", os.environ, keep)
    watchdog.inherit("ferro-0000")
    number = watchdog._process.pid
    if orderly:
        watchdog.close(jobs_left=True)
    else:
        os.close(watchdog.fd)  # as when its process was killed
        watchdog._process.stdin = None
    until(lambda: not _runs(number), "the end of the watchdog", seconds=20.0)
    return set(calls.read_text().split())


def _runs(number: int) -> bool:
    """Whether a child of ours is there; one that ended is reaped."""
    try:
        return os.waitpid(number, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False
