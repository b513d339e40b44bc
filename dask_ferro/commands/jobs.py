"""`dask ferro jobs` and `dask ferro pools`: the batch jobs of a running cluster, and its pools."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from time import localtime, strftime, time
from typing import Any

import click
from rich.console import Console

from dask_ferro.commands.arguments import as_json, running_cluster
from dask_ferro.commands.faults import Command
from dask_ferro.observe.cluster_rows import JOBS, POOLS, fetch_table
from dask_ferro.observe.top import address_source
from dask_ferro.slurm.job_lifecycle import JobState
from dask_ferro.views.terminal import console, show_wide, table
from dask_ferro.words import duration, pluralize

_JOB = ("job", "name", "pool", "state", "asked", "waited", "ran", "node-s", "why", "ending")
_POOL = ("pool", "state", "jobs", "at least", "at most", "queue", "why")


@click.command(cls=Command)
@running_cluster
@as_json
def jobs(scheduler: str | None, scheduler_file: str | None, as_json: bool) -> None:
    """List all batch jobs that a running cluster submitted.

    Each row has the reason of the submission, the state, times, and how the job ended.

    \b
    dask ferro jobs --scheduler tcp://host:8786
    dask ferro jobs --scheduler-file scheduler.json --json
    """
    rows = asyncio.run(fetch_table(address_source(scheduler, scheduler_file), JOBS))
    if as_json:
        click.echo(json.dumps({"jobs": rows}))
    else:
        show_wide(lambda out: _show_jobs(out, rows))


def _show_jobs(out: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        out.print("no jobs", style="bold")
        return
    now = time()
    table(out, "jobs", _JOB, [_job(one, now) for one in rows], left=len(_JOB))
    states = Counter(row["state"] for row in rows)
    counts = ", ".join(f"{states[state]} {state}" for state in JobState if states[state])
    held = sum(row["node_seconds"] for row in rows)
    out.print(f"{pluralize(len(rows), 'job')}: {counts}; {held:,.0f} node-seconds", style="bold")


def _job(row: Mapping[str, Any], now: float) -> tuple[str, ...]:
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
        row["why"] or "-",
        row["ending"] or "-",
    )


def _seconds(start: float | None, end: float) -> str:
    return duration(None if start is None else max(end - start, 0.0))


@click.command(cls=Command)
@click.argument("order", type=click.Choice(("list", "pause", "resume")), default="list")
@click.argument("name", required=False)
@running_cluster
@as_json
def pools(
    order: str, name: str | None, scheduler: str | None, scheduler_file: str | None, as_json: bool
) -> None:
    """Show, pause and resume the pools of a running cluster of batch jobs.

    "list" shows the pools with their states, jobs and bounds, and why a pool is closed.  "pause NAME" submits no more
    jobs of a pool; running jobs go on, and pending ones stay in the queue.  "resume NAME" submits its jobs again,
    whether it was paused or closed by failures.

    \b
    dask ferro pools --scheduler tcp://host:8786
    dask ferro pools pause gpu --scheduler-file scheduler.json
    """
    if (order == "list") != (name is None):
        raise click.UsageError("list takes no NAME" if name else f"{order} takes the NAME of a pool")
    words = {} if name is None else {"order": order, "name": name}
    rows = asyncio.run(fetch_table(address_source(scheduler, scheduler_file), POOLS, **words))
    if as_json:
        click.echo(json.dumps({"pools": rows}))
    else:
        table(console(), pluralize(len(rows), "pool"), _POOL, [_pool(row) for row in rows], left=len(_POOL))


def _pool(row: Mapping[str, Any]) -> tuple[str, ...]:
    state = "paused" if row["is_paused"] else "closed" if row["closed"] else "open"
    until = strftime(" until %H:%M:%S", localtime(row["closed_until"])) if row["closed_until"] else ""
    return (
        row["name"],
        state + until,
        ", ".join(f"{count} {name}" for name, count in row["jobs"].items()) or "none",
        f"{row['minimum']:g}",
        "-" if row["maximum"] is None else f"{row['maximum']:g}",
        row["queue"] or "-",
        row["closed"] or "-",
    )
