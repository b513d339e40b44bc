"""The table of a check: a row for each fact, in any width, for any number of workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_ferro.observe.check import ClusterCheck
from dask_ferro.observe.facts import PACKAGES
from dask_ferro.views import check as view
from tests.observe.test_rules import ON_BOTH, ON_SCHEDULER, ON_WORKER, PROCESS, checked

FAULTY = ClusterCheck(
    checked(
        replace(PROCESS, **ON_SCHEDULER["no plugin"][0]),
        **{
            f"host-{i}": replace(PROCESS, **row[0])
            for i, row in enumerate([*ON_BOTH.values(), *ON_WORKER.values()])
        },
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
        "status",
        "plugin",
        "threads",
        "GPUs",
        "memory",
    ):
        assert row in names
    assert {"error", "warning", "slow"} <= set(names)


def test_all_of_a_thousand_workers_are_one_column():
    facts = checked(**{f"host-{i}": PROCESS for i in range(1000)})
    lines = str(ClusterCheck(facts)).splitlines()
    assert "1,000 workers" in lines[0]
    assert len(lines) < 30


def test_a_sound_cluster_says_so():
    assert str(ClusterCheck(checked())).splitlines()[-1] == "nothing is wrong"


def test_names_of_users_are_no_markup(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    check = ClusterCheck(checked(replace(PROCESS, host="[bold]node[/bold]:smile:<i>")))
    assert "[bold]node[/bold]:smile:<i>" in str(check)


def test_what_is_counted_of_workers():
    assert view.count_texts(["b"] * 2 + list("acdef")).startswith("2 x b, 1 x a")
    assert view.count_texts(["b"] * 2 + list("acdef")).endswith("and others")
