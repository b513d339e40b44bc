"""The tests that `make quick` and `make test K=...` run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import quick
from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tests_at(tmp_path, monkeypatch):
    """A folder of tests with one file, and a helper that starts processes."""
    monkeypatch.setattr(quick, "TESTS", tmp_path)
    (tmp_path / "starter.py").write_text("import subprocess\n")
    (tmp_path / "facts.py").write_text("import math\n")

    def written(text):
        path = tmp_path / "graph" / f"test_{abs(hash(text))}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return written


@pytest.mark.parametrize(
    ("text", "is_quick"),
    [
        pytest.param("import math\nfrom tests.facts import row\ndef test(tmp_path): ...", True, id="plain"),
        pytest.param("import distributed", False, id="a cluster"),
        pytest.param("from distributed import Client", False, id="a name of a cluster's"),
        pytest.param("from distributed.stealing import WorkStealing", False, id="from a module of it"),
        pytest.param("import subprocess as s", False, id="a process"),
        pytest.param("def test():\n    import subprocess", False, id="in a function"),
        pytest.param("def test(client): ...", False, id="the shared client"),
        pytest.param("def test(client_of_mine): ...", True, id="a fixture of another name"),
        pytest.param("from tests.starter import start", False, id="by another module of the tests"),
        pytest.param("from tests import starter", False, id="by that module itself"),
        pytest.param("from ..starter import start", False, id="by a relative import"),
        pytest.param("from .. import starter, facts", False, id="by one of the module itself"),
        pytest.param("from ..facts import row", True, id="by a relative import of what starts nothing"),
        pytest.param("import tests.starter", False, id="by its whole name"),
        pytest.param("WORD = 'import distributed'", True, id="in words"),
    ],
)
def test_what_starts_something_is_not_quick(tests_at, text, is_quick):
    assert quick.is_quick(tests_at(text)) is is_quick


def test_a_file_that_is_named_slow_is_not_quick(tests_at, monkeypatch):
    path = tests_at("import math")
    monkeypatch.setattr(quick, "SLOW", {f"graph/{path.name}": 9})
    assert not quick.is_quick(path)


def test_the_files_that_are_named_slow_are_there_and_would_be_quick():
    files = [quick.TESTS / name for name in quick.SLOW]
    assert [file for file in files if not file.is_file() or quick.starts(file)] == []


def test_the_decisions_are_quick():
    wanted = [
        "policy/stealing/test_policies.py",
        "policy/test_placement.py",
        "policy/stealing/test_policy_properties.py",
        "graph/bundling/test_select.py",
    ]
    assert all(quick.is_quick(quick.TESTS / name) for name in wanted)
    assert not quick.is_quick(quick.TESTS / "runtime" / "elastic" / "test_retirement.py")


# As if no make ran this test.
OWN_MAKE = dict.fromkeys(("MAKEFLAGS", "MFLAGS", "K"), "")


def pytest_lines(tmp_path, *arguments):
    """The pytest commands that make would run, whatever the options of the make that runs this test."""
    done = ran(["make", "--dry-run", f"VENV={tmp_path}", *arguments], check=True, env=OWN_MAKE, cwd=ROOT)
    return [line.partition(" -m pytest ")[2] for line in done.stdout.splitlines() if " -m pytest " in line]


@pytest.mark.needs("make")
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        pytest.param("tests/policy", '-q -m "not soak" tests/policy', id="a folder"),
        pytest.param("tests/policy/x.py::test_it", '-q -m "not soak" tests/policy/x.py::test_it', id="a test"),
        pytest.param("steal and not slurm", "-q -m \"not soak\" -k 'steal and not slurm'", id="words"),
    ],
)  # fmt: skip
def test_k_is_a_part_of_the_tests_in_one_process(tmp_path, given, wanted):
    assert pytest_lines(tmp_path, "test", f"K={given}") == [wanted]


@pytest.mark.needs("make")
def test_without_k_the_three_parts_run_as_ever(tmp_path):
    lines = pytest_lines(tmp_path, "test")
    assert len(lines) == 3
    assert not any(" -k " in line for line in lines)
    assert '-m "not soak" -n 3' in lines[2]


@pytest.mark.needs("make")
def test_quick_runs_the_quick_ones(tmp_path):
    (line,) = pytest_lines(tmp_path, "quick")
    assert "--quick" in line
