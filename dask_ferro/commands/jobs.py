"""`dask ferro jobs`: list batch jobs.  Every `dask` command imports this module, so it imports only click."""

from __future__ import annotations

import json

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Command


@click.command(cls=Command)
@arguments.scheduler
@arguments.scheduler_file
@arguments.as_json
@arguments.debug
def jobs(scheduler: str | None, scheduler_file: str | None, as_json: bool, debug: bool) -> None:
    """List all batch jobs that a running cluster submitted.

    Each row has the reason of the submission, the state, times, tasks, and how the job ended.

    Without an option, DASK_SCHEDULER_ADDRESS has the scheduler's address.

    \b
    dask ferro jobs --scheduler tcp://host:8786
    dask ferro jobs --scheduler-file scheduler.json --json
    """
    # The imports below take half a second.
    import asyncio

    from dask_ferro.runtime.telemetry.cluster_rows import JOBS, call
    from dask_ferro.runtime.telemetry.top import where
    from dask_ferro.views.jobs import show_jobs
    from dask_ferro.views.terminal import show_wide

    rows = asyncio.run(call(where(scheduler, scheduler_file), JOBS))
    if as_json:
        click.echo(json.dumps({"jobs": rows}))
    else:
        show_wide(lambda out: show_jobs(out, rows))
