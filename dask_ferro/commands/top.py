"""`dask ferro top`: the state of a scheduler, on the whole terminal until Ctrl-C, or printed once.

The input is a snapshot of a scheduler (`observe.top.look`).  On a narrow terminal the last columns are
omitted; 80 columns hold the first ten.  Names come from users: characters that do not print are replaced.  After a lost
connection the screen keeps the last state, with the error above it, until the scheduler answers again.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dask_ferro.commands.arguments import as_json, running_cluster
from dask_ferro.commands.faults import Command
from dask_ferro.errors import InputError
from dask_ferro.observe.findings import ClusterFinding
from dask_ferro.observe.summary import FLOW_COLUMNS, flow_cells
from dask_ferro.observe.top import address_source, ask, take_snapshot
from dask_ferro.scheduler.flow_log import FlowRow
from dask_ferro.views.terminal import console, findings, grid, lines, print_facts, table
from dask_ferro.words import count, duration, natural, pluralize, printable, share, size

# A `SchedulerLook`, and a `WorkerLook` of it.
Look = Mapping[str, Any]
Row = Mapping[str, Any]

# Styles of states; all other states are red, as a worker in one of them does not work.
_STATES = {"idle": "dim", "busy": "green", "paused": "yellow", "leaving": "yellow"}
# The most findings, and flows, above the table.
_MAX_FINDINGS, _MAX_FLOWS = 3, 3
# Polling takes at most this share of the scheduler's time, but is done once in so many seconds.
_SHARE, _SELDOM = 0.05, 10.0


class Choice(NamedTuple):
    """The workers to show: the field to sort by, and the text that a shown row has."""

    field: str
    pattern: str = ""


class _Column(NamedTuple):
    title: str
    # Of a worker's row, which the table may be sorted by.
    field: str
    width: int
    cell: Callable[[Row], str]
    is_text: bool = False


def _memory_cell(row: Row) -> str:
    limit = row["memory_limit"]
    return f"{100 * row['memory'] / limit:.0f} %" if limit else count(row["memory"]) + "B"


def _format_short(number: float | None) -> str:
    return "-" if number is None else count(number).replace(" ", "")


# The most important first.
_COLUMNS = (
    _Column("worker", "name", 12, lambda r: r["name"].partition("://")[2] or r["name"], is_text=True),
    _Column("state", "state", 7, lambda r: r["state"], is_text=True),
    _Column("running", "running", 14, lambda r: ", ".join(r["running"]) or "-", is_text=True),
    _Column("tasks", "tasks", 5, lambda r: _format_short(r["tasks"])),
    _Column("backlog", "backlog", 7, lambda r: duration(r["backlog"])),
    _Column("thresh", "threshold", 7, lambda r: duration(r["threshold"])),
    _Column("memory", "memory", 6, _memory_cell),
    _Column("in", "in", 5, lambda r: _format_short(r["in"])),
    _Column("out", "out", 5, lambda r: _format_short(r["out"])),
    _Column("dev", "device", 3, lambda r: r["device"], is_text=True),
    _Column("cpu", "cpu", 5, lambda r: f"{r['cpu']:.0f} %"),
    _Column(
        "ops", "ops", 24, lambda r: ", ".join(f"{n} {name}" for name, n in r["ops"]) or "-", is_text=True
    ),
    _Column("spilled", "spilled", 8, lambda r: size(r["spilled"]).replace("iB", "")),
    _Column("thr", "threads", 3, lambda r: str(r["threads"])),
    _Column("address", "address", 24, lambda r: r["address"], is_text=True),
)
_FIELDS = {column.title: column.field for column in _COLUMNS}


@click.command(cls=Command)
@running_cluster
@click.option("--once", is_flag=True, help="Print one table and exit; the default if output is no terminal.")
@as_json
@click.option("--sort", type=click.Choice(list(_FIELDS)), default="backlog", show_default=True)
@click.option(
    "--filter",
    "pattern",
    metavar="TEXT",
    default="",
    help="Show workers with TEXT in their name, state, tasks, device or address.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two updates.",
)
def top(
    scheduler: str | None,
    scheduler_file: str | None,
    once: bool,
    as_json: bool,
    sort: str,
    pattern: str,
    interval: float,
) -> None:
    """Watch the workers of a cluster until Ctrl-C: tasks, backlogs, steals, memory.

    \b
    dask ferro top --scheduler tcp://host:8786 --sort memory
    dask ferro top --scheduler-file scheduler.json --once
    """
    address, choice = address_source(scheduler, scheduler_file), Choice(_FIELDS[sort], pattern)
    if once or as_json or not sys.stdout.isatty():
        asyncio.run(print_once(address, choice, as_json))
    else:
        asyncio.run(watch(address, choice, interval))


def sort_workers(workers: Sequence[Row], choice: Choice) -> list[Row]:
    """Return the workers that have a text in their row, sorted by a field: names in order, the largest number first."""
    pattern, texts = choice.pattern.lower(), [column.cell for column in _COLUMNS if column.is_text]
    shown = [row for row in workers if any(pattern in text(row).lower() for text in texts)]
    return sorted(shown, key=lambda row: (_order(row[choice.field]), natural(row["name"])))


def _order(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | list):
        return 0, natural(value if isinstance(value, str) else " ".join(map(str, value)))
    # What is not known comes last.
    return (2,) if value is None else (1, -value)


# ---- the screen --------------------------------------------------------------------------------------------


async def watch(where: Callable[[], str], choice: Choice, interval: float) -> None:
    """Poll a scheduler and draw its state until a signal ends it."""
    loop, out = asyncio.get_running_loop(), console()
    seen: Look | None = None
    trouble, lost = "", loop.time()
    # Ended as by an exception, so that the terminal is restored.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with Live(console=out, screen=True, auto_refresh=False) as shown:
        shown.update(screen(seen, choice, trouble, *out.size), refresh=True)
        while True:
            began = loop.time()
            try:
                seen, trouble, lost = await ask(where, take_snapshot), "", began
            except OSError as error:
                trouble = f"no answer from the scheduler for {began - lost:.0f} s, trying again: {error}"
            shown.update(screen(seen, choice, trouble, *out.size), refresh=True)
            # A slow scheduler is polled less often, since polling takes a share of its time.
            slow = 0.0 if trouble else (loop.time() - began) / _SHARE
            await asyncio.sleep(max(interval, min(slow, _SELDOM)))


def screen(seen: Look | None, choice: Choice, trouble: str, columns: int, height: int) -> RenderableType:
    """Return the cluster's figures and its workers; what is below the last line of the terminal is not shown."""
    title = Text("dask ferro top", style="bold")
    failure = Text(printable(trouble), style="bold red")
    if seen is None:
        return Group(title, failure if trouble else Text("connecting", style="dim"))
    title.append(
        f"  {_scheduler(seen)}  {time.strftime('%H:%M:%S', time.localtime(seen['time']))}", style="not bold"
    )
    found = _findings(seen)
    more = f" ({len(found) - _MAX_FINDINGS} of them are not shown)" if len(found) > _MAX_FINDINGS else ""
    head: list[RenderableType] = [title, *([failure] if trouble else []), findings(found[:_MAX_FINDINGS])]
    head.append(lines([("health", seen["overview"]["health"] + more), *_facts(seen)]))
    if flows := _flows(seen)[:_MAX_FLOWS]:
        head.append(grid(FLOW_COLUMNS, flows, left=2))
    if rows := sort_workers(seen["workers"], choice):
        return Group(*head, _table(rows[:height], columns))
    return Group(
        *head, Text("no worker matches the filter" if choice.pattern else "no workers yet", style="dim")
    )


def _scheduler(seen: Look) -> str:
    threads = sum(row["threads"] for row in seen["workers"])
    return f"{seen['address']}  {pluralize(len(seen['workers']), 'worker')}, {pluralize(threads, 'thread')}"


def _findings(seen: Look) -> list[ClusterFinding]:
    return [ClusterFinding(**one) for one in seen["overview"]["findings"]]


def _flows(seen: Look) -> list[list[str]]:
    return [[*map(printable, flow_cells(FlowRow(**one)))] for one in seen["overview"]["flows"]]


def _facts(seen: Look) -> Iterator[tuple[str, str]]:
    """Yield the cluster's figures as (name, text), one for each line."""
    states = ("waiting", "queued", "no-worker", "processing", "memory", "erred")
    by_state = [f"{count(seen['tasks'][state])} {state}" for state in states if seen["tasks"].get(state)]
    total = sum(number for _, number in seen["ops"])
    ops = ", ".join(f"{name} {share(number, total)}" for name, number in seen["ops"])
    yield "doing", printable("; ".join(seen["overview"]["doing"][:2]))
    yield "tasks", ", ".join(by_state) or "none"
    yield "steals", _steals(seen)
    yield "ops", printable(ops) or "none"
    if seen["elastic"]:
        yield "elastic", printable(_elastic(seen["elastic"]))


def _steals(seen: Look) -> str:
    if not seen["ferro"]:
        return "unknown: dask_ferro is not installed on this scheduler (use ff.install)"
    counts = seen["steals"]
    settled = ", ".join(f"{count(counts.get(name, 0))} {name}" for name in ("confirmed", "refused", "stale"))
    worked, moving = counts.get("seconds_worked", 0.0), counts.get("seconds_moving", 0.0)
    return f"{settled}; stolen work {duration(worked)}, moved in {duration(moving)} ({seen['stealing']})"


def _elastic(decision: Mapping[str, Any]) -> str:
    target = ", ".join(f"{number} {pool}" for pool, number in decision.get("wanted", {}).items())
    jobs = ", ".join(f"{number} {state}" for state, number in decision.get("jobs", {}).items())
    waits = max(decision.get("queue_wait", {}).values(), default=None)
    figures = f"wanted {target or 'none'}; {jobs or 'no jobs'}; queue wait {duration(waits)}"
    return f"{figures}; {decision.get('why', '')}"


def _table(rows: Sequence[Row], columns: int) -> Table:
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", collapse_padding=True)
    ends = accumulate(column.width + 1 for column in _COLUMNS)
    fitting = [column for column, end in zip(_COLUMNS, ends, strict=True) if end <= columns + 1]
    for column in fitting:
        side: Literal["left", "right"] = "left" if column.is_text else "right"
        # The names of tasks have what is left.
        ratio = 1 if column.title == "running" else None
        grid.add_column(
            column.title, width=None if ratio else column.width, ratio=ratio, justify=side, no_wrap=True
        )
    grid.expand = True
    for row in rows:
        grid.add_row(*(_cell(column, row) for column in fitting))
    return grid


def _cell(column: _Column, row: Row) -> Text:
    style = _STATES.get(row["state"], "red") if column.title == "state" else ""
    return Text(printable(column.cell(row)), style=style)


# ---- for scripts -------------------------------------------------------------------------------------------


async def print_once(where: Callable[[], str], choice: Choice, as_json: bool) -> None:
    """Poll the scheduler once, and print its state.

    Raises
    ------
    InputError
        If the scheduler does not answer.
    """
    try:
        seen = await ask(where, take_snapshot)
    except OSError as error:
        raise InputError(f"no scheduler answers: {error or 'timed out'}") from error
    rows = sort_workers(seen["workers"], choice)
    if as_json:
        print(json.dumps({**seen, "workers": rows}))
    else:
        show_once(console(), seen, rows)


def show_once(out: Console, seen: Look, rows: Sequence[Row]) -> None:
    """Print what is wrong, the cluster's figures, and a table of all workers with all columns."""
    out.print(findings(_findings(seen)))
    print_facts(
        out, {"health": seen["overview"]["health"], "scheduler": _scheduler(seen), **dict(_facts(seen))}
    )
    if flows := _flows(seen):
        table(out, "flows", FLOW_COLUMNS, flows, left=2)
    columns = sorted(_COLUMNS, key=lambda column: not column.is_text)

    def cells(row: Row) -> list[str]:
        return [printable(column.cell(row)) for column in columns]

    left = sum(column.is_text for column in columns)
    table(out, "workers", [column.title for column in columns], list(map(cells, rows)), left=left)
