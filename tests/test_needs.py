"""Tests on a machine without the programs that they need: skipped by name, or failed where skips are forbidden."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]
# One for each program: with nothing of it on the PATH they are skipped, and fail where skips are forbidden.
TESTS = (
    "tests/lower/model/test_collection.py::test_visualize_draws",
    "tests/browser/test_pages.py::test_the_card_of_a_model_has_the_ink_of_its_page",
    "tests/test_house.py::test_files_hold_no_leftovers",
    "tests/test_house.py::test_make_help_lists_every_target_that_is_no_file",
)


def on_a_bare_machine(folder: Path, *tests: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return ran(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        env={"PATH": str(folder), **environment},
        cwd=ROOT,
    )


def test_what_is_missing_is_skipped_by_its_name(tmp_path):
    done = on_a_bare_machine(tmp_path, *TESTS, FERRO_SKIPS="")
    assert done.returncode == 0, done.stdout
    for need in ("dot", "chromium", "git", "make"):
        assert f"needs {need}, which this machine has not; brought by {needs.NEEDS[need].by}" in done.stdout
    assert "5 skipped" in done.stdout
    assert "passed" not in done.stdout


def test_where_all_is_installed_a_skip_is_a_failure(tmp_path):
    done = on_a_bare_machine(tmp_path, TESTS[0], FERRO_SKIPS="none")
    assert done.returncode == 1
    assert "skipped where nothing may be skipped (FERRO_SKIPS=none): Skipped: needs dot" in done.stdout
    assert "1 error" in done.stdout


def test_tests_of_a_gpu_may_be_skipped_everywhere(tmp_path):
    test = "tests/runtime/plugin/test_devices.py::test_a_gpu_says_what_it_is"
    done = on_a_bare_machine(tmp_path, test, FERRO_SKIPS="none")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("need", needs.NEEDS)
def test_each_need_says_what_brings_it(need):
    assert needs.NEEDS[need].by
    assert isinstance(needs.is_met(need), bool)
