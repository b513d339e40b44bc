"""`dask ferro top`: watch workers in a terminal.  Every `dask` command imports this, so it imports only click."""

from __future__ import annotations

import sys

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Command, leave
from dask_ferro.views.top.choice import SORTS, Choice


@click.command(cls=Command)
@arguments.scheduler
@arguments.scheduler_file
@click.option("--once", is_flag=True, help="Print one table and exit; the default if output is no terminal.")
@arguments.as_json
@click.option("--sort", type=click.Choice(list(SORTS)), default="backlog", show_default=True)
@click.option(
    "--filter",
    "wanted",
    metavar="TEXT",
    help="Show workers with TEXT in their name, address, state or tasks.",
)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two updates.",
)
@arguments.debug
def top(
    scheduler: str | None,
    scheduler_file: str | None,
    once: bool,
    as_json: bool,
    sort: str,
    wanted: str | None,
    interval: float,
    debug: bool,
) -> None:
    """Watch the workers of a cluster: tasks, backlogs, steals, memory.

    Without an option, DASK_SCHEDULER_ADDRESS has the scheduler's address.

    \b
    dask ferro top --scheduler tcp://host:8786
    dask ferro top --scheduler-file scheduler.json --once
    """
    import asyncio

    from dask_ferro.runtime.telemetry.top import where
    from dask_ferro.views.top.live import Screen, print_once

    address = where(scheduler, scheduler_file)
    choice = Choice(wanted=wanted).sorted_by(sort)
    # The screen needs a POSIX terminal, and a pipe has no keyboard.
    if once or as_json or not sys.stdout.isatty() or sys.platform == "win32":
        asyncio.run(print_once(address, choice, as_json))
    else:
        number = asyncio.run(Screen(address, choice, interval).run())
        if number:
            leave(128 + number, "terminated")
