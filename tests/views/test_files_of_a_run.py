"""The files that are made of one trace tell the same of each task: its thread, its start and its duration."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.account import account, in_turn
from dask_ferro.trace import DURATION, Span, Trace
from dask_ferro.views.chrome import chrome
from dask_ferro.views.run_report import run_report
from tests.runs import RUN

# A task as both files have it: its kind, key and worker, its start and its duration in microseconds.
Told = tuple[str, str, str, int, int]


def told_by_report(trace: Trace) -> Counter[Told]:
    data: dict[str, Any] = json.loads(
        re.search(r'id="run">(.*?)</script>', run_report(trace, account(trace), "a run")).group(1)
    )
    text = data["texts"]
    return Counter(
        (data["kinds"][kind], text[key], text[worker], start, took)
        for kind, key, _, worker, _, start, took, _, _ in data["spans"]
    )


def told_by_chrome(trace: Trace) -> Counter[Told]:
    events = chrome(trace)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return Counter(
        (e["cat"], e["args"]["key"], names[e["pid"]], e["ts"], e["dur"]) for e in events if e["ph"] == "X"
    )


_spans = st.builds(
    lambda kind, key, lane, start, seconds: Span(kind, key, "p", "w", lane, start, start + seconds, 1, "v"),
    st.sampled_from(["compute", "transfer", "steal"]),
    st.sampled_from(["a", "b", ("c", 1)]),
    st.integers(0, 1),
    st.floats(0, 0.2),
    st.floats(0, 0.1),
)


@pytest.mark.parametrize("trace", [RUN, Trace(workers={"w": 1})], ids=["a run", "an empty trace"])
def test_both_tell_the_same_of(trace: Trace) -> None:
    assert told_by_report(trace) == told_by_chrome(trace)


@given(st.lists(_spans, max_size=12))
def test_both_tell_the_same_of_each_span_whatever_the_clocks(spans: list[Span]) -> None:
    trace = Trace(tuple(spans), (), {"w": 2})
    told = told_by_report(trace)
    assert told == told_by_chrome(trace)
    assert told.total() == len(spans)


@given(st.lists(_spans, max_size=12))
def test_tasks_in_turn_keep_their_durations_and_are_late_by_a_clock_error_at_most(spans: list[Span]) -> None:
    trace = Trace(tuple(spans), (), {"w": 2})
    durations = sorted(span.seconds for span in spans)
    assert sorted(span.seconds for span in in_turn(trace).spans) == pytest.approx(durations)
    late = sum(s.start for s in in_turn(trace).spans) - sum(s.start for s in spans)
    assert -1e-9 <= late <= 0.02 * len(spans) + 1e-9


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        pytest.param([(0, 1.0), (0, 1.0)], [0.0, 0.0], id="tasks that share a thread overlap"),
        pytest.param([(0, 1.0), (0.99, 1.5)], [0.0, 1.0], id="a step back of the clock is made up for"),
        pytest.param([(0, 1.0), (0.99, 1.0), (1.0, 2.0)], [0.0, 1.0, 1.01], id="also for those after it"),
        pytest.param([(0, 1.0), (0.97, 1.5)], [0.0, 0.97], id="an overlap of 30 ms is real"),
        pytest.param([(0, 1.0), (1.2, 1.5)], [0.0, 1.2], id="a pause stays"),
    ],
)
def test_in_turn(spans: list[tuple[float, float]], wanted: list[float]) -> None:
    trace = Trace(tuple(Span("compute", str(i), "p", "w", 0, *at) for i, at in enumerate(spans)))
    assert [span.start for span in in_turn(trace).spans] == pytest.approx(wanted)


def test_the_critical_path_begins_where_it_is_drawn() -> None:
    spans = (Span("compute", "a", "p", "w", 0, 0.0, 1.0), Span("compute", "b", "q", "w", 0, 0.99, 2.0))
    tasks = tuple(
        t._replace(key=k, seconds=s.seconds) for t, k, s in zip(RUN.tasks, "ab", spans, strict=False)
    )
    found = account(Trace(spans, tasks, {"w": 1}))
    drawn = {key: start for _, key, _, start, _ in told_by_report(Trace(spans, tasks, {"w": 1}))}
    assert {step.key: round(step.start * 1e6) for step in found.path}.items() <= drawn.items()


def test_both_say_what_a_duration_is() -> None:
    assert chrome(RUN)["otherData"]["duration"] == DURATION
    assert DURATION.replace("'", "&#39;") in run_report(RUN, account(RUN), "a run")
