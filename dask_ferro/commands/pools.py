"""`dask ferro pools`: show and change the pools of a running cluster of batch jobs.

Every `dask` command imports this module, so it imports only click.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Group


class _KeyValue(click.ParamType):
    """An argument of the form KEY=VALUE, the value in YAML."""

    name = "option"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        import yaml

        key, equals, text = value.partition("=")
        if not equals or not key.strip():
            self.fail(f"{value!r} is not of the form KEY=VALUE", param, ctx)
        try:
            read = yaml.safe_load(text)
        except yaml.YAMLError:
            self.fail(f"{value!r}: the value is not YAML", param, ctx)
        # YAML reads 12:00:00 as a number of base 60.
        is_time = ":" in text and isinstance(read, int | float)
        # Keys are written as in a job configuration, or as in Python.
        return key.strip().replace("-", "_"), text.strip() if is_time else read


def _there(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that select the cluster."""
    # Both to the group and to each command, since users write them before or after the command's name.
    for option in (arguments.debug, arguments.as_json, arguments.scheduler_file, arguments.scheduler):
        command = option(command)
    return command


@click.group(cls=Group)
@_there
@click.pass_context
def pools(ctx: click.Context, /, **there: Any) -> None:
    """Show and change the pools of a running cluster of batch jobs.

    Without --scheduler and --scheduler-file, DASK_SCHEDULER_ADDRESS has the scheduler's address.

    \b
    dask ferro pools --scheduler tcp://host:8786 list
    dask ferro pools --scheduler-file scheduler.json add gpu queue=gpu cores=4 maximum=2
    dask ferro pools --scheduler-file scheduler.json pause gpu
    """
    ctx.obj = there


@pools.command(name="list")
@_there
@click.pass_obj
def list_(before: Mapping[str, Any], /, **there: Any) -> None:
    """List the pools with their states, jobs and bounds, and why a pool is closed."""
    _call(before, there, "list")


@pools.command()
@click.argument("name")
@click.argument("options", nargs=-1, type=_KeyValue(), metavar="[KEY=VALUE]...")
@_there
@click.pass_obj
def add(before: Mapping[str, Any], /, name: str, options: tuple[tuple[str, Any], ...], **there: Any) -> None:
    """Add the pool NAME. KEY=VALUE sets an option of its jobs that differs from the cluster's, in YAML (times plain).

    SLURM is asked first whether it would ever start such a job (`sbatch --test-only`).

    \b
    dask ferro pools add gpu queue=gpu maximum=4 'job_extra_directives=["--gres=gpu:1"]'
    """
    _call(before, there, "add", name, dict(options))


def _order(what: str, told: str) -> None:
    def order(before: Mapping[str, Any], /, name: str, **there: Any) -> None:
        _call(before, there, what, name)

    order.__doc__ = told
    pools.command(name=what)(click.argument("name")(_there(click.pass_obj(order))))


_order("remove", "Remove the pool NAME: its jobs finish their tasks, move their results to others, and end.")
_order(
    "pause", "Submit no more jobs of the pool NAME; running jobs go on, and pending ones stay in the queue."
)
_order("resume", "Submit jobs of the pool NAME again, whether it was paused or closed by failures.")


def _call(
    before: Mapping[str, Any],
    there: Mapping[str, Any],
    what: str,
    name: str = "",
    options: Mapping[str, Any] | None = None,
) -> None:
    import asyncio
    import json

    from dask_ferro.runtime.pools.rpc import call
    from dask_ferro.runtime.telemetry.top import where
    from dask_ferro.views.pools import show_pools
    from dask_ferro.views.terminal import console

    # Options after the command's name win over those before it.
    given = {key: there[key] or before[key] for key in there}
    rows = asyncio.run(call(where(given["scheduler"], given["scheduler_file"]), what, name, options))
    if given["as_json"]:
        click.echo(json.dumps({"pools": rows}))
    else:
        show_pools(console(), rows)
