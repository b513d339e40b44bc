"""The releases that `pyproject.toml` allows; `make test-versions` runs the oldest, a middle and the newest."""

from __future__ import annotations

import re
import tomllib

from tests import versions

PROJECT = tomllib.loads((versions.ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_next_release_of_dask_can_be_installed():
    rows = [row for row in versions.requirements(PROJECT) if re.match(r"(dask|distributed)\b(?!-)", row)]
    assert len(rows) == 2
    assert not [row for row in rows if "<" in row or "==" in row or "!=" in row]
    assert len({row.partition(">=")[2] for row in rows}) == 1, "both are released together"


def test_all_that_runs_has_a_lower_bound():
    rows = versions.requirements(PROJECT)
    assert len(versions.lower_bounds(rows)) == len(rows) > 12


def test_what_runs_on_each_release_is_there():
    for where in versions.FAST:
        path, _, name = where.partition("::")
        assert f"def {name}" * bool(name) in (versions.ROOT / path).read_text(), where
