"""The output of `dask ferro jobs`: a row for each batch job of a cluster, and the totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from time import localtime, strftime, time
from typing import Any

from rich.console import Console

from dask_ferro.runtime.slurm.job_lifecycle import JobState
from dask_ferro.views.terminal import table
from dask_ferro.words import duration, many

_COLUMNS = ("job", "name", "pool", "state", "asked", "waited", "ran", "node-s", "tasks", "why", "ending")


def show_jobs(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of jobs, and their totals."""
    if rows:
        now = time()
        table(out, "jobs", _COLUMNS, [_row(one, now) for one in rows], left=len(_COLUMNS))
    out.print(summary(rows), style="bold")


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the totals on one line."""
    if not rows:
        return "no jobs"
    states = Counter(row["state"] for row in rows)
    counts = ", ".join(f"{states[state]} {state}" for state in JobState if states[state])
    held, tasks = sum(row["node_seconds"] for row in rows), sum(row["tasks"] for row in rows)
    return f"{many(len(rows), 'job')}: {counts}; {held:,.0f} node-seconds, {tasks:,} tasks"


def _row(row: Mapping[str, Any], now: float) -> tuple[str, ...]:
    until = now if row["ended_at"] is None else row["ended_at"]
    return (
        row["job_id"] or "-",
        row["name"],
        row["pool"],
        row["state"],
        strftime("%d %H:%M:%S", localtime(row["asked_at"])),
        _seconds(row["submitted_at"], until if row["started_at"] is None else row["started_at"]),
        _seconds(row["started_at"], until),
        f"{row['node_seconds']:,.0f}",
        f"{row['tasks']:,}",
        row["why"] or "-",
        row["ending"] or "-",
    )


def _seconds(start: float | None, end: float) -> str:
    return duration(None if start is None else max(end - start, 0.0))
