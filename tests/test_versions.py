"""The releases that `pyproject.toml` allows, and those on which `make test-versions` runs the tests."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from tests import versions

PROJECT = tomllib.loads((versions.ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_next_release_of_dask_can_be_installed():
    rows = [row for row in versions.requirements(PROJECT) if re.match(r"(dask|distributed)\b(?!-)", row)]
    assert len(rows) == 2
    assert not [row for row in rows if "<" in row or "==" in row or "!=" in row]
    assert len({row.partition(">=")[2] for row in rows}) == 1, "both are released together"


def test_the_oldest_are_the_lower_bounds_of_all_that_runs():
    extras = {"dashboard": ["bokeh>=3.6"], "io": ["zarr>=3.0.8,<4"], "slurm": [], "bench": ["scipy>=1"]}
    project = {"project": {"dependencies": ["dask[array]>=2025.4.1"], "optional-dependencies": extras}}
    oldest, *others = versions.releases(project)
    assert oldest.pins == ("dask==2025.4.1", "bokeh==3.6", "zarr==3.0.8")
    assert {row.ranges for row in others} == {("dask[array]>=2025.4.1", "bokeh>=3.6", "zarr>=3.0.8,<4")}


def test_all_that_runs_has_a_lower_bound():
    rows = versions.requirements(PROJECT)
    assert len(versions.lower_bounds(rows)) == len(rows) > 12


def test_a_requirement_without_a_lower_bound_is_refused():
    with pytest.raises(ValueError, match="no lower bound in 'numpy'"):
        versions.lower_bounds(["dask[array]>=2025.4", "numpy"])


def test_the_middle_is_held_to_one_release_of_dask_alone():
    middle = next(row for row in versions.releases(PROJECT) if row.name == "middle")
    least = versions.lower_bounds(versions.requirements(PROJECT))["dask"]
    name, _, version = middle.pins[0].partition("==")
    assert (name, middle.pins[1]) == ("dask", f"distributed=={version}")
    assert [int(n) for n in version.split(".")] > [int(n) for n in least.split(".")]


def test_an_environment_is_made_once_and_again_when_its_releases_change(tmp_path, monkeypatch):
    """With a `pip` of its own that installs nothing, and says what it was asked for."""
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    asked = []
    done = subprocess.CompletedProcess([], 0)

    def called(command, **options):
        asked.append(command)
        (tmp_path / "one").mkdir(exist_ok=True)
        return done

    monkeypatch.setattr(versions.subprocess, "run", called)
    monkeypatch.setattr(versions, "interpreter", lambda version: sys.executable)
    one = versions.Releases("one", "3.11", ("dask>=2025.4",), ("dask==2025.12.0",))
    assert versions.prepared(one) == tmp_path / "one" / "bin" / "python"
    assert (tmp_path / "one" / "constraints").read_text() == "dask==2025.12.0"
    made = len(asked)
    assert made == 2
    versions.prepared(one)
    assert len(asked) == made
    versions.prepared(one._replace(pins=("dask==2026.1.0",)))
    assert len(asked) == 2 * made


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        pytest.param((0, 0, 0), 0, id="all pass"),
        pytest.param((0, 1, 0), 1, id="one that fails is the whole's"),
        pytest.param((3, 1, 0), 3, id="the first that fails is told"),
    ],
)
def test_every_set_is_run_and_told_in_one_line(statuses, status, monkeypatch, capsys):
    left = list(statuses)

    def run(wanted):
        return versions.Outcome(wanted.name, {"dask": "2025.12.0"}, left.pop(0), "7 passed in 1.00s")

    monkeypatch.setattr(versions, "run", run)
    assert versions.main([]) == status
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == ["oldest", "middle", "newest"]
    assert ["passed" in line.split(":")[0] for line in told] == [s == 0 for s in statuses]


def test_a_name_that_is_no_set_is_refused(capsys):
    assert versions.main(["latest"]) == 2
    assert "no such releases: latest" in capsys.readouterr().err


@pytest.mark.parametrize("where", versions.FAST)
def test_what_is_run_is_there(where):
    path, _, name = where.partition("::")
    file = versions.ROOT / path
    assert file.is_dir() if file.suffix == "" else f"def {name}" in file.read_text(encoding="utf-8")
