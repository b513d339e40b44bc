"""The report of a run as one offline HTML file: timeline, utilization, critical path, flows, tables.

The file contains its styles, its script and the spans.  The script (`run_report.js`) draws the timeline; tables and the
one curve need none.  The page follows the browser's light or dark theme.  All text from a run (keys, prefixes,
addresses) is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment

from dask_ferro.account import Account, BusyShare, Family, Flow, PathStep, in_turn
from dask_ferro.trace import DURATION, Span, Trace
from dask_ferro.views.terminal import duration, many, share, size

# The most spans in the file, the longest ones: 4 MB, which a browser draws in one frame.
_SPANS = 100_000
# The most workers in a matrix: with more, its cells are too small to read.
_MATRIX = 32
_ROWS = 40
# Width and height of the curve's drawing, which the browser stretches to the page's width.
_CURVE = 1000, 120
_KINDS = ("compute", "transfer", "steal", "op")


def run_report(trace: Trace, found: Account, title: str) -> str:
    """Return the page.

    Parameters
    ----------
    trace : Trace
    found : Account
        The figures of that trace (`account`).
    title : str
        The title of the page, as plain text.
    """
    trace = in_turn(trace)
    spans = _kept(trace.spans)
    sections = [
        ("Timeline", _timeline_note(trace, spans), None),
        ("Utilization", _utilization_note(trace), _curve(trace, found)),
        ("Critical path", _path_note(found), _path(found.path, _zero(trace))),
        ("Flows of tasks", _steals_note(found.steals), _matrix(found.steals, "moved")),
        ("Flows of bytes", _transfers_note(found.transfers), _matrix(found.transfers, "bytes")),
        ("Workers", "", _workers(found.workers, trace.makespan)),
        ("Tasks by prefix", "", _families(found.prefixes, "prefix")),
        ("Ops", _ops_note(found.ops), _families(found.ops, "op") if found.ops else None),
        ("All figures", "", _figures(trace.summary())),
    ]
    # Names in a run may look like markup: everything except our own style and script is escaped, also "<" in the data.
    environment = Environment(autoescape=True)
    # 100,000 spans are 4 MB without blanks.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment.from_string(_asset("run_report.html")).render(
        title=title,
        style=_asset("run_report.css"),
        script=_asset("run_report.js"),
        cards=_cards(trace, found),
        sections=sections,
        data=_data(trace, found, spans),
    )


def _asset(name: str) -> str:
    return files("dask_ferro.views").joinpath(name).read_text(encoding="utf-8")


class _TableOfText(NamedTuple):
    """A table: the first `left` columns are text, the others numbers; `number` counts all rows, shown or not."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: int = 1
    number: int = 0
    what: str = ""


class _Matrix(NamedTuple):
    """A matrix of flows between workers; each cell has a heat from 0 to 100 and a text."""

    names: list[str]
    rows: list[tuple[str, list[tuple[int, str]]]]
    number: int


class _Curve(NamedTuple):
    """The curve of busy threads as an SVG path."""

    path: str
    ceiling: str
    threads: int
    makespan: str
    size: tuple[int, int]


# ---- the numbers -------------------------------------------------------------------------------------------


def _cards(trace: Trace, found: Account) -> list[tuple[str, str, str]]:
    counts = trace.counts
    threads = sum(trace.workers.values())
    over = f"{trace.makespan / found.lower_bound:.2f} x" if found.lower_bound else "-"
    transfers = sum(flow.times for flow in found.transfers)
    size_of = f"{many(len(trace.workers), 'worker')}, {many(threads, 'thread')}"
    answers = f"{counts.get('refused', 0):,.0f} refused, {counts.get('stale', 0):,.0f} stale"
    return [
        ("makespan", duration(trace.makespan), f"{over} the lower bound"),
        ("utilization", share(trace.utilization, 1.0), f"{duration(found.work)} of work"),
        ("tasks", f"{len(trace.tasks):,}", size_of),
        ("critical path", duration(found.critical_path), many(len(found.path), "task")),
        ("moved", f"{counts.get('confirmed', sum(f.times for f in found.steals)):,.0f}", answers),
        ("fetched", size(sum(f.nbytes for f in found.transfers)), many(transfers, "transfer")),
    ]


def _figures(summary: dict[str, float]) -> _TableOfText:
    rows = [(name.replace("_", " "), _figure(name, value)) for name, value in summary.items()]
    return _TableOfText(("figure", "value"), rows)


def _figure(name: str, value: float) -> str:
    if "bytes" in name:
        return size(value)
    if "seconds" in name or name in ("makespan", "elapsed"):
        return duration(value)
    return share(value, 1.0) if name == "utilization" else f"{value:,.6g}"


# ---- tables ------------------------------------------------------------------------------------------------


def _workers(workers: Sequence[BusyShare], makespan: float) -> _TableOfText:
    rows = [
        (
            w.worker,
            str(w.threads),
            f"{w.tasks:,}",
            duration(w.busy),
            share(w.busy, makespan * w.threads),
            size(w.fetched),
            str(w.stolen_in),
            str(w.stolen_out),
        )
        for w in workers[:_ROWS]
    ]
    columns = ("worker", "threads", "tasks", "busy", "utilization", "fetched", "stolen in", "stolen out")
    return _TableOfText(columns, rows, number=len(workers), what="workers")


def _families(families: Sequence[Family], what: str) -> _TableOfText:
    total = sum(f.seconds for f in families)
    rows = [
        (
            f.name,
            f"{f.times:,}",
            duration(f.seconds),
            share(f.seconds, total),
            duration(f.median),
            duration(f.longest),
            size(f.nbytes),
        )
        for f in families[:_ROWS]
    ]
    columns = (what, "times", "seconds", "share", "median", "longest", "bytes made")
    return _TableOfText(columns, rows, number=len(families), what=f"kinds of {what}")


def _ops_note(ops: Sequence[Family]) -> str:
    if not ops:
        return "Not recorded: use ff.trace(client, ops=True) to see the ops inside bundles."
    return "Ops inside the bundles. A row with several nodes is a session that was timed as a whole."


# ---- the critical path -------------------------------------------------------------------------------------


def _path_note(found: Account) -> str:
    if not found.path:
        return "No task finished within the trace."
    waited = sum(step.waited for step in found.path)
    return (
        f"The chain of dependent tasks with the most seconds: {duration(found.critical_path)} of computation. In this"
        f" run its tasks waited another {duration(waited)} between their last input and their start."
    )


def _path(path: Sequence[PathStep], zero: float) -> _TableOfText | None:
    if not path:
        return None
    shown = sorted(sorted(path, key=lambda s: s.start - s.stop - s.waited)[:_ROWS], key=lambda s: s.start)
    rows = [
        (
            str(step.key),
            step.prefix,
            step.worker,
            duration(max(step.start - zero, 0.0)),
            duration(max(step.stop - step.start, 0.0)),
            duration(step.waited),
        )
        for step in shown
    ]
    columns = ("task", "prefix", "worker", "started at", "computed", "waited")
    return _TableOfText(
        columns, rows, 3, len(path), "tasks, the longest ones, in the order in which they ran"
    )


# ---- flows -------------------------------------------------------------------------------------------------


def _steals_note(flows: Sequence[Flow]) -> str:
    if not flows:
        return "No task was stolen."
    return "Stolen tasks, from the victim (row) to the thief (column)."


def _transfers_note(flows: Sequence[Flow]) -> str:
    if not flows:
        return "No input was fetched from another worker."
    return "Bytes of fetched inputs, from the sender (row) to the receiver (column)."


def _matrix(flows: Sequence[Flow], unit: str) -> _Matrix | None:
    """Return the matrix of some flows; the heat of a cell is its percentage of the largest."""
    if not flows:
        return None
    cells = {(f.source, f.worker): float(f.nbytes if unit == "bytes" else f.times) for f in flows}
    totals: Counter[str] = Counter()
    for pair, value in cells.items():
        totals.update(dict.fromkeys(pair, value))
    names = sorted(name for name, _ in totals.most_common(_MATRIX))
    most = max(cells.values()) or 1.0

    def cell(value: float) -> tuple[int, str]:
        text = size(value) if unit == "bytes" else f"{value:,.0f}"
        return round(100 * value / most), text if value else ""

    def row(name: str) -> tuple[str, list[tuple[int, str]]]:
        return name, [cell(cells.get((name, other), 0.0)) for other in names]

    return _Matrix(names, list(map(row, names)), len(totals))


# ---- drawings ----------------------------------------------------------------------------------------------


def _utilization_note(trace: Trace) -> str:
    threads = sum(trace.workers.values())
    return f"Busy threads, of {threads}; {share(trace.utilization, 1.0)} on average."


def _curve(trace: Trace, found: Account) -> _Curve | None:
    threads = sum(trace.workers.values())
    if not found.curve or not threads:
        return None
    wide, high = _CURVE
    width = wide / len(found.curve)
    top = max(threads, *(busy for _, busy in found.curve))
    points = [f"M0,{high}"]
    for i, (_, busy) in enumerate(found.curve):
        y = high * (1 - busy / top)
        points.append(f"L{i * width:.1f},{y:.1f}L{(i + 1) * width:.1f},{y:.1f}")
    points.append(f"L{wide},{high}Z")
    ceiling = high * (1 - threads / top)
    return _Curve("".join(points), f"{ceiling:.1f}", threads, duration(trace.makespan), _CURVE)


def _zero(trace: Trace) -> float:
    """Return the first span's start; all times of the page count from it."""
    return min((span.start for span in trace.spans), default=0.0)


def _kept(spans: Sequence[Span]) -> list[Span]:
    if len(spans) <= _SPANS:
        return list(spans)
    longest = sorted(range(len(spans)), key=lambda i: -spans[i].seconds)[:_SPANS]
    # In the order of the run: later spans are drawn above earlier ones.
    return [spans[i] for i in sorted(longest)]


def _timeline_note(trace: Trace, spans: Sequence[Span]) -> str:
    if not spans:
        return "The trace has no finished tasks: run something inside the ff.trace block."
    left = len(trace.spans) - len(spans)
    text = "Each lane is a thread. Zoom by Ctrl and scroll, or + and -; drag to pan; double-click to reset."
    text += f" {DURATION}"
    return f"{text} The {left:,} shortest spans are not drawn." if left else text


def _data(trace: Trace, found: Account, spans: Sequence[Span]) -> dict[str, object]:
    """Return the script's data: spans as rows of numbers, with texts by their index in a list."""
    texts: dict[str, int] = {}

    def place(text: str) -> int:
        return texts.setdefault(text, len(texts))

    zero = _zero(trace)
    rows = [
        [
            _KINDS.index(s.kind),
            place(str(s.key)),
            place(s.prefix or s.kind),
            place(s.worker),
            s.lane,
            *s.microseconds(zero),
            s.nbytes,
            place(s.source),
        ]
        for s in spans
        if s.kind in _KINDS
    ]
    return {
        "kinds": _KINDS,
        "makespan": round(trace.makespan * 1e6),
        "workers": [[place(w), n] for w, n in trace.workers.items()],
        "prefixes": [place(f.name) for f in found.prefixes],
        "path": [place(str(step.key)) for step in found.path],
        "spans": rows,
        "texts": list(texts),
    }
