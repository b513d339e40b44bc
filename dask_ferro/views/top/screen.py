"""The drawing of `dask ferro top`: a screen that fills the terminal, and a plain table for scripts.

The input is one snapshot of a scheduler (a dict, see `runtime.telemetry.top.look`) and its workers, already sorted and
filtered.  On a narrow terminal the least important columns are omitted; 80 columns hold all but the last five.  Names
come from users and may contain anything: characters that do not print are replaced.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Literal, NamedTuple

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dask_ferro.runtime.telemetry.findings import ClusterFinding
from dask_ferro.views.findings import STYLES, show_findings
from dask_ferro.views.terminal import facts
from dask_ferro.views.terminal import table as plain_table
from dask_ferro.views.top.choice import Choice, Row
from dask_ferro.words import count, duration, many, printable, share, size

Look = Mapping[str, Any]

# Styles of states; all other states are red, as a worker in one of them does not work.
_STATES = {"idle": "dim", "busy": "green", "paused": "yellow", "leaving": "yellow"}

# The most findings above the table, and the columns of the names of lines.
_FOUND, _MARGIN = 3, 9


class _Column(NamedTuple):
    title: str
    # The lowest rank is kept longest when not all columns fit.
    rank: int
    width: int
    cell: Callable[[Row], str]
    left: bool = False


def _name(row: Row) -> str:
    return str(row["address"].partition("://")[2] if row["name"] == row["address"] else row["name"])


def _used(row: Row) -> str:
    limit = row["memory_limit"]
    return f"{100 * row['memory'] / limit:.0f} %" if limit else count(row["memory"]) + "B"


def _short(number: float | None) -> str:
    return "-" if number is None else count(number).replace(" ", "")


# In the order in which they stand on the screen.
_COLUMNS = (
    _Column("worker", 0, 12, _name, left=True),
    _Column("state", 1, 7, lambda r: r["state"], left=True),
    _Column("dev", 9, 3, lambda r: r["device"]),
    _Column("thr", 13, 3, lambda r: str(r["threads"])),
    _Column("cpu", 10, 5, lambda r: f"{r['cpu']:.0f} %"),
    _Column("running", 2, 14, lambda r: ", ".join(r["running"]) or "-", left=True),
    _Column("ops", 11, 24, lambda r: ", ".join(f"{n} {name}" for name, n in r["ops"]) or "-", left=True),
    _Column("tasks", 3, 5, lambda r: _short(r["tasks"])),
    _Column("backlog", 4, 7, lambda r: duration(r["backlog"])),
    _Column("thresh", 5, 7, lambda r: duration(r["threshold"])),
    _Column("memory", 6, 6, _used),
    _Column("spilled", 12, 8, lambda r: size(r["spilled"]).replace("iB", "")),
    _Column("in", 7, 5, lambda r: _short(r["in"])),
    _Column("out", 8, 5, lambda r: _short(r["out"])),
    _Column("address", 14, 24, lambda r: r["address"], left=True),
)


# ---- the screen --------------------------------------------------------------------------------------------


def screen(
    seen: Look | None, rows: Sequence[Row], choice: Choice, trouble: str, columns: int, lines: int
) -> Group:
    """Return exactly one screen: the cluster's figures, as many workers as fit, and the keys.

    Parameters
    ----------
    seen : mapping or None
        The newest snapshot; None before the first one.
    rows : sequence of mapping
        The workers to show, in order.
    trouble : str
        Why there is no newer snapshot; "" if there is one.
    """
    head = [_clipped(line, columns) for line in _fitting_head(seen, choice, trouble, columns, lines)]
    room = max(lines - len(head) - 2, 0)
    shown = rows[choice.first : choice.first + room]
    body = _table(shown, choice, columns) if room else Text()
    if seen is not None and not rows:
        body = Text("no worker matches the filter" if seen["workers"] else "no workers yet", style="dim")
    # The header of the table is a line of its own.
    missing = room - len(shown) if rows else room
    filler = [Text("\n" * (missing - 1))] if missing > 0 else []
    return Group(*head, body, *filler, _clipped(_foot(choice), columns))


def page(columns: int, lines: int, seen: Look | None, choice: Choice, trouble: str) -> int:
    """Return how many workers fit on a screen."""
    return max(lines - len(_fitting_head(seen, choice, trouble, columns, lines)) - 2, 0)


def _fitting_head(seen: Look | None, choice: Choice, trouble: str, columns: int, lines: int) -> list[Text]:
    """Return the lines above the table; they leave room for its header, one worker, and the keys."""
    return _head(seen, choice, trouble, columns)[: max(lines - 3, 1)]


def _clipped(line: Text, columns: int) -> Text:
    line.no_wrap = True
    line.truncate(max(columns, 1), overflow="ellipsis")
    return line


def _head(seen: Look | None, choice: Choice, trouble: str, columns: int) -> list[Text]:
    title = Text("dask ferro top", style="bold")
    if seen is None:
        return [title, Text(printable(trouble) or "connecting", style="yellow")]
    clock = time.strftime("%H:%M:%S", time.localtime(seen["time"]))
    title.append(f"  {_scheduler(seen)}  {clock}", style="not bold")
    if choice.paused:
        title.append("  PAUSED", style="bold yellow")
    lines = [title, Text(printable(trouble), style="bold red")] if trouble else [title]
    for name, *texts in _found(seen):
        # The reason is at the end of a sentence, so that a sentence and its remedy have two lines each.
        width = max(columns - _MARGIN, _MARGIN)
        wrapped = chain(*(textwrap.wrap(printable(t), width, max_lines=2, placeholder=" ...") for t in texts))
        lines += [
            Text(f"{label:<{_MARGIN}}{part}", style=STYLES.get(name, "bold"))
            for label, part in zip(chain((name,), repeat("")), wrapped, strict=False)
        ]
    lines += [Text(printable(f"{name:<{_MARGIN}}{told}")) for name, told in _facts(seen)]
    return lines


def _scheduler(seen: Look) -> str:
    threads = sum(row["threads"] for row in seen["workers"])
    return f"{seen['address']}  {many(len(seen['workers']), 'worker')}, {many(threads, 'thread')}"


def _found(seen: Look) -> Iterator[tuple[str, ...]]:
    """Yield the cluster's health, and what is wrong as (severity, sentence, remedy); a few of many."""
    found = _findings(seen)
    more = f" ({len(found) - _FOUND} of them are not shown)" if len(found) > _FOUND else ""
    yield "health", seen["overview"]["health"] + more
    yield from ((one.severity, f"{one.sentence}.", f"To do: {one.remedy}") for one in found[:_FOUND])


def _findings(seen: Look) -> list[ClusterFinding]:
    return [ClusterFinding(**one) for one in seen["overview"]["findings"]]


def _facts(seen: Look) -> Iterator[tuple[str, str]]:
    """Yield the cluster's figures as (name, text), one for each line."""
    yield "doing", "; ".join(seen["overview"]["doing"][:2])
    states = ("waiting", "queued", "no-worker", "processing", "memory", "erred")
    told = [f"{count(seen['tasks'][state])} {state}" for state in states if seen["tasks"].get(state)]
    yield "tasks", ", ".join(told) or "none"
    yield "steals", _steals(seen)
    total = sum(number for _, number in seen["ops"])
    yield "ops", ", ".join(f"{name} {share(number, total)}" for name, number in seen["ops"]) or "none"
    if seen["elastic"]:
        yield "elastic", _elastic(seen["elastic"])


def _steals(seen: Look) -> str:
    if not seen["ferro"]:
        return "unknown: dask_ferro is not installed on this scheduler (use ff.install)"
    counts = seen["steals"]
    told = ", ".join(f"{count(counts.get(name, 0))} {name}" for name in ("confirmed", "refused", "stale"))
    worked, moving = counts.get("seconds_worked", 0.0), counts.get("seconds_moving", 0.0)
    return f"{told}; stolen work {duration(worked)}, moved in {duration(moving)} ({seen['stealing']})"


def _elastic(decision: Mapping[str, Any]) -> str:
    wanted = ", ".join(f"{number} {pool}" for pool, number in decision.get("wanted", {}).items())
    jobs = ", ".join(f"{number} {state}" for state, number in decision.get("jobs", {}).items())
    waits = max(decision.get("queue_wait", {}).values(), default=None)
    told = f"wanted {wanted or 'none'}; {jobs or 'no jobs'}; queue wait {duration(waits)}"
    return f"{told}; {decision.get('why', '')}"


def _foot(choice: Choice) -> Text:
    wanted = printable(choice.wanted or "")
    if choice.typing:
        return Text(f"filter: {wanted}_   enter: keep  escape: all workers", style="reverse")
    arrow = "down" if choice.descending else "up"
    told = f"q quit  s sort: {choice.sort} {arrow}  r reverse  / filter{f': {wanted}' if wanted else ''}"
    return Text(f"{told}  p {'go on' if choice.paused else 'pause'}  arrows", style="reverse")


def _fitting(columns: int) -> list[_Column]:
    """Return the columns that fit, in order, at least the first; "running" gets the remaining width."""
    chosen: set[str] = set()
    left = columns + 1
    for column in sorted(_COLUMNS, key=lambda c: c.rank):
        if chosen and left < column.width + 1:
            break
        chosen.add(column.title)
        left -= column.width + 1
    spare = max(left, 0)
    return [
        c._replace(width=c.width + spare) if c.title == "running" else c
        for c in _COLUMNS
        if c.title in chosen
    ]


def _table(rows: Sequence[Row], choice: Choice, columns: int) -> Table:
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", collapse_padding=True)
    fitting = _fitting(columns)
    for column in fitting:
        header = Text(column.title, style="bold not dim" if column.title == choice.sort else "")
        side: Literal["left", "right"] = "left" if column.left else "right"
        grid.add_column(header, width=column.width, justify=side, no_wrap=True, overflow="ellipsis")
    for row in rows:
        grid.add_row(*(_cell(column, row) for column in fitting))
    return grid


def _cell(column: _Column, row: Row) -> Text:
    style = _STATES.get(row["state"], "red") if column.title == "state" else ""
    return Text(printable(column.cell(row)), style=style)


# ---- for scripts -------------------------------------------------------------------------------------------


def show_once(out: Console, seen: Look, rows: Sequence[Row]) -> None:
    """Print the cluster's figures, and a table of all workers with all columns."""
    show_findings(out, _findings(seen))
    out.print()
    told = [(name, printable(text)) for name, text in _facts(seen)]
    facts(out, [("scheduler", _scheduler(seen)), *told])
    names = [column for column in _COLUMNS if column.left and column.title != "address"]
    columns = [*names, *(column for column in _COLUMNS if column not in names)]

    def cells(row: Row) -> list[str]:
        return [printable(column.cell(row)) for column in columns]

    plain_table(out, "workers", [column.title for column in columns], list(map(cells, rows)), left=len(names))
