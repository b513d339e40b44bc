"""The watchdog's tries, with commands that are scripts of the test's."""

from __future__ import annotations

import os
from pathlib import Path

from dask_ferro.slurm.orphan_guard import Watchdog
from tests.waiting import until

# What scontrol shows: a foreign job, and ours in a state that a file holds.
SHOWN = """echo "JobId=1 JobName=test UserId=me(1) JobState=RUNNING Reason=None Comment=ferro-12345.a"
echo "JobId=2 JobName=test UserId=me(1) JobState=$(cat state) Reason=None Comment=ferro-1234.a" """
# The pauses between its tries are a tenth of what they are.
TENTH = "exec /bin/sleep $(($1 / 10)).$(($1 % 10))"


def test_the_watchdog_goes_on_while_a_job_is_there_that_squeue_does_not_list(command, tmp_path: Path) -> None:
    """Once it ended at the first empty answer, and the job ran for its whole walltime."""
    state, calls = tmp_path / "state", command("scancel", ":")
    state.write_text("RUNNING")
    command("sleep", TENTH)
    command("scontrol", f"cd {tmp_path}\n[ -e silent ] && exit\n{SHOWN}")
    watchdog = Watchdog("test", "ferro-1234", os.environ)
    number = watchdog._process.pid
    watchdog.close(jobs_left=True)
    until(lambda: len(calls.read_text().split()) >= 2, "a second try")
    assert set(calls.read_text().split()) == {"2"}
    (tmp_path / "silent").touch()  # an answer without a word is none
    tries = len(calls.read_text().split())
    until(lambda: len(calls.read_text().split()) > tries, "a try after an empty answer")
    (tmp_path / "silent").unlink()
    state.write_text("CANCELLED")
    until(lambda: not _runs(number), "the end of the watchdog", seconds=20.0)


def test_the_watchdog_cancels_the_jobs_of_a_dead_cluster_and_no_others(command) -> None:
    calls = command("scancel", ":")
    command("sleep", TENTH)
    job = "JobId={} JobState=PENDING Comment={}"
    lines = job.format(1, "ferro-12345.a") + "\n" + job.format(2, "quick please ferro-1234.a")
    command("scontrol", f"if [ -s {calls} ]; then echo No jobs in the system; else echo '{lines}'; fi")
    watchdog = Watchdog("test", "ferro-1234", os.environ)
    number = watchdog._process.pid
    os.close(watchdog.fd)  # as when its process was killed
    watchdog._process.stdin = None
    until(lambda: not _runs(number), "the end of the watchdog", seconds=20.0)
    assert calls.read_text().split() == ["2"]


def _runs(number: int) -> bool:
    """Whether a child of ours is there; one that ended is reaped."""
    try:
        return os.waitpid(number, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False
