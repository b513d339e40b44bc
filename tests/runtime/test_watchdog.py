"""The watchdog's tries, with commands that are scripts of the test's."""

from __future__ import annotations

import os
from pathlib import Path

from dask_ferro.runtime.watchdog import Watchdog
from tests.waiting import until

# What scontrol shows: another's job, and ours in a state that a file tells.
SHOWN = """echo "JobId=1 JobName=test UserId=me(1) JobState=RUNNING Reason=None Comment=ferro-12345.a"
echo "JobId=2 JobName=test UserId=me(1) JobState=$(cat state) Reason=None Comment=ferro-1234.a" """


def test_the_watchdog_goes_on_while_a_job_is_there_that_squeue_does_not_list(tmp_path: Path) -> None:
    """Once it ended at the first empty answer, and the job ran for its whole walltime."""
    state, calls = tmp_path / "state", tmp_path / "calls"
    state.write_text("RUNNING")
    commands = {"squeue": "exit 0", "scontrol": f"cd {tmp_path}\n{SHOWN}", "scancel": f"echo $@ >> {calls}"}
    for name, script in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    watchdog = Watchdog("test", "ferro-1234", os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    number = watchdog._process.pid
    watchdog.close(jobs_left=True)
    until(lambda: calls.exists() and len(calls.read_text().split()) >= 2, "a second try")
    assert set(calls.read_text().split()) == {"2"}
    state.write_text("CANCELLED")
    until(lambda: not _runs(number), "the end of the watchdog", seconds=20.0)


def _runs(number: int) -> bool:
    """Whether a child of ours is there; one that ended is reaped."""
    try:
        return os.waitpid(number, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False
