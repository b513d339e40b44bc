"""The table of a check: a row for each fact, in any width, for any number of workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_ferro.runtime.check.cluster_check import ClusterCheck
from dask_ferro.runtime.check.facts import PACKAGES
from dask_ferro.views import check as view
from tests.runtime.check.test_findings import ON_SCHEDULER, ON_WORKER, SCHEDULER, SOUND, WORKER

FAULTY = ClusterCheck(
    replace(
        SOUND,
        scheduler=replace(SCHEDULER, **ON_SCHEDULER["no plugin"][0]),
        workers=[
            replace(WORKER, address=f"tcp://host-{i}:1", **row[0]) for i, row in enumerate(ON_WORKER.values())
        ],
    )
)


@pytest.mark.parametrize("columns", [60, 100])
def test_the_table_fits_the_terminal_and_has_every_row(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(FAULTY).splitlines()
    assert max(map(len, lines)) <= columns
    names = [line.split("  ")[0].strip() for line in lines]
    for row in (
        "Python",
        *PACKAGES,
        "extras",
        "status",
        "plugin",
        "threads",
        "memory",
        "clock",
        "path",
        "spills to",
    ):
        assert row in names
    assert {"error", "warning", "slow"} <= set(names)


def test_all_of_a_thousand_workers_are_one_column():
    facts = replace(
        SOUND, workers=[replace(WORKER, address=f"tcp://host-{i}:1", cores=(i, i + 1)) for i in range(1000)]
    )
    lines = str(ClusterCheck(facts)).splitlines()
    assert "1,000 workers" in lines[0]
    assert len(lines) < 30


def test_a_sound_cluster_says_so():
    assert str(ClusterCheck(SOUND)).splitlines()[-1] == "nothing is wrong"


def test_names_of_users_are_no_markup(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    check = ClusterCheck(replace(SOUND, path="/[bold]models[/bold]/:smile:<i>"))
    assert "/[bold]models[/bold]/:smile:<i>" in str(check)


def test_what_is_counted_of_workers():
    assert view.counted(["b"] * 2 + list("acdef")).startswith("2 x b, 1 x a")
    assert view.counted(["b"] * 2 + list("acdef")).endswith("and others")
