"""Export of a trace to Chrome's Trace Event Format, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

A worker is a process.  It has a track for each thread, with ops nested in their tasks, and as many tracks for transfers
and steals as avoid overlaps: slices of one track may nest but must not cross.  An arrow leads from the victim of a
steal to the task's start on the thief.  Times are whole microseconds from the first span's start: Perfetto drops a
slice that crosses another one, and rounding fractions can make touching slices cross.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from tlz import groupby

from dask_ferro.trace import DURATION, Span, Trace

# Track numbers per worker: a thousand for each thread, so that a thread's extra tracks follow it.
_PER_THREAD, _TRANSFERS, _STEALS = 1_000, 1_000_000, 2_000_000

Event = dict[str, Any]


def chrome_json(trace: Trace) -> str:
    """Return the trace as the text of a JSON file."""
    return json.dumps(chrome(trace), separators=(",", ":"), allow_nan=False)


def chrome(trace: Trace) -> dict[str, Any]:
    """Return the trace as the format's JSON object.

    Returns
    -------
    dict
        "traceEvents": names of processes and threads ("M"), slices ("X") and arrows ("s", "f"); "otherData": the
        run's figures, and what a duration is.
    """
    pids = {worker: number for number, worker in enumerate(dict.fromkeys(_workers(trace)), start=1)}
    zero = min((span.start for span in trace.spans), default=0.0)
    placed = list(_place_spans(trace, zero))
    events = [*_names(pids, placed), *_slices(pids, placed), *_arrows(pids, placed)]
    told = {**trace.summary(), "duration": DURATION}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}


def _workers(trace: Trace) -> Iterator[str]:
    yield from trace.workers
    yield from (span.worker for span in trace.spans)
    yield from (span.source for span in trace.spans if span.kind == "steal")


# ---- tracks ------------------------------------------------------------------------------------------------


class PlacedSpan(NamedTuple):
    """A span as it is drawn: its start and duration in microseconds, and the number of its track."""

    span: Span
    start: int
    took: int
    track: int


def _place_spans(trace: Trace, zero: float) -> Iterator[PlacedSpan]:
    ops = groupby(attrgetter("key", "worker"), trace.of("op"))
    for (_, lane), spans in groupby(attrgetter("worker", "lane"), trace.of("compute")).items():
        for task in _stack_spans(spans, zero):
            track = lane * _PER_THREAD + min(task.track, _PER_THREAD - 1)
            yield task._replace(track=track)
            for op in ops.get((task.span.key, task.span.worker), ()):
                start, took = op.microseconds(zero)
                if task.start <= start and start + took <= task.start + task.took:
                    yield PlacedSpan(op, start, took, track)
    for kind, first in (("transfer", _TRANSFERS), ("steal", _STEALS)):
        for spans in groupby(attrgetter("worker"), trace.of(kind)).values():
            yield from (one._replace(track=first + one.track) for one in _stack_spans(spans, zero))


def _stack_spans(spans: Iterable[Span], zero: float) -> Iterator[PlacedSpan]:
    """Yield each span in the first row in which it overlaps none."""
    ends: list[int] = []
    for span in sorted(spans, key=lambda s: (s.start, s.stop)):
        start, took = span.microseconds(zero)
        row = next((i for i, end in enumerate(ends) if start >= end), len(ends))
        ends[row : row + 1] = [start + took]
        yield PlacedSpan(span, start, took, row)


# ---- events ------------------------------------------------------------------------------------------------


def _names(pids: dict[str, int], placed: Iterable[PlacedSpan]) -> Iterator[Event]:
    for worker, pid in pids.items():
        yield _name("process_name", pid, 0, {"name": worker})
        yield _name("process_sort_index", pid, 0, {"sort_index": pid})
    for pid, tid in sorted({(pids[one.span.worker], one.track) for one in placed}):
        yield _name("thread_name", pid, tid, {"name": _track_name(tid)})
        yield _name("thread_sort_index", pid, tid, {"sort_index": tid})


def _name(kind: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _track_name(tid: int) -> str:
    if tid >= _STEALS:
        return "steals"
    if tid >= _TRANSFERS:
        return "transfers"
    lane, row = divmod(tid, _PER_THREAD)
    return f"thread {lane}" if not row else f"thread {lane}, overlapping"


def _slices(pids: dict[str, int], placed: Iterable[PlacedSpan]) -> Iterator[Event]:
    for span, start, took, track in placed:
        yield {
            "ph": "X",
            "name": span.prefix or span.kind,
            "cat": span.kind,
            "pid": pids[span.worker],
            "tid": track,
            "ts": start,
            "dur": took,
            "args": _arguments(span),
        }


def _arguments(span: Span) -> Event:
    arguments: Event = {"key": str(span.key), "bytes": span.nbytes}
    if span.kind == "op":
        engine, _, node = span.source.partition("/")
        return {**arguments, "engine": engine, "node": node}
    if span.source:
        arguments["from"] = span.source
    return arguments


def _arrows(pids: dict[str, int], placed: Iterable[PlacedSpan]) -> Iterator[Event]:
    """From a steal's request, on the victim, to where the task ran on the thief."""
    placed = list(placed)
    ran = {(one.span.key, one.span.worker): one for one in placed if one.span.kind == "compute"}
    steals = [one for one in placed if one.span.kind == "steal"]
    for number, (steal, requested, _, _) in enumerate(steals, start=1):
        task = ran.get((steal.key, steal.worker))
        if task is None:
            continue
        of = {"name": "steal", "cat": "steal", "id": number}
        begin, thief = min(requested, task.start), pids[steal.worker]
        yield {**of, "ph": "s", "pid": pids[steal.source], "tid": 0, "ts": begin}
        yield {**of, "ph": "f", "bp": "e", "pid": thief, "tid": task.track, "ts": task.start}
