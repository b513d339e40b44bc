"""The Chrome trace: what the format asks for, and that nothing is lost or drawn across."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.trace import DURATION, Span, Trace
from dask_ferro.views.chrome import chrome, chrome_json
from tests.runs import RUN, W0, W1

# Fields of each phase and their types, from "Trace Event Format", and nothing beside them.
_COMMON = {"ph": str, "name": str, "pid": int, "tid": int, "ts": int}
_FIELDS: dict[str, dict[str, Any]] = {
    "X": {**_COMMON, "cat": str, "dur": int, "args": dict},
    "M": {**_COMMON, "args": dict},
    "s": {**_COMMON, "cat": str, "id": int},
    "f": {**_COMMON, "cat": str, "id": int, "bp": str},
}
_METADATA = {
    "process_name": {"name": str},
    "thread_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_sort_index": {"sort_index": int},
}


def slices(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and e["cat"] == kind]


def check_format(found: dict[str, Any]) -> None:
    """Assert that an object is one of the format's, and can be drawn: slices of a track nest or are apart."""
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    for event in found["traceEvents"]:
        fields = _FIELDS[event["ph"]]
        assert set(event) == set(fields), event
        assert all(isinstance(event[name], kind) for name, kind in fields.items()), event
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "M":
            assert {k: type(v) for k, v in event["args"].items()} == _METADATA[event["name"]]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for track in tracks.values():
        for (_, stop), (start, end) in pairwise(sorted(track, key=lambda t: (t[0], -t[1]))):
            assert start >= stop or end <= stop


def test_a_run_in_the_format() -> None:
    found = json.loads(chrome_json(RUN))
    check_format(found)
    events = found["traceEvents"]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices(events, "compute")] == [
        ("load", 0.0, 1e6),
        ("load", 0.0, 0.5e6),
        ("sum", 1.5e6, 2.5e6),
    ]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {W0, W1}
    assert found["otherData"]["confirmed"] == 1
    assert found["otherData"]["duration"] == DURATION


def test_spans_add_up_to_the_busy_time() -> None:
    drawn = sum(e["dur"] for e in slices(chrome(RUN)["traceEvents"], "compute")) * 1e-6
    assert drawn == pytest.approx(RUN.busy_seconds)


def test_ops_lie_within_their_task() -> None:
    events = chrome(RUN)["traceEvents"]
    task = next(e for e in slices(events, "compute") if e["args"]["key"] == "load-0")
    ops = slices(events, "op")
    assert {(e["pid"], e["tid"]) for e in ops} == {(task["pid"], task["tid"])}
    assert [(e["name"], e["args"]["engine"], e["args"]["node"], e["args"]["bytes"]) for e in ops] == [
        ("MatMul", "array", "mm", 40),
        ("Relu", "array", "relu", 60),
    ]


def test_an_arrow_leads_from_the_victim_to_where_the_task_ran() -> None:
    events = chrome(RUN)["traceEvents"]
    pids = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    begin, end = (next(e for e in events if e["ph"] == ph) for ph in "sf")
    assert (begin["pid"], begin["ts"]) == (pids[W0], 0.5e6)
    assert (end["pid"], end["ts"], end["id"]) == (pids[W1], 1.5e6, begin["id"])


def test_coroutines_that_share_a_thread_get_tracks_of_their_own() -> None:
    spans = tuple(Span("compute", f"c-{i}", "c", "w", 0, 0.1 * i, 1.0) for i in range(3))
    found = chrome(Trace(spans, (), {"w": 1}))
    check_format(found)
    names = [e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["thread 0", "thread 0, overlapping", "thread 0, overlapping"]


def test_an_empty_trace_is_an_empty_picture() -> None:
    found = chrome(Trace(workers={"w": 1}))
    check_format(found)
    assert [e["ph"] for e in found["traceEvents"]] == ["M", "M"]


_seconds = st.floats(0, 100)
_spans = st.builds(
    lambda kind, key, worker, lane, start, seconds: Span(
        kind, key, "p", worker, lane, start, start + seconds, 1, "v" if kind != "compute" else ""
    ),
    st.sampled_from(["compute", "transfer", "steal"]),
    st.sampled_from(["a", "b", ("c", 1)]),
    st.sampled_from(["w0", "w1"]),
    st.integers(0, 2),
    _seconds,
    _seconds,
)


@given(st.lists(_spans, max_size=12))
def test_whatever_overlaps_every_slice_is_there_and_none_cross(spans: list[Span]) -> None:
    trace = Trace(tuple(spans), (), {"w0": 1})
    found = chrome(trace)
    check_format(found)
    drawn = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert len(drawn) == len(spans)
    taken = 1e6 * sum(s.seconds for s in spans)
    assert sum(e["dur"] for e in drawn) == pytest.approx(taken, abs=1 + len(spans))  # whole microseconds
