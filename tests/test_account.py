"""The figures of a trace: flows, shares, the critical path, the curve."""

from __future__ import annotations

import pytest

from dask_ferro.account import BusyShare, Family, Flow, PathStep, account
from dask_ferro.trace import Span, Trace, TracedTask
from tests.runs import RUN, W0, W1

FOUND = account(RUN)


@pytest.mark.parametrize(
    ("figure", "wanted"),
    [
        pytest.param(FOUND.steals, (Flow(W0, W1, 1, 1.0, 0),), id="who took tasks from whom"),
        pytest.param(FOUND.transfers, (Flow(W0, W1, 2, pytest.approx(0.65), 200),), id="who fetched from whom"),
        pytest.param(FOUND.workers,
            (BusyShare(W0, 2, 2, 1.5, 1.5 / 8, 0, 0, 1), BusyShare(W1, 1, 1, 2.5, 2.5 / 4, 200, 1, 0)),
            id="a worker's share counts all of its threads"),
        pytest.param(FOUND.prefixes, (Family("sum", 1, 2.5, 2.5, 2.5, 8), Family("load", 2, 1.5, 0.75, 1.0, 200)),
            id="the prefix that took longest comes first"),
        pytest.param(FOUND.ops, (Family("Relu", 1, 0.75, 0.75, 0.75, 60), Family("MatMul", 1, 0.25, 0.25, 0.25, 40)),
            id="ops are told apart from tasks"),
        pytest.param(FOUND.path,
            (PathStep("load-0", "load", W0, 1.0, 2.0, 0.0), PathStep(("sum", 0), "sum", W1, 2.5, 5.0, 0.5)),
            id="the path waits from its last input on"),
        pytest.param((FOUND.critical_path, FOUND.work, FOUND.lower_bound), (3.5, 4.0, 3.5),
            id="the chain is the bound"),
    ],
)  # fmt: skip
def test_figures(figure: object, wanted: object) -> None:
    assert figure == wanted


def test_work_is_the_bound_where_chains_are_short() -> None:
    tasks = tuple(TracedTask(f"t-{i}", "t", "t", 1.0) for i in range(4))
    spans = tuple(Span("compute", f"t-{i}", "t", "w", 0, i, i + 1.0) for i in range(4))
    assert account(Trace(spans, tasks, {"w": 2})).lower_bound == 2.0


def test_the_curve_holds_all_of_the_busy_time() -> None:
    (first, _), (second, _) = FOUND.curve[:2]
    assert first == 1.0
    assert sum(busy for _, busy in FOUND.curve) * (second - first) == pytest.approx(RUN.busy_seconds)
    assert max(busy for _, busy in FOUND.curve) == pytest.approx(2.0)


def test_an_empty_trace_has_no_figures_and_divides_by_nothing() -> None:
    found = account(Trace(workers={"w": 1}))
    assert (found.path, found.curve, found.critical_path, found.lower_bound) == ((), (), 0, 0.0)
    assert found.workers == (BusyShare("w", 1, 0, 0.0, 0.0, 0, 0, 0),)


def test_an_input_from_outside_of_the_trace_is_no_step_of_the_path() -> None:
    span, task = Span("compute", "a", "a", "w", 0, 0.0, 1.0), TracedTask("a", "a", "a", 1.0, 0, ("gone",))
    trace = Trace((span,), (task,), {"w": 1})
    assert [step.key for step in account(trace).path] == ["a"]
