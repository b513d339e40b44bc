"""`dask ferro check`: check a running cluster."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable

import click
from distributed import Client

from dask_ferro.commands.arguments import as_json, running_cluster
from dask_ferro.commands.faults import Command
from dask_ferro.observe.check import ClusterCheck
from dask_ferro.observe.check import check_cluster as checked
from dask_ferro.observe.top import address_source
from dask_ferro.views.check import show_check
from dask_ferro.views.terminal import show_wide


@click.command(cls=Command)
@running_cluster
@as_json
def check(scheduler: str | None, scheduler_file: str | None, as_json: bool) -> None:
    """Check a cluster against this environment, and print what is wrong and what to do.

    It compares versions and GPUs, tells whether the plugin is on and what is stuck, and changes nothing.  The exit
    status is 1 if something is an error.

    \b
    dask ferro check --scheduler tcp://host:8786
    dask ferro check --scheduler-file scheduler.json --json
    """
    found = asyncio.run(_check_quietly(address_source(scheduler, scheduler_file)))
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        show_wide(lambda out: show_check(out, found.facts, found.findings))
    # After the whole report, so that one run shows all findings.
    if not found.ok:
        raise click.exceptions.Exit(1)


async def _check_quietly(where: Callable[[], str]) -> ClusterCheck:
    with warnings.catch_warnings():
        # Dask warns of differing versions, which the table has.
        warnings.simplefilter("ignore")
        async with Client(where(), asynchronous=True, set_as_default=False) as client:
            found: ClusterCheck = await checked(client)
    return found
