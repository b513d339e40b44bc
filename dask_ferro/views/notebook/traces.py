"""The trace of a run as its lanes over time, and a tape as its first rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from dask_ferro.account import Account, Family, account
from dask_ferro.instructions import Instruction, Instructions
from dask_ferro.trace import Span, Trace
from dask_ferro.views.notebook.card import CardTable, ValueCard, card_html, share_bar
from dask_ferro.views.notebook.svg import boxes, drawing, line, rect, words
from dask_ferro.views.terminal import duration, many, share, size

# The most lanes that are drawn, their height, and the width of all time.
_LANES, _LANE_H, _WIDE, _NAMES = 24, 12, 560, 130
# Intervals of time in all lanes together, each of one colour: as many numbers as the drawing has.
_CELLS = 3_000
# Prefixes with a colour of their own.
_HUES = 5
# Shares of an interval that look different.
_SHADES = 4
# Rows of a tape in its card.
_ROWS = 20

Lane = tuple[str, int]


def trace(value: Trace) -> str:
    """Return the card of a trace: figures, the lanes of its workers over time, and its costliest prefixes."""
    found = account(value)
    counts = value.counts
    facts = [
        ("tasks", f"{len(value.tasks):,}"),
        ("workers", f"{many(len(value.workers), 'worker')}, {many(sum(value.workers.values()), 'thread')}"),
        ("makespan", f"{duration(value.makespan)}, lower bound {duration(found.lower_bound)}"),
        ("utilization", f"{share(value.utilization, 1.0)}, {duration(value.busy_seconds)} of work"),
        ("critical path", f"{duration(found.critical_path)} in {many(len(found.path), 'task')}"),
        ("moved", f"{counts.get('confirmed', sum(f.times for f in found.steals)):,.0f} tasks"),
        ("fetched", size(sum(flow.nbytes for flow in found.transfers))),
    ]
    if dropped := counts.get("dropped"):
        facts.append(("incomplete", f"{dropped:,.0f} tasks were dropped"))
    figures = [_lanes(value, found)] if value.spans else []
    tables = [_prefixes(found.prefixes, "tasks by prefix"), _prefixes(found.ops, "ops")]
    return card_html(ValueCard("Trace", "", repr(value), facts, figures, tables))


def tape(value: Instructions) -> str:
    """Return the card of a tape: its longest kinds of instructions, and its first rows."""
    by_op: defaultdict[str, float] = defaultdict(float)
    for row in value:
        by_op[row.op] += row.seconds
    work = sum(by_op.values())
    longest = sorted(by_op.items(), key=lambda pair: -pair[1])[:_HUES]
    parts = [(f"ff-{i}", s / (work or 1.0), f"{op} {duration(s)}") for i, (op, s) in enumerate(longest)]
    facts = [("instructions", f"{len(value):,}"), ("work", duration(work))]
    if value.missing:
        facts.append(("without", value.missing))
    figures = [("; ".join(title for _, _, title in parts), share_bar(parts))] if parts else []
    rows = CardTable(
        "in order of their starts", Instruction._fields, _rows(value), left=6, number=len(value), is_open=True
    )
    return card_html(ValueCard("Instructions", "", repr(value), facts, figures, [rows]))


def _rows(value: Instructions) -> list[tuple[str, ...]]:
    return [
        (
            *(row.op, row.region, row.placement, _number(row.stage), _number(row.micro_batch), row.worker),
            *(duration(row.seconds), size(row.nbytes)),
        )
        for row in value[:_ROWS]
    ]


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _prefixes(families: Sequence[Family], title: str) -> CardTable:
    rows = [
        (f.name, f"{f.times:,}", duration(f.seconds), duration(f.median), duration(f.longest), size(f.nbytes))
        for f in families[:_ROWS]
    ]
    columns = ("name", "times", "seconds", "median", "longest", "bytes made")
    return CardTable(title, columns, rows, number=len(families))


# -- lanes ---------------------------------------------------------------------------------------------------


def _lanes(value: Trace, found: Account) -> tuple[str, Markup]:
    """Return a lane for each thread: what it computed in each interval, darker the more of the interval it took."""
    runs: defaultdict[Lane, list[Span]] = defaultdict(list)
    for span in value.of("compute"):
        runs[span.worker, span.lane].append(span)
    places = {worker: place for place, worker in enumerate(value.workers)}
    lanes = sorted(runs, key=lambda lane: (places.get(lane[0], len(places)), lane))[:_LANES]
    hues = {family.name: f"ff-{i}" for i, family in enumerate(found.prefixes[:_HUES])}
    start = min(span.start for span in value.spans)
    cells = max(60, min(_WIDE, _CELLS // max(len(lanes), 1)))
    scale = cells / (value.makespan or 1.0)
    shapes: list[Markup] = []
    drawn: defaultdict[tuple[str, int], list[tuple[float, float, float, float]]] = defaultdict(list)
    for place, lane in enumerate(lanes):
        top = place * (_LANE_H + 2)
        shapes += [
            rect(_NAMES, top, _WIDE, _LANE_H, "ff-track"),
            words(
                _NAMES - 6,
                top + _LANE_H - 2,
                f"{_short(lane[0])} {lane[1]}",
                anchor="end",
                kind="ff-small",
                most=26,
            ),
        ]
        for at, (prefix, shade) in _filled(runs[lane], start, scale, cells).items():
            width = _WIDE / cells
            drawn[hues.get(prefix, "ff-other"), shade].append((_NAMES + at * width, top, width, _LANE_H))
    shapes += [boxes(hue, where, opacity=shade / _SHADES) for (hue, shade), where in sorted(drawn.items())]
    height = len(lanes) * (_LANE_H + 2)
    shapes += [line(_NAMES, height, _NAMES + _WIDE, height), *_legend(hues, height)]
    more = f"; {len(runs) - len(lanes):,} more threads are not drawn" if len(runs) > len(lanes) else ""
    label = f"what each thread computed in {duration(value.makespan)}{more}"
    return label, drawing(_NAMES + _WIDE, height + 18, shapes, label=label)


def _short(worker: str) -> str:
    """Return an address without its protocol."""
    return worker.rpartition("//")[2]


def _legend(hues: Mapping[str, str], top: float) -> list[Markup]:
    shapes, each = [], _WIDE / max(len(hues), 1)
    for i, (prefix, hue) in enumerate(hues.items()):
        x = _NAMES + i * each
        shapes += [
            rect(x, top + 6, 9, 9, hue),
            words(x + 13, top + 14, prefix, kind="ff-small", most=int(each / 6)),
        ]
    return shapes


def _filled(spans: Sequence[Span], start: float, scale: float, cells: int) -> dict[int, tuple[str, int]]:
    """Return the intervals in which a lane was busy, each with its main prefix and a shade from 1 to `_SHADES`."""
    parts: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for span in spans:
        first, last = (span.start - start) * scale, (span.stop - start) * scale
        for at in range(max(int(first), 0), min(int(last), cells - 1) + 1):
            overlap = max(min(last, at + 1) - max(first, at), 0.0)
            parts[at][span.prefix] = parts[at].get(span.prefix, 0.0) + overlap
    return {at: (max(busy, key=busy.__getitem__), _shade(sum(busy.values()))) for at, busy in parts.items()}


def _shade(busy: float) -> int:
    return min(max(round(busy * _SHADES), 1), _SHADES)
