"""A run as one HTML file that needs no network: timeline, utilization, flows, critical path, and the numbers.

Everything is inside: styles, script, spans.  The timeline is drawn by a script of its own (`run_report.js`); the rest
is tables and one curve, which a browser shows without any.  It follows the reader's light or dark theme.  What comes
from a run (keys, prefixes, addresses) is escaped: it is text, whatever it looks like.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from itertools import chain

from dask_ferro.account import Account, BusyShare, Family, Flow, PathStep
from dask_ferro.trace import Span, Trace
from dask_ferro.views.terminal import duration, share, size

# Spans in the file: 4 MB, and what a browser draws in one frame.  The longest are kept.
_SPANS = 100_000
# A matrix of more workers than this has cells too small to read.
_MATRIX = 32
_ROWS = 40
_KINDS = ("compute", "transfer", "steal", "op")
_WIDE, _HIGH = 1000, 120


def run_report(trace: Trace, found: Account, title: str) -> str:
    """Return the page.

    Parameters
    ----------
    trace : Trace
    found : Account
        Its figures.
    title : str
        Of the page, as text.
    """
    spans = _kept(trace.spans)
    parts = [
        _cards(trace, found),
        _section("Timeline", _timeline_note(trace, spans), '<div id="timeline"></div>'),
        _section("Utilization", _utilization_note(trace), _curve(trace, found)),
        _section("Critical path", _path_note(found), _path(found.path, _zero(trace))),
        _section("Flows of tasks", _steals_note(found.steals), _matrix(found.steals, "moved")),
        _section("Flows of bytes", _transfers_note(found.transfers), _matrix(found.transfers, "bytes")),
        _section("Workers", "", _workers(found.workers, trace.makespan)),
        _section("Tasks by prefix", "", _families(found.prefixes, "prefix")),
        _section("Ops", _ops_note(found.ops), _families(found.ops, "op") if found.ops else ""),
        _section("All figures", "", _figures(trace.summary())),
    ]
    return _PAGE.format(
        title=escape(title),
        style=_asset("run_report.css"),
        script=_asset("run_report.js"),
        body="\n".join(parts),
        data=_in_script(_data(trace, found, spans)),
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<script type="application/json" id="run">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("dask_ferro.views").joinpath(name).read_text(encoding="utf-8")


def _in_script(value: object) -> str:
    """JSON that no text in it can end."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(heading: str, note: str, content: str) -> str:
    told = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{told}\n{content}\n</section>"


# ---- the numbers -------------------------------------------------------------------------------------------


def _cards(trace: Trace, found: Account) -> str:
    counts = trace.counts
    threads = sum(trace.workers.values())
    over = f"{trace.makespan / found.lower_bound:.2f} x" if found.lower_bound else "-"
    transfers = sum(flow.times for flow in found.transfers)
    cards = [
        ("makespan", duration(trace.makespan), f"{over} the lower bound"),
        ("utilization", share(trace.utilization, 1.0), f"{duration(found.work)} of work"),
        (
            "tasks",
            f"{len(trace.tasks):,}",
            f"{_many(len(trace.workers), 'worker')}, {_many(threads, 'thread')}",
        ),
        (
            "critical path",
            duration(found.critical_path),
            f"{len(found.path)} task{'s' * (len(found.path) != 1)}",
        ),
        ("moved", f"{counts.get('confirmed', sum(f.times for f in found.steals)):,.0f}", _answers(trace)),
        ("fetched", size(sum(f.nbytes for f in found.transfers)), _many(transfers, "transfer")),
    ]
    boxes = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><p>{escape(note)}</p></div>"
        for name, value, note in cards
    )
    return f'<dl class="cards">{"".join(boxes)}</dl>'


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def _answers(trace: Trace) -> str:
    counts = trace.counts
    return f"{counts.get('refused', 0):,.0f} refused, {counts.get('stale', 0):,.0f} stale"


def _figures(summary: dict[str, float]) -> str:
    rows = ((name.replace("_", " "), _figure(name, value)) for name, value in summary.items())
    return _table(("figure", "value"), rows, left=1)


def _figure(name: str, value: float) -> str:
    if "bytes" in name:
        return size(value)
    if "seconds" in name or name in ("makespan", "elapsed"):
        return duration(value)
    return share(value, 1.0) if name == "utilization" else f"{value:,.6g}"


# ---- tables ------------------------------------------------------------------------------------------------


def _line(row: Sequence[str], kinds: Sequence[str]) -> str:
    cells = (f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int) -> str:
    """A table: the first `left` columns are text, the others numbers."""
    kinds = ["text" if i < left else "number" for i in range(len(columns))]
    head = "".join(
        f'<th class="{kind}">{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    lines = (_line(row, kinds) for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _cut(text: str, shown: int, number: int, what: str) -> str:
    return f"{text}<p class='note'>The first {shown} of {number:,} {what}.</p>" if number > shown else text


def _workers(workers: Sequence[BusyShare], makespan: float) -> str:
    rows = (
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
    )
    columns = ("worker", "threads", "tasks", "busy", "utilization", "fetched", "stolen in", "stolen out")
    return _cut(_table(columns, rows, left=1), _ROWS, len(workers), "workers")


def _families(families: Sequence[Family], what: str) -> str:
    total = sum(f.seconds for f in families)
    rows = (
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
    )
    columns = (what, "times", "seconds", "share", "median", "longest", "bytes made")
    return _cut(_table(columns, rows, left=1), _ROWS, len(families), f"kinds of {what}")


def _ops_note(ops: Sequence[Family]) -> str:
    if not ops:
        return (
            "Not recorded: set ferro.trace.ops, or ff.trace(client, ops=True), to see the ops inside bundles."
        )
    return "Inside the bundles. A row of several nodes is a session that was timed as a whole."


# ---- the critical path -------------------------------------------------------------------------------------


def _path_note(found: Account) -> str:
    if not found.path:
        return "No task finished within the trace."
    waited = sum(step.waited for step in found.path)
    return (
        f"The longest chain of tasks by seconds: {duration(found.critical_path)} of computation. As it ran, its"
        f" tasks waited {duration(waited)} after their last input was there."
    )


def _path(path: Sequence[PathStep], zero: float) -> str:
    shown = sorted(sorted(path, key=lambda s: s.start - s.stop - s.waited)[:_ROWS], key=lambda s: s.start)
    rows = (
        (
            str(step.key),
            step.prefix,
            step.worker,
            duration(max(step.start - zero, 0.0)),
            duration(max(step.stop - step.start, 0.0)),
            duration(step.waited),
        )
        for step in shown
    )
    columns = ("task", "prefix", "worker", "started at", "computed", "waited")
    table = _table(columns, rows, left=3) if path else ""
    return _cut(table, _ROWS, len(path), "tasks by what they took, in the order in which they ran")


# ---- flows -------------------------------------------------------------------------------------------------


def _steals_note(flows: Sequence[Flow]) -> str:
    return (
        "Tasks that were moved, from the victim (row) to the thief (column)."
        if flows
        else "No task was moved."
    )


def _transfers_note(flows: Sequence[Flow]) -> str:
    if not flows:
        return "No input was fetched from another worker."
    return "Bytes that were fetched, from the sender (row) by the receiver (column)."


def _matrix(flows: Sequence[Flow], unit: str) -> str:
    """A table of who gave to whom; the share of the largest cell is its colour."""
    if not flows:
        return ""
    cells = {(f.source, f.worker): float(f.nbytes if unit == "bytes" else f.times) for f in flows}
    names = _busiest(cells)
    most = max(cells.values(), default=0.0) or 1.0
    head = "".join(f"<th title='{escape(name)}'>{i}</th>" for i, name in enumerate(names))
    lines = ""
    for i, name in enumerate(names):
        row = "".join(_cell(cells.get((name, other), 0.0), most, unit) for other in names)
        lines += f"<tr><th class='text'>{i}: {escape(name)}</th>{row}</tr>"
    table = f"<div class='scroll'><table class='matrix'><tr><th></th>{head}</tr>{lines}</table></div>"
    number = len(set(chain.from_iterable(cells)))
    return _cut(table, _MATRIX, number, "workers, those with the most")


def _busiest(cells: dict[tuple[str, str], float]) -> list[str]:
    totals: dict[str, float] = {}
    for pair, value in cells.items():
        for name in pair:
            totals[name] = totals.get(name, 0.0) + value
    return sorted(sorted(totals, key=lambda name: -totals[name])[:_MATRIX])


def _cell(value: float, most: float, unit: str) -> str:
    if not value:
        return "<td></td>"
    text = size(value) if unit == "bytes" else f"{value:,.0f}"
    return f"<td style='--heat:{100 * value / most:.0f}%'>{escape(text)}</td>"


# ---- drawings ----------------------------------------------------------------------------------------------


def _utilization_note(trace: Trace) -> str:
    threads = sum(trace.workers.values())
    return f"Threads that computed, of {threads}; {share(trace.utilization, 1.0)} on average."


def _curve(trace: Trace, found: Account) -> str:
    threads = sum(trace.workers.values())
    if not found.curve or not threads:
        return ""
    width = _WIDE / len(found.curve)
    top = max(threads, *(busy for _, busy in found.curve))
    points = [f"M0,{_HIGH}"]
    for i, (_, busy) in enumerate(found.curve):
        y = _HIGH * (1 - busy / top)
        points.append(f"L{i * width:.1f},{y:.1f}L{(i + 1) * width:.1f},{y:.1f}")
    points.append(f"L{_WIDE},{_HIGH}Z")
    ceiling = _HIGH * (1 - threads / top)
    return (
        f"<figure><span class='axis'>{threads}</span><svg viewBox='0 0 {_WIDE} {_HIGH}'"
        f" preserveAspectRatio='none' role='img' aria-label='busy threads over time'><path d='{''.join(points)}'/>"
        f"<line x1='0' x2='{_WIDE}' y1='{ceiling:.1f}' y2='{ceiling:.1f}'/></svg>"
        f"<figcaption><span>0 s</span><span>{duration(trace.makespan)}</span></figcaption></figure>"
    )


def _zero(trace: Trace) -> float:
    """The first span's start: all times of the page count from there."""
    return min((span.start for span in trace.spans), default=0.0)


def _kept(spans: Sequence[Span]) -> list[Span]:
    if len(spans) <= _SPANS:
        return list(spans)
    longest = sorted(range(len(spans)), key=lambda i: -spans[i].seconds)[:_SPANS]
    return [spans[i] for i in sorted(longest)]


def _timeline_note(trace: Trace, spans: Sequence[Span]) -> str:
    if not spans:
        return "Nothing finished within the trace: run something while it is recorded."
    left = len(trace.spans) - len(spans)
    text = "A lane is a thread. Ctrl and scroll, or + and -, zoom; drag to pan; double-click to see all."
    return f"{text} The {left:,} shortest spans are not drawn." if left else text


def _data(trace: Trace, found: Account, spans: Sequence[Span]) -> dict[str, object]:
    """What the script draws: spans as rows of numbers, with texts by their place in a list."""
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
            round((s.start - zero) * 1e6),
            max(round(s.seconds * 1e6), 0),
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
