"""A killed test run leaves no processes behind: no daemon of SLURM, no worker, no browser."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests import waiting

ROOT = Path(__file__).resolve().parents[1]


def marked(mark: str) -> dict[int, str]:
    """Return the live processes that have `mark` in their environment, by id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "comm").read_text().strip()
        except OSError:  # it ended meanwhile, or is another user's
            continue
    return found


@pytest.mark.parametrize(
    ("held", "programs"),
    [
        pytest.param(
            "tests/slurm/held.py",
            {"slurmctld", "slurmd", "munged"},
            marks=[pytest.mark.slurm, pytest.mark.needs("slurm", "/proc")],
            id="SLURM's daemons",
        ),
        pytest.param(
            "tests/browser/held.py",
            {"chrom"},
            marks=[pytest.mark.browser, pytest.mark.needs("chromium", "/proc")],
            id="workers and a browser",
        ),
    ],
)
def test_a_killed_run_leaves_no_process_behind(tmp_path, held, programs):
    mark = f"FERRO_KILLED={uuid.uuid4()}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FERRO_SLURM_", "PYTEST_XDIST"))}
    name, _, value = mark.partition("=")
    told = tmp_path / "told"
    with told.open("w") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", held],
            cwd=ROOT,
            env=environment | {name: value},
            stdout=out,
            stderr=out,
        )
    try:
        waiting.until(lambda: "held" in told.read_text(), "what is held", seen=told.read_text)
        before = marked(mark)
        assert {p for p in programs if any(p in comm for comm in before.values())} == programs, before
        assert len(before) > 3
    finally:
        run.send_signal(signal.SIGKILL)
        waiting.ended(run)
    waiting.until(lambda: not marked(mark), "the end of all that it started", seen=lambda: marked(mark))
