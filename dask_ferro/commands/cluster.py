"""`dask ferro cluster`: a cluster on a batch system, in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dask_ferro.commands.arguments import AT_LEAST_ONE, check_folder
from dask_ferro.commands.faults import Command, exit_with
from dask_ferro.elastic.options import bounds_of
from dask_ferro.local.foreground import run_foreground, scripts
from dask_ferro.slurm.job_config import use
from dask_ferro.views.terminal import console, print_facts


@click.command(cls=Command)
@click.option(
    "--config",
    "source",
    metavar="NAME|FILE",
    help="A shipped job configuration, or a file of Dask's configuration  [default: ~/.config/dask].",
)
@click.option(
    "--config-name",
    default="slurm",
    show_default=True,
    metavar="SECTION",
    help="The section of `jobqueue` that describes the jobs.",
)
@click.option("--minimum", type=click.IntRange(min=0), help="Workers, at least.")
@click.option("--maximum", type=AT_LEAST_ONE, help="Workers, at most.")
@click.option("--name", help="Name of the cluster and of its jobs in the queue.")
@click.option(
    "--scheduler-file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=check_folder,
    help="Where to write the scheduler's address while it runs.",
)
@click.option("--dry-run", is_flag=True, help="Print the job script and start nothing.")
def cluster(
    source: str | None,
    config_name: str,
    minimum: int | None,
    maximum: int | None,
    name: str | None,
    scheduler_file: Path | None,
    dry_run: bool,
) -> None:
    """Start a cluster on a batch system that scales with the work.

    It prints the scheduler's address and a line for each change.  Ctrl-C ends it and its jobs.

    \b
    dask ferro cluster --config slurm-gpu --minimum 0 --maximum 16
    dask ferro cluster --config ./mine.yaml --dry-run
    """
    if source is not None:
        use(source)
    if dry_run:
        printed = scripts(config_name=config_name)
        for pool, script in printed.items():
            # The only one can be submitted as it is.
            click.echo((f"# ---- pool {pool}\n" if len(printed) > 1 else "") + script)
        return
    # One name for both: workers are found in the queue by the name that Dask shows.
    named = {} if name is None else {"name": name, "job_name": name}
    bounds = bounds_of(minimum, maximum)
    workers = f"{bounds['minimum']:g} to {bounds['maximum']:g}"

    def started(running: Any) -> None:
        dashboard = running.dashboard_link or "none"
        print_facts(
            console(), {"scheduler": running.scheduler_address, "dashboard": dashboard, "workers": workers}
        )

    stopped_by = run_foreground(bounds, started, click.echo, scheduler_file, config_name=config_name, **named)
    if stopped_by is None:
        # Not an error: a client asked for it.
        click.echo("a client shut the cluster down", err=True)
    else:
        exit_with(128 + stopped_by, f"stopped by {stopped_by.name}")
