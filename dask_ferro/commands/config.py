"""`dask ferro config`: print all options.  Every `dask` command imports this module, so it imports only click."""

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
@arguments.job_configuration("Show the values that a job configuration sets.")
@click.option("--explain", is_flag=True, help="Also print what each option does.")
@click.option("--changed", is_flag=True, help="Show only options that were set somewhere.")
@arguments.as_json
@click.option("--markdown", is_flag=True, help="Print the page docs/options.md: the defaults, explained.")
@arguments.debug
def config(
    prefix: str, source: str | None, explain: bool, changed: bool, as_json: bool, markdown: bool, debug: bool
) -> None:
    """Print all options with values, units, defaults and origins.

    These are the section `ferro` of Dask's configuration, and the keywords of a cluster on a batch system, with the
    values of a job configuration (--config) or their defaults.  PREFIX is the beginning of a key, such as scheduler,
    elastic.failures or cluster.patience.  Wrong keys and values are listed after the table; the exit status is then 2.

    \b
    dask ferro config scheduler --explain
    dask ferro config cluster --config slurm-gpu
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
    job = load(source) if source else None
    options, keywords = configuration.rows(), keyword_rows(job)
    # The file sets options for its own cluster only; Dask's configuration in this process does not have them.
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
    # Last, so that an error in one section does not hide the values of the others.
    if wrong:
        leave(2, "\n".join(f"dask ferro: configuration {clause}" for clause in wrong), debug=debug)


def _beginning(rows: list[Row], prefix: str) -> list[Row]:
    wanted = _plain(prefix)
    return [row for row in rows if _plain(row.key).startswith(wanted)]


def _set(rows: list[Row]) -> list[Row]:
    from dask_ferro.origins import DEFAULT

    return [row for row in rows if row.origin != DEFAULT]


def _plain(key: str) -> str:
    """Return a key without the section's name, underscores replaced by hyphens."""
    return key.removeprefix("ferro").removeprefix(".").replace("_", "-")
