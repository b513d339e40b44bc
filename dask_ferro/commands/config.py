"""`dask ferro config`: its arguments.  Imported by every `dask` command, so it imports click alone."""

from __future__ import annotations

import json

import click

from dask_ferro.commands.faults import Command, leave


@click.command(cls=Command)
@click.argument("prefix", default="")
@click.option("--explain", is_flag=True, help="Print what each option does, too.")
@click.option("--changed", is_flag=True, help="Only options that were set somewhere, to whatever value.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--markdown", is_flag=True, help="Print the page docs/options.md: the defaults, explained.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def config(prefix: str, explain: bool, changed: bool, as_json: bool, markdown: bool, debug: bool) -> None:
    """Print the options of Dask's configuration, section `ferro`: values, units, defaults, and where each was set.

    PREFIX is the beginning of a key, such as scheduler or elastic.failures.  Keys and values that are wrong are told
    after the table, and end the command with status 2.

    \b
    dask ferro config scheduler --explain
    DASK_FERRO__CACHE__BYTES=4GiB dask ferro config --changed
    """
    from dask_ferro import config as configuration
    from dask_ferro.errors import ConfigError
    from dask_ferro.origins import DEFAULT
    from dask_ferro.views.options import page, show_options
    from dask_ferro.views.terminal import show_wide

    if markdown:
        click.echo(page(), nl=False)
        return
    wanted = prefix.removeprefix("ferro").removeprefix(".").replace("_", "-")
    rows = [row for row in configuration.rows() if row.key.startswith(wanted)]
    if not rows:
        raise ConfigError(f"no option begins with {prefix!r}{configuration.suggested(prefix)}")
    if changed:
        rows = [row for row in rows if row.origin != DEFAULT]
    wrong = configuration.problems()
    if as_json:
        click.echo(json.dumps({"options": [row.as_dict() for row in rows], "problems": wrong}, default=str))
    else:
        show_wide(lambda out: show_options(out, rows, explain))
    if wrong:
        leave(2, "\n".join(f"dask ferro: configuration {clause}" for clause in wrong), debug=debug)
