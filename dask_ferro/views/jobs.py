"""The output of `dask ferro jobs`: a row for each batch job of a cluster, and the totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import localtime, strftime

from rich.console import Console

from dask_ferro.runtime.records.record import STATES, JobRecord
from dask_ferro.views.terminal import many, table

_COLUMNS = ("job", "name", "pool", "state", "asked", "waited", "ran", "node-s", "tasks", "why", "ending")


def show_jobs(out: Console, records: Sequence[JobRecord], now: float) -> None:
    """Print a table of jobs, and their totals."""
    if records:
        table(out, "jobs", _COLUMNS, [_row(one, now) for one in records], left=len(_COLUMNS))
    out.print(summary(records, now), style="bold")


def summary(records: Sequence[JobRecord], now: float = 0.0) -> str:
    """Return the totals on one line.

    >>> summary([JobRecord("a-0", state="ended", started=10.0, ended=70.0, tasks=12), JobRecord("a-1")])
    '2 jobs: 1 submitting, 1 ended; 60 node-seconds, 12 tasks'
    """
    if not records:
        return "no jobs"
    states = Counter(record.state for record in records)
    counts = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    held = sum(record.node_seconds(now) for record in records)
    tasks = sum(record.tasks for record in records)
    return f"{many(len(records), 'job')}: {counts}; {held:,.0f} node-seconds, {tasks:,} tasks"


def _row(record: JobRecord, now: float) -> tuple[str, ...]:
    until = record.ended if record.ended is not None else now
    return (
        record.job_id or "-",
        record.name,
        record.pool,
        record.state,
        strftime("%d %H:%M:%S", localtime(record.asked)),
        _seconds(record.submitted, until if record.started is None else record.started),
        _seconds(record.started, until),
        f"{record.node_seconds(now):,.0f}",
        f"{record.tasks:,}",
        record.why or "-",
        record.ending or "-",
    )


def _seconds(start: float | None, end: float) -> str:
    return "-" if start is None else f"{max(end - start, 0.0):,.0f} s"
