"""The tests that are repeated in CI, and their report."""

from __future__ import annotations

import sys

import pytest

from tests.programs import ran
from tests.second_try import VARIABLE

FAILS_ONCE = """
from pathlib import Path
{start}
SEEN = Path(__file__).with_suffix(".seen")

def test_it():
    first = not SEEN.exists()
    SEEN.touch()
    assert not first, "the first time"
"""


@pytest.mark.parametrize(
    ("start", "allowed", "status", "said"),
    [
        pytest.param("import subprocess", "1", 0, "1 passed, 1 rerun in", id="it starts processes"),
        pytest.param("import subprocess", "", 1, "1 failed in", id="it is not allowed here"),
        pytest.param("import math", "1", 1, "1 failed in", id="it starts nothing"),
    ],
)
def test_who_starts_processes_has_a_second_try_where_that_is_allowed(tmp_path, start, allowed, status, said):
    file = tmp_path / "test_once.py"
    file.write_text(FAILS_ONCE.format(start=start))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -raR --strict-markers\n")
    done = ran(
        [*(sys.executable, "-m", "pytest", "-p", "tests.second_try"), "--rerun-show-tracebacks", str(file)],
        env={VARIABLE: allowed, "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout
    assert "AssertionError: the first time" in done.stdout
