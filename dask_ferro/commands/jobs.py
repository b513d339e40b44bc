"""`dask ferro jobs`: its arguments.  Imported by every `dask` command, so it imports click alone."""

from __future__ import annotations

import json

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Command


@click.command(cls=Command)
@click.option("--scheduler", "address", metavar="ADDRESS", help="Of a cluster that stands.")
@arguments.scheduler_file
@click.option(
    "--journal", metavar="FILE", help="What `dask ferro cluster --journal` wrote; of one that is gone, too."
)
@arguments.as_json
@arguments.debug
def jobs(
    address: str | None, scheduler_file: str | None, journal: str | None, as_json: bool, debug: bool
) -> None:
    """List all jobs that a cluster asked for: why, what became of each, and what it did.

    Without an option, the scheduler is that of DASK_SCHEDULER_ADDRESS.

    \b
    dask ferro jobs --scheduler tcp://host:8786
    dask ferro jobs --journal jobs.journal --json
    """
    if journal and (address or scheduler_file):
        raise click.UsageError("give --journal, or a scheduler, not both")
    import asyncio
    from time import time

    from dask_ferro.runtime.records.source import of_journal, of_scheduler
    from dask_ferro.runtime.telemetry.top import where
    from dask_ferro.views.jobs import show_jobs
    from dask_ferro.views.terminal import show_wide

    # A journal may be of a cluster that is gone: what ran then does not run on until now.
    now = None if journal else time()
    records = of_journal(journal) if journal else asyncio.run(of_scheduler(where(address, scheduler_file)))
    if as_json:
        told = [{**one.as_dict(), "node_seconds": one.node_seconds(now)} for one in records]
        click.echo(json.dumps({"jobs": told}))
    else:
        show_wide(lambda out: show_jobs(out, records, now))
