"""`dask ferro config`: its arguments.  Imported by every `dask` command, so it imports click alone."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Command, leave

if TYPE_CHECKING:
    from dask_ferro.config import Row


@click.command(cls=Command)
@click.argument("prefix", default="")
@click.option("--jobs", metavar="NAME|FILE", help="A job configuration: what it sets is shown.")
@click.option("--explain", is_flag=True, help="Print what each option does, too.")
@click.option("--changed", is_flag=True, help="Only options that were set somewhere, to whatever value.")
@arguments.as_json
@click.option("--markdown", is_flag=True, help="Print the page docs/options.md: the defaults, explained.")
@arguments.debug
def config(
    prefix: str, jobs: str | None, explain: bool, changed: bool, as_json: bool, markdown: bool, debug: bool
) -> None:
    """Print all options: values, units, defaults, and where each was set.

    Those of Dask's configuration, section `ferro`, and the keywords of a cluster on a batch system, as a job
    configuration has them (--jobs) or with their defaults.  PREFIX is the beginning of a key, such as scheduler,
    elastic.failures or cluster.patience.  Keys and values that are wrong are told after the table, and end the command
    with status 2.

    \b
    dask ferro config scheduler --explain
    dask ferro config cluster --jobs slurm-gpu
    DASK_FERRO__CACHE__BYTES=4GiB dask ferro config --changed
    """
    from dask_ferro import config as configuration
    from dask_ferro.errors import ConfigError
    from dask_ferro.runtime.jobs.job_config import load
    from dask_ferro.views.options import keyword_rows, of_job, page, show_options
    from dask_ferro.views.terminal import show_wide

    if markdown:
        click.echo(page(), nl=False)
        return
    job = load(jobs) if jobs else None
    options, keywords = configuration.rows(), keyword_rows(job)
    # Such a file sets options for its own cluster alone, which Dask's configuration here knows nothing of.
    if job:
        options = of_job(options, job)
    shown = {"options": _beginning(options, prefix), "keywords": _beginning(keywords, prefix)}
    if not any(shown.values()):
        keys = [row.key for row in (*options, *keywords)]
        raise ConfigError(f"no option begins with {prefix!r}{configuration.suggested(prefix, keys)}")
    if changed:
        shown = {title: _set(rows) for title, rows in shown.items()}
    wrong = configuration.problems()
    if as_json:
        told = {title: list(map(configuration.Row._asdict, rows)) for title, rows in shown.items()}
        click.echo(json.dumps({**told, "problems": wrong}, default=str))
    for title, rows in shown.items():
        if rows and not as_json:
            show_wide(partial(show_options, title=title, rows=rows, explain=explain))
    # Told last: what is wrong in one section does not hide the values of all others.
    if wrong:
        leave(2, "\n".join(f"dask ferro: configuration {clause}" for clause in wrong), debug=debug)


def _beginning(rows: list[Row], prefix: str) -> list[Row]:
    wanted = _plain(prefix)
    return [row for row in rows if _plain(row.key).startswith(wanted)]


def _set(rows: list[Row]) -> list[Row]:
    from dask_ferro.origins import DEFAULT

    return [row for row in rows if row.origin != DEFAULT]


def _plain(key: str) -> str:
    """Return a key without the section's name, hyphens for underscores."""
    return key.removeprefix("ferro").removeprefix(".").replace("_", "-")
