"""The assignment of test files to processes (tests/lanes.py)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.lanes import PROCESSES, WAITING, next_file
from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]
SLURM, SETTINGS, GRAPH, VIEWS = (
    "tests/slurm/test_elastic.py",
    "tests/test_settings_words.py",
    "tests/graph/model/test_load.py",
    "tests/views/test_pages.py",
)


@pytest.mark.parametrize(
    ("queue", "waits", "wanted"),
    [
        pytest.param([GRAPH, SLURM, VIEWS], True, SLURM, id="one that waits, for the process that waits"),
        pytest.param([SLURM, GRAPH, VIEWS], False, GRAPH, id="one that computes, for the others"),
        pytest.param([GRAPH, VIEWS], True, None, id="the one that waits does not help"),
        pytest.param([SLURM, SETTINGS], False, SLURM, id="the others help at the end"),
        pytest.param([], True, None, id="nothing is left to wait for"),
        pytest.param([], False, None, id="nothing is left"),
    ],
)
def test_the_next_file(queue, waits, wanted):
    assert next_file(queue, waits) == wanted


def test_what_waits_is_there():
    assert [name for name in WAITING if not (ROOT / name).exists()] == []


def test_each_process_runs_its_own_files(tmp_path):
    """Under xdist itself: files of one test each, three processes."""
    for name in (SLURM, SETTINGS, GRAPH, VIEWS):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def test_it():\n    pass\n")
    made = "def pytest_xdist_make_scheduler(config, log):\n    return Lanes(config, log)\n"
    (tmp_path / "conftest.py").write_text(f"from tests.lanes import Lanes\n\n\n{made}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-n",
        str(PROCESSES),
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
    ]
    done = ran(
        [*command, "--import-mode=importlib", "--rootdir", str(tmp_path), "tests"],
        env={"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )
    lines = re.findall(r"^\[(gw\d)\].* PASSED (\S+)::test_it", done.stdout, re.MULTILINE)
    found = {file: process for process, file in lines}
    assert "4 passed" in done.stdout, done.stdout + done.stderr
    assert found[SLURM] == "gw2", found
    assert "gw2" not in {found[GRAPH], found[VIEWS]}, found
