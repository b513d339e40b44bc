"""`dask ferro top`: its arguments.  Imported by every `dask` command, so it imports click alone."""

from __future__ import annotations

import sys

import click

from dask_ferro.commands.faults import Command, leave
from dask_ferro.views.top.choice import SORTS, Choice


@click.command(cls=Command)
@click.argument("address", required=False)
@click.option("--scheduler-file", metavar="FILE", help="What `dask scheduler --scheduler-file` wrote.")
@click.option("--once", is_flag=True, help="Print one table and leave; so does a pipe.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and leave.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="backlog", show_default=True)
@click.option(
    "--filter", "wanted", metavar="TEXT", help="Only workers with TEXT in name, address, state or tasks."
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="From one look to the next.",
)
def top(
    address: str | None,
    scheduler_file: str | None,
    once: bool,
    as_json: bool,
    sort: str,
    wanted: str | None,
    interval: float,
) -> None:
    """Watch the workers of a cluster: what runs, what waits, what was stolen.

    ADDRESS is the scheduler's; without one, that of DASK_SCHEDULER_ADDRESS.

    \b
    dask ferro top tcp://host:8786
    dask ferro top --scheduler-file scheduler.json --once
    """
    import asyncio

    from dask_ferro.runtime.telemetry.top import SchedulerConnection, where
    from dask_ferro.views.top.live import Screen, print_once

    line = SchedulerConnection(where(address, scheduler_file))
    choice = Choice(wanted=wanted).sorted_by(sort)
    # Windows has terminals of another kind, and a pipe has no keys.
    if once or as_json or not sys.stdout.isatty() or sys.platform == "win32":
        asyncio.run(print_once(line, choice, as_json))
    else:
        number = asyncio.run(Screen(line, choice, interval).run())
        if number:
            leave(128 + number, "terminated")
