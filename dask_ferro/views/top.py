"""What `dask ferro top` draws: a screen of as many lines and columns as there are, and a plain table for scripts.

Drawn from one look at a scheduler (a dict, see `runtime.telemetry.top.look`) and from the rows somebody else sorted
and filtered.  Where columns do not fit, those that matter least go first; 80 columns hold all but the last five.
Names are the users' own, and may hold anything: what does not print is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dask_ferro.views.terminal import count, duration, facts, share, size
from dask_ferro.views.terminal import table as plain_table

Look = Mapping[str, Any]
Row = Mapping[str, Any]

_STATES = {"idle": "dim", "busy": "green", "paused": "yellow", "leaving": "yellow"}


class Frame(NamedTuple):
    """What stands around the table.

    Attributes
    ----------
    sort : str
        Title of the column that it is sorted by.
    wanted : str or None
        The filter, while it is set or typed; None: there is none.
    typing, paused : bool
    trouble : str
        Why nothing new comes; empty: it does.
    first : int
        Rows above the ones that are shown.
    """

    sort: str = "backlog"
    descending: bool = True
    wanted: str | None = None
    typing: bool = False
    paused: bool = False
    trouble: str = ""
    first: int = 0


class _Column(NamedTuple):
    title: str
    width: int
    cell: Callable[[Row], str]
    left: bool = False


def printable(text: str) -> str:
    """Return a text of one line that a terminal takes for no command."""
    return "".join(c if c.isprintable() else "?" for c in text)


def brief(seconds: float | None) -> str:
    """Return seconds in at most seven columns.

    >>> brief(0.0123), brief(83.0), brief(4000), brief(None)
    ('12.3 ms', '83 s', '1.1 h', '-')
    """
    if seconds is None:
        return "-"
    for scale, unit, least in ((86400.0, "d", 86400.0), (3600.0, "h", 3600.0), (60.0, "min", 600.0)):
        if seconds >= least:
            return f"{seconds / scale:.{0 if seconds >= 100 * scale or unit == 'min' else 1}f} {unit}"
    return duration(seconds)


def _name(row: Row) -> str:
    name = row["address"].partition("://")[2] if row["name"] == row["address"] else row["name"]
    return printable(name)


def _mix(row: Row) -> str:
    return printable(", ".join(f"{number} {name}" for name, number in row["ops"])) or "-"


def _used(row: Row) -> str:
    limit = row["memory_limit"]
    return f"{100 * row['memory'] / limit:.0f} %" if limit else count(row["memory"]) + "B"


def _moves(title: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[title] is None else count(row[title]).replace(" ", "")


# By importance; on the screen they stand in the order of `_ORDER`.
_COLUMNS = (
    _Column("worker", 12, _name, left=True),
    _Column("state", 7, lambda r: printable(r["state"]), left=True),
    _Column("running", 14, lambda r: printable(", ".join(r["running"])) or "-", left=True),
    _Column("tasks", 5, lambda r: count(r["tasks"]).replace(" ", "")),
    _Column("backlog", 7, lambda r: brief(r["backlog"])),
    _Column("thresh", 7, lambda r: brief(r["threshold"])),
    _Column("memory", 6, _used),
    _Column("in", 5, _moves("in")),
    _Column("out", 5, _moves("out")),
    _Column("dev", 3, lambda r: printable(r["device"])),
    _Column("cpu", 5, lambda r: f"{r['cpu']:.0f} %"),
    _Column("ops", 24, _mix, left=True),
    _Column("spilled", 8, lambda r: size(r["spilled"]).replace("iB", "")),
    _Column("thr", 3, lambda r: str(r["threads"])),
    _Column("address", 24, lambda r: printable(r["address"]), left=True),
)
_ORDER = (
    "worker", "state", "dev", "thr", "cpu", "running", "ops", "tasks", "backlog", "thresh", "memory", "spilled",
    "in", "out", "address",
)  # fmt: skip


# ---- the screen --------------------------------------------------------------------------------------------


def screen(seen: Look | None, rows: Sequence[Row], frame: Frame, columns: int, lines: int) -> Group:
    """Return exactly one screen: what the cluster does, its workers as far as they fit, and the keys.

    Parameters
    ----------
    seen : mapping or None
        None: nothing was seen yet.
    rows : sequence of mapping
        The workers to show, in order.
    """
    head = [_clipped(line, columns) for line in _fitting_head(seen, frame, lines)]
    foot = _clipped(_foot(frame), columns)
    room = max(lines - len(head) - 2, 0)
    shown = rows[frame.first : frame.first + room]
    body = _table(shown, frame, columns) if room else Text()
    if seen is not None and not rows:
        body = Text("no worker matches the filter" if seen["workers"] else "no workers yet", style="dim")
    # The header of the table is a line of its own.
    missing = room - len(shown) if rows else room
    filler = [Text("\n" * (missing - 1))] if missing > 0 else []
    return Group(*head, body, *filler, foot)


def page(lines: int, seen: Look | None, frame: Frame) -> int:
    """Return how many workers fit on a screen."""
    return max(lines - len(_fitting_head(seen, frame, lines)) - 2, 0)


def _fitting_head(seen: Look | None, frame: Frame, lines: int) -> list[Text]:
    """The lines above the table, which leave room for its header, a worker, and the keys."""
    return _head(seen, frame)[: max(lines - 3, 1)]


def _clipped(line: Text, columns: int) -> Text:
    line = line.copy()
    line.no_wrap = True
    line.truncate(max(columns, 1), overflow="ellipsis")
    return line


def _head(seen: Look | None, frame: Frame) -> list[Text]:
    title = Text("dask ferro top", style="bold")
    if seen is None:
        return [title, Text(printable(frame.trouble) or "connecting", style="yellow")]
    workers = seen["workers"]
    threads = sum(row["threads"] for row in workers)
    clock = time.strftime("%H:%M:%S", time.localtime(seen["time"]))
    title.append(f"  {seen['address']}  {len(workers)} workers, {threads} threads  {clock}", style="not bold")
    if frame.paused:
        title.append("  PAUSED", style="bold yellow")
    lines = [title]
    if frame.trouble:
        lines.append(Text(printable(frame.trouble), style="bold red"))
    lines += [Text(_tasks(seen)), Text(_steals(seen)), Text(_ops(seen))]
    if seen.get("waits"):
        lines.append(Text(_waits(seen["waits"]), style="bold"))
    if seen["elastic"]:
        lines.append(Text(_elastic(seen["elastic"])))
    return lines


def _tasks(seen: Look) -> str:
    states = ("waiting", "queued", "no-worker", "processing", "memory", "erred")
    told = [f"{count(seen['tasks'][state])} {state}" for state in states if seen["tasks"].get(state)]
    return "tasks    " + (", ".join(told) or "none")


def _steals(seen: Look) -> str:
    if not seen["ferro"]:
        return "steals   not seen: dask_ferro is not installed on this scheduler (ff.install)"
    counts = seen["steals"]
    told = ", ".join(f"{count(counts.get(name, 0))} {name}" for name in ("confirmed", "refused", "stale"))
    worked, moving = counts.get("seconds worked", 0.0), counts.get("seconds moving", 0.0)
    return f"steals   {told}; stolen work {brief(worked)}, moved in {brief(moving)} ({seen['stealing']})"


def _waits(told: Sequence[str]) -> str:
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    return printable(f"waits    {told[0]}{more}")


def _ops(seen: Look) -> str:
    total = sum(number for _, number in seen["ops"])
    told = ", ".join(f"{name} {share(number, total)}" for name, number in seen["ops"])
    return "ops      " + (printable(told) or "none")


def _elastic(decision: Mapping[str, Any]) -> str:
    wanted = ", ".join(f"{number} {pool}" for pool, number in decision.get("wanted", {}).items())
    jobs = ", ".join(f"{number} {state}" for state, number in decision.get("jobs", {}).items())
    waits = max(decision.get("queue_wait", {}).values(), default=None)
    told = f"elastic  wanted {wanted or 'none'}; {jobs or 'no jobs'}; queue wait {brief(waits)}"
    return printable(f"{told}; {decision.get('why', '')}")


def _foot(frame: Frame) -> Text:
    if frame.typing:
        return Text(
            f"filter: {printable(frame.wanted or '')}_   enter: keep  escape: all workers", style="reverse"
        )
    arrow = "down" if frame.descending else "up"
    told = f"q quit  s sort: {frame.sort} {arrow}  r reverse  / filter"
    if frame.wanted:
        told += f": {printable(frame.wanted)}"
    return Text(f"{told}  p {'go on' if frame.paused else 'pause'}  arrows", style="reverse")


def _fitting(columns: int) -> list[_Column]:
    """The columns that fit, in order; the first one always does, and what is left over goes to what runs."""
    chosen: dict[str, _Column] = {}
    left = columns
    for column in _COLUMNS:
        if chosen and left < column.width + 1:
            break
        chosen[column.title] = column
        left -= column.width + (1 if len(chosen) > 1 else 0)
    if "running" in chosen and left > 0:
        chosen["running"] = chosen["running"]._replace(width=chosen["running"].width + left)
    return [chosen[title] for title in _ORDER if title in chosen]


def _table(rows: Sequence[Row], frame: Frame, columns: int) -> Table:
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", collapse_padding=True)
    fitting = _fitting(columns)
    for column in fitting:
        header = Text(column.title, style="bold not dim" if column.title == frame.sort else "")
        side = "left" if column.left else "right"
        grid.add_column(header, width=column.width, justify=side, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    for row in rows:
        grid.add_row(*(_cell(column, row) for column in fitting))
    return grid


def _cell(column: _Column, row: Row) -> Text:
    return Text(column.cell(row), style=_STATES.get(row["state"], "red") if column.title == "state" else "")


# ---- for scripts -------------------------------------------------------------------------------------------


def _cells(columns: Iterable[_Column], row: Row) -> list[str]:
    return [column.cell(row) for column in columns]


def show_once(out: Console, seen: Look, rows: Sequence[Row]) -> None:
    """Print what the cluster does, and every worker with every column."""
    workers = seen["workers"]
    threads = sum(row["threads"] for row in workers)
    lines = [("scheduler", f"{seen['address']}  {len(workers)} workers, {threads} threads")]
    texts = [
        _tasks(seen),
        _steals(seen),
        _ops(seen),
        *([_elastic(seen["elastic"])] if seen["elastic"] else []),
    ]
    for text in texts:
        name, _, rest = text.partition(" ")
        lines.append((name, rest.strip()))
    facts(out, lines)
    by_title = {column.title: column for column in _COLUMNS}
    left = [title for title in _ORDER if by_title[title].left and title != "address"]
    titles = [*left, *(title for title in _ORDER if title not in left)]
    columns = [by_title[title] for title in titles]
    cells = [_cells(columns, row) for row in rows]
    plain_table(out, "workers", titles, cells, left=len(left))
