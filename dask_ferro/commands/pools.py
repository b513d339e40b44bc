"""`dask ferro pools`: show, pause and resume the pools of a running cluster of batch jobs.

Every `dask` command imports this module, so it imports only click.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Group


def _there(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select the cluster."""
    for option in (arguments.debug, arguments.as_json, arguments.scheduler_file, arguments.scheduler):
        command = option(command)
    return command


@click.group(cls=Group)
def pools() -> None:
    """Show, pause and resume the pools of a running cluster of batch jobs.

    Without --scheduler and --scheduler-file, DASK_SCHEDULER_ADDRESS has the scheduler's address.

    \b
    dask ferro pools list --scheduler tcp://host:8786
    dask ferro pools pause gpu --scheduler-file scheduler.json
    """


@pools.command(name="list")
@_there
def list_(**there: Any) -> None:
    """List the pools with their states, jobs and bounds, and why a pool is closed."""
    _call(there)


@pools.command()
@click.argument("name")
@_there
def pause(name: str, **there: Any) -> None:
    """Submit no more jobs of the pool NAME; running jobs go on, and pending ones stay in the queue."""
    _call(there, order="pause", name=name)


@pools.command()
@click.argument("name")
@_there
def resume(name: str, **there: Any) -> None:
    """Submit jobs of the pool NAME again, whether it was paused or closed by failures."""
    _call(there, order="resume", name=name)


def _call(there: Mapping[str, Any], **words: str) -> None:
    # Imported here, so that other commands start without Dask.
    import asyncio
    import json

    from dask_ferro.runtime.telemetry.cluster_rows import POOLS, call
    from dask_ferro.runtime.telemetry.top import where
    from dask_ferro.views.pools import show_pools
    from dask_ferro.views.terminal import console

    rows = asyncio.run(call(where(there["scheduler"], there["scheduler_file"]), POOLS, **words))
    if there["as_json"]:
        click.echo(json.dumps({"pools": rows}))
    else:
        show_pools(console(), rows)
