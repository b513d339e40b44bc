"""The trace's figures and its file format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.errors import InputError
from dask_ferro.trace import ModelPart, Span, Trace, TracedTask

RUN = Trace(
    spans=(
        Span("compute", "a", "a", "w0", 0, 1.0, 2.0, 100),
        Span("steal", ("b", 0), "b", "w1", 0, 1.5, 2.25, source="w0"),
        Span("transfer", ("b", 0), "b", "w1", 0, 2.0, 2.25, 100, "w0"),
        Span("compute", ("b", 0), "b", "w1", 0, 2.5, 5.0, 8),
    ),
    tasks=(TracedTask("a", "a", "a", 1.0, 100), TracedTask(("b", 0), "b", "b", 2.5, 8, ("a",))),
    workers={"w0": 1, "w1": 2, "idle": 1},
    counts={"requests": 1, "confirmed": 1},
)


@pytest.mark.parametrize(
    ("trace", "wanted"),
    [
        pytest.param(RUN, {
            "requests": 1, "confirmed": 1, "tasks": 2, "workers": 3, "threads": 4, "makespan": 4.0,
            "busy_seconds": 3.5, "utilization": 3.5 / 16, "critical_path": 3.5, "lower_bound": 3.5,
            "transfers": 1, "transfer_seconds": 0.25, "transfer_bytes": 100, "steals": 1,
        }, id="a run's figures"),
        pytest.param(Trace(), {
            "tasks": 0, "workers": 0, "threads": 0, "makespan": 0.0, "busy_seconds": 0, "utilization": 0.0,
            "critical_path": 0.0, "lower_bound": 0.0,
            "transfers": 0, "transfer_seconds": 0, "transfer_bytes": 0, "steals": 0,
        }, id="an empty trace divides by nothing"),
    ],
)  # fmt: skip
def test_summary(trace: Trace, wanted: dict[str, float]) -> None:
    assert trace.summary() == wanted


def test_work_is_the_bound_where_chains_are_short() -> None:
    tasks = tuple(TracedTask(f"t-{i}", "t", "t", 1.0) for i in range(4))
    spans = tuple(Span("compute", f"t-{i}", "t", "w", 0, i, i + 1.0) for i in range(4))
    assert Trace(spans, tasks, {"w": 2}).lower_bound == 2.0


def test_an_input_from_outside_of_the_trace_is_no_part_of_its_critical_path() -> None:
    assert Trace((), (TracedTask("a", "a", "a", 1.0, 0, ("gone",)),), {"w": 1}).critical_path == 1.0


def test_busy_names_every_worker() -> None:
    assert RUN.busy == {"w0": 1.0, "w1": 2.5, "idle": 0.0}


@pytest.mark.parametrize("name", ["run.ferrotrace", "run.ferrotrace.gz"])
def test_file_round_trip(tmp_path: Path, name: str) -> None:
    RUN.save(tmp_path / name)
    assert Trace.load(tmp_path / name) == RUN
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_equal_traces_give_equal_files(tmp_path: Path) -> None:
    for name in ("one.gz", "two.gz"):
        RUN.save(tmp_path / name)
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()


def test_file_is_json_lines_that_name_their_columns(tmp_path: Path) -> None:
    RUN.save(tmp_path / "run.ferrotrace")
    head, first, *_ = map(json.loads, (tmp_path / "run.ferrotrace").read_text().splitlines())
    assert head["ferrotrace"] == 1
    assert dict(zip(head["span"], first[1:], strict=True)) == RUN.spans[0]._asdict()


_texts = st.text(max_size=8)
_scalars = _texts | st.integers() | st.floats(allow_nan=False) | st.binary(max_size=4)
_keys = _texts | st.recursive(_scalars, lambda part: st.lists(part, max_size=3).map(tuple), max_leaves=6)
_seconds = st.floats(0, 1e6)
_counts = st.integers(0, 2**60)
_kinds = st.sampled_from(["compute", "transfer", "steal"])
_places = (_texts, _texts, _counts, _seconds, _seconds, _counts, _texts, _texts, _texts)
_spans = st.builds(Span, _kinds, _keys, *_places)
_whole = st.none() | st.integers(-5, 2**40)
_abouts = st.builds(ModelPart, _texts, _texts, _whole, _whole)
_waits_for = st.lists(_keys, max_size=3).map(tuple)
_tasks = st.builds(TracedTask, _keys, _texts, _texts, _seconds, _counts, _waits_for, _whole, _abouts)


def _as_they_ran(tasks: list[TracedTask]) -> tuple[TracedTask, ...]:
    """Return tasks with each key once, and none before its dependencies."""
    once = {task.key: task for task in tasks}
    place = {key: i for i, key in enumerate(once)}
    return tuple(
        task._replace(dependencies=tuple(d for d in task.dependencies if place.get(d, -1) < i))
        for i, task in enumerate(once.values())
    )


_traces = st.builds(
    Trace,
    st.lists(_spans, max_size=4).map(tuple),
    st.lists(_tasks, max_size=4).map(_as_they_ran),
    st.dictionaries(_texts, st.integers(0, 4096), max_size=3),
    st.dictionaries(_texts, _seconds, max_size=3),
)


def _types(value: object) -> object:
    return tuple(map(_types, value)) if isinstance(value, tuple) else type(value)


@given(_traces)
def test_every_key_of_dask_survives_the_file(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    trace.save(path)
    again = Trace.load(path)
    assert again == trace
    keys = [[s.key for s in t.spans] + [(k.key, k.dependencies) for k in t.tasks] for t in (again, trace)]
    assert [*map(_types, keys[0])] == [*map(_types, keys[1])]


HEAD = '{"ferrotrace": 1, "workers": {}, "counts": {}, "rows": [1, 0]}\n'
SPAN = '["span", "compute", "k", "p", "w", 0, 0.0, 1.0, 8, "", "", ""]\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("", "wanted a trace of version 1", id="an empty file is no trace"),
        pytest.param(HEAD.replace(": 1", ": 2") + SPAN, "wanted a trace of version 1",
            id="another version is refused"),
        pytest.param(HEAD.replace('"workers": {}', '"workers": {"w": -1}'), "first line is damaged",
            id="less than no threads"),
        pytest.param(HEAD, r"got \[0, 0\].*wanted \[1, 0\]", id="rows are missing"),
        pytest.param(HEAD + SPAN[:20], "line 2", id="a row is cut short"),
        pytest.param(HEAD + SPAN.replace("0.0", "NaN"), "line 2.*finite", id="a time is no number"),
        pytest.param(HEAD + '["event"]\n', "line 2.*'event'", id="an unknown row is named"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.ferrotrace"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        Trace.load(path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(gzip.compress(HEAD.encode() * 99)[:40], id="compressed and cut short"),
        pytest.param(b"\x1f\x8bnothing", id="the magic number and no more"),
        pytest.param(b"\xff\xfe\x00", id="no text"),
    ],
)
def test_damaged_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.ferrotrace.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.ferrotrace\.gz.*cannot be read"):
        Trace.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.ferrotrace.*cannot be read"):
        Trace.load(tmp_path / "none.ferrotrace")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.ferrotrace.*cannot be written"):
        RUN.save(tmp_path / "no-such-folder" / "run.ferrotrace")


def test_a_key_that_is_none_of_dasks_is_refused(tmp_path: Path) -> None:
    trace = Trace(tasks=(TracedTask(frozenset({1}), "p", "g", 1.0),))
    with pytest.raises(InputError, match="frozenset"):
        trace.save(tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
