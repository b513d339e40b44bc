"""`dask ferro check`: check a running cluster.  Every `dask` command imports this module, so it imports only click."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Command

if TYPE_CHECKING:
    from dask_ferro.runtime.telemetry.overview.check import ClusterCheck


@click.command(cls=Command)
@arguments.scheduler
@arguments.scheduler_file
@arguments.as_json
@arguments.debug
def check(scheduler: str | None, scheduler_file: str | None, as_json: bool, debug: bool) -> None:
    """Check a cluster against this environment, and print what is wrong and what to do.

    It compares versions and GPUs, tells whether the plugin is on and what is stuck, and changes nothing.  The exit
    status is 1 if something is an error.

    Without an option, DASK_SCHEDULER_ADDRESS has the scheduler's address.

    \b
    dask ferro check --scheduler tcp://host:8786
    dask ferro check --scheduler-file scheduler.json --json
    """
    import asyncio

    from dask_ferro.runtime.telemetry.top import where
    from dask_ferro.views.check import show_check
    from dask_ferro.views.terminal import show_wide

    found = asyncio.run(_checked(where(scheduler, scheduler_file)))
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        show_wide(lambda out: show_check(out, found.facts, found.findings))
    # After the whole report, so that one run shows all findings.
    if not found.ok:
        raise click.exceptions.Exit(1)


async def _checked(where: Callable[[], str]) -> ClusterCheck:
    import warnings

    from distributed import Client

    from dask_ferro.runtime.telemetry.overview.check import check

    with warnings.catch_warnings():
        # Dask warns of differing versions, which the table has.
        warnings.simplefilter("ignore")
        async with Client(where(), asynchronous=True, set_as_default=False) as client:
            found: ClusterCheck = await check(client)
    return found
