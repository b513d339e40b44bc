"""`dask ferro cluster` on a real SLURM: workers follow the work, and no job of its outlives it."""

from __future__ import annotations

import operator
import signal
import subprocess
from pathlib import Path

import pytest
from distributed import Client

from tests.programs import ran
from tests.standing import PROGRAM, command

pytestmark = pytest.mark.slurm

# Jobs of a name that no other test has.
NAMED = ("--config", "local-test", "--name")
LOCAL_TEST = Path(__file__).resolve().parents[2] / "jobqueue_configs" / "local-test.yaml"


@pytest.fixture(autouse=True)
def running_slurm(slurm):
    """All tests here need it."""


def left(tmp_path):
    """The jobs of a test that SLURM still has."""
    names = ran(["squeue", "-h", "-o", "%j"], check=True).stdout.split()
    return [name for name in names if name.startswith(tmp_path.name)]


def pools(*words: object) -> subprocess.CompletedProcess[str]:
    line = [str(PROGRAM), "pools", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)


def test_it_computes_its_pools_are_paused_and_ctrl_c_ends_it_with_its_jobs(tmp_path):
    file = tmp_path / "scheduler.json"
    with command(tmp_path, *NAMED, tmp_path.name, "--maximum", 2, "--scheduler-file", file) as running:
        address = running.says(r"scheduler +(\S+)")[1]
        running.says("dashboard +http://127.0.0.1:")
        running.says("workers +0 to 2")
        running.says("no jobs")
        with Client(scheduler_file=str(file)) as client:
            assert client.scheduler.address == address
            held = client.submit(operator.add, 20, 22)  # what it holds keeps the job
            assert held.result(timeout=60) == 42
            running.says(r"\d\d:\d\d:\d\d  no jobs; submit 1 to default: \w")
            running.says(r"\d\d:\d\d:\d\d  1 running")
            assert len(left(tmp_path)) == 1
            pauses_from_the_command_line(running, file)
        assert running.ends(signal.SIGINT) == 130
    assert left(tmp_path) == []
    assert not file.exists()
    assert "stopped by SIGINT" in running.stderr


def pauses_from_the_command_line(running, file):
    there = ("--scheduler-file", file)
    done = pools("list", *there)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()[3:]] == [["default", "open"]]
    assert pools("pause", "default", *there).returncode == 0
    running.says("default is paused")
    done = pools("list", *there, "--json")
    assert '"is_paused": true' in done.stdout
    done = pools("resume", "x", *there)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no pool 'x'; there are default" in done.stderr


def test_sigterm_a_client_and_a_refusal_end_it_with_its_jobs(tmp_path):
    """SIGTERM while jobs are on their way, a client that shuts it down, and a partition that is none."""
    with command(tmp_path, *NAMED, tmp_path.name, "--minimum", 4) as running:
        running.says("submit 4 to default")
        assert running.ends(signal.SIGTERM) == 143
    assert left(tmp_path) == []
    assert "stopped by SIGTERM" in running.stderr

    with command(tmp_path, *NAMED, tmp_path.name, "--minimum", 1) as running:
        address = running.says(r"scheduler +(\S+)")[1]
        running.says("1 (pending|booting|running)")
        with Client(address) as client:
            client.shutdown()
        assert running.ends() == 0
    assert left(tmp_path) == []
    assert "a client shut the cluster down" in running.stderr

    text = LOCAL_TEST.read_text(encoding="utf-8").replace("queue: cpu", "queue: nosuch")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    with command(tmp_path, "--config", "mine.yaml", "--name", tmp_path.name, "--minimum", 1) as running:
        assert running.ends() == 2
    assert "invalid partition specified: nosuch" in running.stderr  # SLURM's words
    assert left(tmp_path) == []
