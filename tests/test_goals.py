"""The goals of the benchmarks: what is met by which record, and that the documents tell what the records say."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def goals(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("goals")


def metg(stock, ours, bundled):
    own = {"stock": {"metg_ms": stock}, "ours": {"metg_ms": ours}, "bundled": {"metg_ms": bundled}}
    return {"metg 2": {"tree, width 2": own}, "submission": {"tasks": 1000, "seconds": 2.5}}


@pytest.mark.parametrize(
    ("figures", "met"),
    [
        ((9.0, 2.9, 0.9), [True, True, False]),
        ((9.0, 3.1, 1.1), [False, False, False]),
        ((4.0, 1.0, None), [False, True, False]),
        ((None, 3.0, 0.5), [True, True, False]),
    ],
)
def test_metg_is_met_below_a_bound_and_a_share_of_stock(goals, figures, met):
    assert [figure.is_met for figure in goals.bundles(metg(*figures))] == met


def test_what_is_above_a_bound_is_named(goals):
    def program(ours, bundled, peak):
        found = {"stock": (1.0, 100.0), "ours": (ours, 100.0), "bundled": (bundled, peak)}
        return {c: {"over_stock": ratio, "peak_mib": mib} for c, (ratio, mib) in found.items()}

    programs = {"svd": program(1.0, 0.5, 100.0), "merge": program(1.1, 1.02, 106.0)}
    found = list(goals.real({"programs": programs, "geometric_means": {"bundled": 0.71}}))
    assert [(f.seen, f.is_met) for f in found] == [
        ("merge 1.10", False),
        ("1.02", True),
        ("0.71", True),
        ("merge 1.06", False),
    ]


def test_the_documents_have_the_table_of_the_records(goals):
    printed = ran([sys.executable, ROOT / "benchmarks" / "goals.py", "--markdown"]).stdout
    assert printed.strip() in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
