"""`dask ferro pools`: its arguments.  Imported by every `dask` command, so it imports click alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from dask_ferro.commands import arguments
from dask_ferro.commands.faults import Group


class _KeyValue(click.ParamType):
    """KEY=VALUE, the value in YAML."""

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
    """Add the options that say which cluster is meant, before or behind the order."""
    # Each command has them, and so has the group: people write them in either place.
    command = arguments.scheduler_file(arguments.as_json(command))
    return click.option("--scheduler", metavar="ADDRESS", help="Of the cluster's scheduler.")(command)


@click.group(cls=Group)
@_there
@click.pass_context
def pools(ctx: click.Context, /, **there: Any) -> None:
    """Show and change the pools of a running cluster of batch jobs.

    Without --scheduler and --scheduler-file, the cluster is that of DASK_SCHEDULER_ADDRESS.

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
    """Show them: whether one is open, its jobs, its bounds, and why it is closed."""
    _call(before, there, "list")


@pools.command()
@click.argument("name")
@click.argument("options", nargs=-1, type=_KeyValue(), metavar="[KEY=VALUE]...")
@_there
@click.pass_obj
def add(before: Mapping[str, Any], /, name: str, options: tuple[tuple[str, Any], ...], **there: Any) -> None:
    """Add the pool NAME: options of its jobs that are others than the cluster's, values in YAML, times as they are.

    SLURM is asked first whether it would start such jobs.

    \b
    dask ferro pools add gpu queue=gpu maximum=4 'job_extra_directives=["--gres=gpu:1"]'
    """
    _call(before, there, "add", name, dict(options))


def _order(what: str, told: str) -> None:
    def order(before: Mapping[str, Any], /, name: str, **there: Any) -> None:
        _call(before, there, what, name)

    order.__doc__ = told
    pools.command(name=what)(click.argument("name")(_there(click.pass_obj(order))))


_order("remove", "Remove the pool NAME: its jobs end what they run, and hand over what they hold.")
_order(
    "pause", "Ask for no more jobs of the pool NAME; those that there are go on, and those in the queue stay."
)
_order("resume", "Ask for jobs of the pool NAME again, whether it was paused or failures closed it.")


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

    # What stands behind the order wins over what stands before it.
    given = {key: there[key] or before[key] for key in there}
    rows = asyncio.run(call(where(given["scheduler"], given["scheduler_file"]), what, name, options))
    if given["as_json"]:
        click.echo(json.dumps({"pools": rows}))
    else:
        show_pools(console(), rows)
