"""`dask ferro config`: print all options.  Every `dask` command imports this module, so it imports only click."""

from __future__ import annotations

import json
from functools import partial

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Command, leave


@click.command(cls=Command)
@click.argument("prefix", default="")
@click.option("--changed", is_flag=True, help="Show only options that differ from their defaults.")
@arguments.as_json
@click.option("--markdown", is_flag=True, help="Print the page docs/options.md: the defaults, explained.")
@arguments.debug
def config(prefix: str, changed: bool, as_json: bool, markdown: bool, debug: bool) -> None:
    """Print all options with values, units and defaults.

    These are the section `ferro` of Dask's configuration.  PREFIX is the beginning of a key, such as scheduler or
    elastic.failures.  Wrong keys and values are listed after the table; the exit status is then 2.

    \b
    dask ferro config scheduler
    DASK_FERRO__CACHE__BYTES=4GiB dask ferro config --changed
    """
    from dask_ferro import config as configuration
    from dask_ferro.errors import ConfigError, did_you_mean
    from dask_ferro.options import OPTIONS
    from dask_ferro.views.options import page, show_options
    from dask_ferro.views.terminal import show_wide

    # Without the current values, and so without what is wrong with them.
    if markdown:
        click.echo(page(), nl=False)
        return
    plain = prefix.removeprefix(f"{configuration.SECTION}.").replace("_", "-")
    keys = [key for key in OPTIONS if key.startswith(plain)]
    if not keys:
        close = did_you_mean(plain, [*OPTIONS, *(key.partition(".")[0] for key in OPTIONS)])
        raise ConfigError(f"no option begins with {prefix!r}{close}; `dask ferro config` prints all of them")
    values = {key: configuration.get(key) for key in keys}
    shown = [key for key in keys if not changed or values[key] != OPTIONS[key].default]
    wrong = configuration.problems()
    if as_json:
        rows = [
            {"key": f"{configuration.SECTION}.{key}", "value": values[key], "default": OPTIONS[key].default}
            | {"unit": OPTIONS[key].unit, "help": OPTIONS[key].help, "variable": configuration.variable(key)}
            for key in shown
        ]
        click.echo(json.dumps({"options": rows, "problems": wrong}, default=str))
    elif shown:
        show_wide(partial(show_options, values={key: values[key] for key in shown}))
    # Last, so that an error in one section does not hide the values of the others.
    if wrong:
        leave(2, "\n".join(f"dask ferro: configuration {clause}" for clause in wrong), debug=debug)
