"""Values in a notebook: a table whose names are text, and texts that are one line however large the value."""

from __future__ import annotations

import builtins
from dataclasses import replace

import pytest

import dask_ferro as ff
import dask_ferro.parallel as fp
import dask_ferro.tensor as ft
from dask_ferro.observe.check import ClusterCheck
from dask_ferro.trace import Span, Trace, TracedTask
from tests.observe.test_rules import checked

PROPOSED = ff.propose_plans(ft.input("x", (4, 8)) @ ft.input("w", (8, 6)), 2)


def _trace(tasks: int) -> Trace:
    spans = [Span("compute", f"t-{i}", "t", f"w-{i % 2}", 0, i // 2, i // 2 + 0.9, 8) for i in range(tasks)]
    found = [TracedTask(f"t-{i}", "t", "t", 0.9) for i in range(tasks)]
    return Trace(tuple(spans), tuple(found), {"w-0": 1, "w-1": 1})


def _applied() -> ff.parallelize.PlannedGraph:
    with ft.region("layer"):
        y = ft.input("x", (4, 8)) @ ft.input("w", (8, 6))
    return ff.apply_plan(
        y, {"mesh": {"data": 2}, "inputs": {"[!w]*": {"data": 0}}, "layer": {"workers": [0, 1]}}
    )


class ZMQInteractiveShell:
    """The class by whose name rich knows a notebook, where it shows each text beside what it was asked for."""


def test_a_check_in_a_notebook_shows_nothing_but_its_text(monkeypatch, capsys) -> None:
    check = ClusterCheck(checked())
    elsewhere = repr(check)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert repr(check) == elsewhere
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (_trace(20), "<Trace: 20 tasks on 2 workers, 9.9 s, 91% utilization>"),
        (
            fp.Schedule.of([["0F0", "0B0"]], name="mine"),
            "<Schedule 'mine': 1 stages, 1 chunks, 1 micro-batches, 2 actions>",
        ),
        (PROPOSED, "<Proposals: 2 plans, best 1 x 1 x 1, 0 refused>"),
        (replace(PROPOSED, memory=1.0), "<Proposals: 2 plans, none fits, 0 refused>"),
        (
            _applied(),
            "<PlannedGraph: 1 nodes, plan <mapping>, mesh data 2, 1 values placed, 1 nodes in regions>",
        ),
        (ff.list_instructions(_trace(20)), "<20 instructions>"),
    ],
)
def test_a_repr_is_one_line_however_large_the_value(value, text):
    assert repr(value) == text


def test_proposals_of_which_none_fits_are_printed_without_a_mark():
    assert "*" not in str(replace(PROPOSED, memory=1.0))
