"""`ff.SLURMCluster` over commands that are wrong: a queue that is empty or old, and commands that hang.

SLURM and its jobs are real.  What is first on the PATH does as the test says, and then is the real command.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.on_slurm import tools
from tests.on_slurm.tools import LATER, executable, looked, watchdogs
from tests.waiting import finished, until, until_async

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]

# Instead of the command, by what a test says; "old" are answers of five seconds ago, or none.
ANSWERS = """
case "$(cat $mode)" in
    empty) exit 0;;
    hang) sleep 30;;
    fail) echo "error: Unable to contact slurm controller" >&2; exit 1;;
    answers_nothing) "$real" "$@" > /dev/null; sleep 33;;
    old)
        now=$(date +%s)
        "$real" "$@" > "$mode.$now"
        for age in 5 6 7 8; do
            if [ -e "$mode.$((now - age))" ]; then cat "$mode.$((now - age))"; exit 0; fi
        done
        exit 0;;
esac
"""


class Command:
    """A command of SLURM's with a prescribed behaviour."""

    def __init__(self, name: str, folder: Path) -> None:
        self.real = shutil.which(name)
        self._path, self._calls, self._mode = folder / name, folder / f"{name}.calls", folder / f"{name}.mode"
        self._calls.touch()
        self.does("answer")
        told = f'echo "$@" >> {self._calls}\nreal={self.real}\nmode={self._mode}'
        executable(self._path, f'{told}\n{ANSWERS}\nexec $real "$@"')

    def does(self, what: str) -> None:
        self._mode.write_text(what)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()

    @property
    def running(self) -> int:
        """How many of it run at the moment."""
        return running(str(self._path))


def running(word: str) -> int:
    """How many processes have a word on their command line."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += word.encode() in path.read_bytes().split(b"\0")
    return found


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Command]:
    """Puts a command before SLURM's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    made = {name: Command(name, folder) for name in ("squeue", "sbatch", "scancel", "scontrol", "sinfo")}
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return made.__getitem__


def queue(command: Callable[[str], Command], name: str, *options: str) -> dict[str, str]:
    """State by job id, in truth."""
    return tools.queue(name, *options, squeue=command("squeue").real)


def test_an_empty_squeue_and_one_that_hangs_cost_neither_jobs_nor_results_nor_time(site, command):
    """Once: all jobs forgotten after 2 s, replaced, and cancelled with what they held; 20 s in `scale`."""
    s = site()
    s.cluster.scale(4)
    s.connected(4)
    held = s.submit(20, 0.02)
    finished(held)
    jobs = queue(command, s.cluster.job_name)
    command("squeue").does("empty")
    time.sleep(4.0)
    assert queue(command, s.cluster.job_name) == jobs
    command("squeue").does("hang")
    until(lambda: command("squeue").running, "a squeue that hangs")
    begin = time.monotonic()
    s.cluster.scale(5)
    assert time.monotonic() - begin < 8.0
    until(lambda: len(s.workers) == 5, "a fifth worker while squeue hangs", seconds=20.0)
    assert command("squeue").running <= 1
    command("squeue").does("answer")
    everyone = queue(command, s.cluster.job_name, "--states=all")
    assert (len(everyone), jobs.keys() <= everyone.keys()) == (5, True)
    assert s.client.gather(held) == list(range(20))
    assert max(s.started().values()) == 1


async def test_whatever_commands_say_each_job_is_submitted_once_and_none_is_forgotten(
    play, command, monkeypatch
):
    monkeypatch.setattr("dask_ferro.slurm.commands._LIMITS", {"sbatch": 1.0})

    async with play(**LATER) as cluster:
        await a_submission_that_hangs(cluster, command)
        await an_answer_that_nobody_has(cluster, command)
        await a_release_that_fails(cluster, command)
        await a_queue_that_is_old(cluster, command)
        # It closes while `squeue` is empty and `scancel` fails; that is mended a moment later.
        command("squeue").does("empty")
        command("scancel").does("fail")
        asyncio.get_running_loop().call_later(0.3, command("scancel").does, "answer")
    assert queue(command, cluster.job_name) == {}
    assert watchdogs(cluster.job_name) == []


async def a_submission_that_hangs(cluster, command):
    """What a wrapper had started ran on, was waited for, and held the pipe that the watchdog waits for."""
    command("sbatch").does("answers_nothing")
    cluster.request("default", 3)
    await until_async(lambda: running("33"), "an sbatch that hangs")
    await asyncio.wait_for(cluster.wait_submitted(), 10.0)
    assert running("33") == 0
    assert await looked(cluster, ["pending"] * 3)
    assert len(queue(command, cluster.job_name, "--states=all")) == 3
    assert len(command("sbatch").calls) == 1


async def an_answer_that_nobody_has(cluster, command):
    """The answer of `sbatch` was lost, and `squeue` is empty: the job was submitted twice."""
    command("squeue").does("empty")
    command("scontrol").does("fail")
    cluster.request("default", 1)
    await until_async(lambda: cluster.pools[0].closed, "a submission without an answer")
    command("sbatch").does("answer")
    await asyncio.sleep(0.6)
    command("scontrol").does("answer")
    await cluster.wait_submitted()
    assert len(queue(command, cluster.job_name, "--states=all")) == 4
    command("squeue").does("answer")
    assert await looked(cluster, ["pending"] * 4)


async def a_release_that_fails(cluster, command):
    """A release whose scancel failed was over at once where `squeue` was empty, and the job ran on unseen."""
    command("squeue").does("empty")
    command("scancel").does("fail")
    going = asyncio.ensure_future(cluster.release(["default-0"]))
    await asyncio.sleep(1.0)
    assert not going.done()
    assert cluster.pools[0].lingering == 1
    command("scancel").does("answer")
    await asyncio.wait_for(going, 20.0)
    command("squeue").does("answer")
    assert len(queue(command, cluster.job_name)) == 3


async def a_queue_that_is_old(cluster, command):
    """There were 12 jobs in the queue for `scale(4)`."""
    everyone = queue(command, cluster.job_name, "--states=all")
    command("squeue").does("old")
    await cluster.scale(7)
    for _ in range(6):
        await asyncio.sleep(1.0)
        assert len(await cluster.reconcile()) == 7
    assert len(queue(command, cluster.job_name, "--states=all")) == len(everyone) + 4
    command("squeue").does("answer")
